// Which collectives are taken from NCCL: a function of what all ranks know, so that they decide
// alike.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "core/comm/request.h"

namespace offcore::shim {

inline constexpr uint64_t kNever = UINT64_MAX;

// Whether a collective's memory lies in a window that all ranks registered.
enum class Form : uint8_t { plain, registered };

// From how many bytes of the whole array on a collective is ours: by OFFCORE_NCCL_MIN_BYTES, else
// by what was measured to be faster than NCCL with so many GPUs of that kind; never where nothing
// was.
class Policy {
 public:
  // Throws invalid, with the variable's name.
  static Policy of_environment();

  // `gpu`: as the driver names it.
  uint64_t least(Collective collective, Form form, const std::string& gpu, Rank ranks) const;
  // The same on any machine: what has fewer bytes need not be looked at.
  uint64_t floor(Collective collective) const;
  bool any_registered() const;
  // "reduce_scatter from 32 MiB, all_reduce from 64 MiB"; empty: nothing is taken.
  std::string describe(const std::string& gpu, Rank ranks) const;
  uint64_t digest() const;  // that of the other ranks must be the same

 private:
  using Key = std::pair<Collective, Form>;
  std::optional<std::map<Key, uint64_t>> given_;  // by the variable
};

std::string shown(uint64_t bytes);  // "16 MiB"

}  // namespace offcore::shim
