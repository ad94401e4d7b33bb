// Where pieces of host memory meet that are registered each for itself: a driver refuses copies
// that go over such a seam.
#pragma once
#include <cstdint>

#include "core/ir/program.h"

namespace offcore::kv {

struct Seams {
  uint64_t first = 0;
  uint64_t step = 0;  // 0: there are none

  // The bytes from an address to the next one.
  uint64_t until(uint64_t at) const {
    if (step == 0) return UINT64_MAX;
    return step - (at % step + step - first % step) % step;
  }
};

// The first `rows` rows of a copy, or the first `bytes` of its only one; it has the rest.
inline Command taken(Command& copy, uint32_t rows, uint64_t bytes) {
  const bool whole = bytes == copy.bytes;
  Command first = copy;
  first.rows = rows;
  first.bytes = bytes;
  if (rows == 1) first.dst_step = first.src_step = 0;
  copy.dst.offset += whole ? rows * static_cast<uint64_t>(copy.dst_step) : bytes;
  copy.src.offset += whole ? rows * static_cast<uint64_t>(copy.src_step) : bytes;
  if (whole) {
    copy.rows -= rows;
    if (copy.rows == 1) copy.dst_step = copy.src_step = 0;
  } else {
    copy.bytes -= bytes;
  }
  return first;
}

// Calls `found` with the copies that one is cut into, whose end in host memory is a buffer's
// address.
template <typename Found>
void each_between(const Seams& seams, BufferId memory, Command copy, const Found& found) {
  const bool to = copy.dst.buffer == memory;
  const Slice& at = to ? copy.dst : copy.src;
  while (copy.rows > 1) {
    const auto step = static_cast<uint64_t>(to ? copy.dst_step : copy.src_step);
    const uint64_t room = seams.until(at.offset);
    if ((copy.rows - 1) * step + copy.bytes <= room) return found(copy);
    if (copy.bytes <= room) {
      found(taken(copy, static_cast<uint32_t>((room - copy.bytes) / step + 1), copy.bytes));
    } else {
      each_between(seams, memory, taken(copy, 1, copy.bytes), found);
    }
  }
  for (uint64_t room = 0; (room = seams.until(at.offset)) < copy.bytes;) {
    found(taken(copy, 1, room));
  }
  found(copy);
}

}  // namespace offcore::kv
