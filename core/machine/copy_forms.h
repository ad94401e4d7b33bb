// The forms of copies: one command of several rows, single ones, and single ones by calls of
// several. What plans and what encodes asks here, so that there is one answer.
#pragma once
#include <cstdint>
#include <span>

#include "core/ir/command.h"

namespace offcore {

// What rows of one command take, and as many single copies.
struct RowCosts {
  double call_ns = 0;  // the command, besides its rows
  double row_ns = 0;
  double single_ns = 0;

  bool strided_pays(uint64_t rows) const {
    const auto count = static_cast<double>(rows);
    return call_ns + count * row_ns <= count * single_ns;
  }
};

// Single copies of a queue are handed over in calls of `each`, the first one of `first` (0: as the
// others): a program has a fence between two calls.
class SubBatches {
 public:
  SubBatches() = default;
  explicit SubBatches(uint32_t each, uint32_t first = 0)
      : each_(each == 0 ? UINT32_MAX : each), first_(first == 0 ? each_ : first) {}

  // Whether the next copy begins a call, the very first one included.
  bool next_begins() {
    const uint32_t place = count_++;
    return place == 0 ? each_ != UINT32_MAX : place >= first_ && (place - first_) % each_ == 0;
  }

 private:
  uint32_t each_ = UINT32_MAX;
  uint32_t first_ = UINT32_MAX;
  uint32_t count_ = 0;
};

// Whether the group of data commands that begins here has so many single copies between the host
// and a rank that they go by calls of several, each up to a fence; else each has its own.
inline bool in_calls(std::span<const Command> rest, uint32_t call_min) {
  uint32_t copies = 0;
  for (const Command& command : rest) {
    if (copies == call_min) break;
    if (command.op == Op::fence) continue;  // where a call ends
    if (!moves_data(command.op)) break;
    copies +=
        command.rows == 1 && (command.dst.rank == kHostRank) != (command.src.rank == kHostRank);
  }
  return copies == call_min;
}

}  // namespace offcore
