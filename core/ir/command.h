// One DMA command: what an engine fetches, decodes and executes (DMA-Latte sections 3 and 4).
//
// A command names bytes symbolically (buffer, rank, offset), so one program serves all ranks and
// every launch. Invariants: 64 bytes, trivially copyable, dst before src, steps are signed.
#pragma once
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace offcore {

using Rank = uint16_t;
using BufferId = uint8_t;

inline constexpr Rank kHostRank = 0xffff;         // the host's memory rather than a device's
inline constexpr int64_t kRankStep = INT64_MIN;   // a step of one rank of the window, mod ranks
inline constexpr BufferId kFlagBuffer = 0;        // flag words; offsets and steps count WORDS
inline constexpr uint16_t kCallerQueue = 0xffff;  // the queue of the caller's thread or stream

enum class Op : uint8_t { copy, swap, poll, signal, timestamp, fence, reduce };

std::string_view to_string(Op op);

// A place in a buffer: bytes, or words when the buffer is kFlagBuffer.
struct Slice {
  uint64_t offset = 0;
  Rank rank = 0;
  BufferId buffer = 0;

  friend bool operator==(const Slice&, const Slice&) = default;
};

// Row k of a copy moves `bytes` from src + k * src_step to dst + k * dst_step; a step of kRankStep
// goes to the same offset of the next rank (the ring of ranks wraps). rows = 1 is a plain copy;
// src_step = 0 with dst_step = kRankStep is bcst, src_step = bytes with dst_step = kRankStep is
// fan.
//
//   copy       bytes, rows, both slices and steps
//   swap       like copy; exchanges the two ranges
//   poll       waits until row k of dst (a flag word) is >= value, cyclically, for every row.
//              Mode::capture: until it is value, and then sets it to 0 again, because a graph's
//              values repeat at each replay
//   signal     stores value into row k of dst (a flag word), after all earlier data of its queue
//   timestamp  records the time as the run's timestamp number `value`
//   fence      orders its queue and writes nothing
//   reduce     dst becomes what the program's reduction makes of `rows` sources of `bytes`: src
//              and on by src_step. Where `own` names a buffer, source number `value` is apart from
//              the others, at offset dst_step of that buffer. All are in the memory of the queue's
//              rank, and the queue is a caller's: cores do it. In order after all that its queue
//              did before. One source, and none apart: its bytes are copied as they are
struct Command {
  Slice dst;
  Slice src;
  uint64_t bytes = 0;
  int64_t dst_step = 0;
  int64_t src_step = 0;
  uint32_t rows = 1;
  uint16_t value = 0;
  Op op = Op::fence;
  BufferId own = kFlagBuffer;

  friend bool operator==(const Command&, const Command&) = default;
};
static_assert(sizeof(Command) == 64 && std::is_trivially_copyable_v<Command>);

// The data commands between two ordering commands form a group, which is unordered.
inline bool moves_data(Op op) { return op == Op::copy || op == Op::swap; }

// What reads and writes data in any way.
inline bool touches_data(Op op) { return moves_data(op) || op == Op::reduce; }

// Whether a reduce command copies its only source as it is.
inline bool copies_source(const Command& reduce) {
  return reduce.rows == 1 && reduce.own == kFlagBuffer;
}

// Where source `row` of a reduce command lies.
inline Slice source_of(const Command& reduce, uint32_t row) {
  if (reduce.own != kFlagBuffer && row == reduce.value) {
    return {static_cast<uint64_t>(reduce.dst_step), reduce.dst.rank, reduce.own};
  }
  const uint32_t step = reduce.own != kFlagBuffer && row > reduce.value ? row - 1 : row;
  Slice source = reduce.src;
  source.offset += static_cast<uint64_t>(reduce.src_step) * step;
  return source;
}

// The place of row `row` of a slice whose step is `step`, among `ranks` ranks.
inline Slice row_of(const Slice& slice, int64_t step, uint32_t row, Rank ranks) {
  Slice result = slice;
  if (step == kRankStep) {
    result.rank = static_cast<Rank>((slice.rank + row) % ranks);
  } else {
    result.offset += static_cast<uint64_t>(step) * row;
  }
  return result;
}

}  // namespace offcore
