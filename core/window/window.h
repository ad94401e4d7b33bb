// A window: memory of equal size on every rank, mapped by every rank.
//
// Created by all ranks together or by none: a rank that fails makes all of them fail, and what was
// made is freed. The window keeps its memory mapped for as long as anyone holds it. Any thread may
// be the last to: so whoever was handed one by Python holds the window itself (shared_from_this),
// and not a Python object, which only a holder of the interpreter's lock may let go of.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/backend/backend.h"
#include "core/base/fork.h"
#include "core/window/rendezvous.h"

namespace offcore {

// What one local rank gives to a window of memory that others have allocated.
struct GivenMemory {
  std::byte* data = nullptr;
  uint64_t bytes = 0;
  std::string refusal = {};  // why it gives none; empty: it does
};

class Window : public std::enable_shared_from_this<Window>, public OfProcess {
 public:
  // Collective. With a rendezvous this process holds its rank's share and maps the others'; without
  // one (null) all ranks are local to the memory. Throws memory, mismatch (naming the sizes),
  // unsupported (memory that other processes cannot map), or what the rendezvous throws.
  static std::shared_ptr<Window> create(Memory& memory, Rendezvous* rendezvous, Rank ranks,
                                        uint64_t bytes, const Deadline& deadline);

  // Likewise, of memory that others have allocated, which `keep` keeps: one a local rank. Throws
  // mismatch, invalid or unsupported (the backend has no ForeignMemory, or it refuses this).
  static std::shared_ptr<Window> hold(Backend& backend, Rendezvous* rendezvous, Rank ranks,
                                      const std::vector<GivenMemory>& given,
                                      const std::shared_ptr<void>& keep, const Deadline& deadline);

  Rank ranks() const { return static_cast<Rank>(shares_.size()); }
  uint64_t bytes() const { return bytes_; }
  // This process's mapping of the rank's share; null for phantom memory.
  std::byte* base(Rank rank) const { return shares_[rank].data; }
  // Copies between a local rank's bytes from `offset` on and this process's memory; done on return.
  void read(void* dst, Rank rank, uint64_t offset, uint64_t bytes) const;
  void write(Rank rank, uint64_t offset, const void* src, uint64_t bytes) const;
  // The local rank's GPU, as the driver counts; -1: the memory is the host's.
  int device(Rank rank) const { return shares_[rank].port ? shares_[rank].port->device() : -1; }
  bool host_visible() const { return host_visible_; }  // to this process's CPUs
  bool strided() const { return strided_; }            // as Memory::map says
  bool registered() const {                            // memory that others have allocated
    return std::any_of(shares_.begin(), shares_.end(),
                       [](const Share& share) { return share.held != nullptr; });
  }
  bool phantom() const { return bytes_ > 0 && shares_[0].data == nullptr; }
  // Where [pointer, pointer + bytes) lies in the local rank's share, if all of it does. Memory that
  // others have allocated is asked for by their addresses, which may lead elsewhere by now.
  std::optional<uint64_t> contains(Rank rank, const void* pointer, uint64_t bytes) const;

 private:
  const Share& reachable(Rank rank, uint64_t offset, uint64_t bytes) const;
  Window(uint64_t bytes, std::vector<Share> shares, bool host_visible, bool strided)
      : OfProcess("the window"),
        bytes_(bytes),
        host_visible_(host_visible),
        strided_(strided),
        shares_(std::move(shares)) {}

  uint64_t bytes_;
  bool host_visible_;
  bool strided_;
  std::vector<Share> shares_;
};

}  // namespace offcore
