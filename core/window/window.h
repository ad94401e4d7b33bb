// A window: memory of equal size on every rank, mapped by every rank.
//
// Created by all ranks together or by none: a rank that fails makes all of them fail, and what was
// made is freed. The window keeps its memory mapped for as long as anyone holds it.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/backend/backend.h"
#include "core/window/rendezvous.h"

namespace offcore {

class Window {
 public:
  // Collective. With a rendezvous this process holds its rank's share and maps the others'; without
  // one (null) all ranks are local to the backend. Throws memory, mismatch (naming the sizes),
  // unsupported (memory that other processes cannot map), or what the rendezvous throws.
  static std::shared_ptr<Window> create(Backend& backend, Rendezvous* rendezvous, Rank ranks,
                                        uint64_t bytes, const Deadline& deadline);

  Rank ranks() const { return static_cast<Rank>(shares_.size()); }
  uint64_t bytes() const { return bytes_; }
  // This process's mapping of the rank's share; null for phantom memory.
  std::byte* base(Rank rank) const { return shares_[rank].data; }
  bool phantom() const { return bytes_ > 0 && shares_[0].data == nullptr; }
  // Where [pointer, pointer + bytes) lies in the rank's share, if all of it does.
  std::optional<uint64_t> contains(Rank rank, const void* pointer, uint64_t bytes) const;

 private:
  Window(uint64_t bytes, std::vector<Share> shares) : bytes_(bytes), shares_(std::move(shares)) {}

  uint64_t bytes_;
  std::vector<Share> shares_;
};

}  // namespace offcore
