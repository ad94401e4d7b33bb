// Two ranges of memory that change places.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace offcore {

// Where the ranges overlap the result is some bytes, and nothing else is touched.
inline void swap_bytes(std::byte* one, std::byte* other, uint64_t bytes) {
  std::byte piece[4096];
  for (uint64_t at = 0; at < bytes; at += sizeof(piece)) {
    const size_t count = std::min<uint64_t>(sizeof(piece), bytes - at);
    std::memcpy(piece, one + at, count);
    std::memmove(one + at, other + at, count);
    std::memcpy(other + at, piece, count);
  }
}

}  // namespace offcore
