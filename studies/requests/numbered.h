// Requests that say who pushed them, and as which: a producer's number is the buffer that it names,
// its request's number is what it would copy. Every third has two words.
#pragma once
#include <cstdint>
#include <vector>

#include "core/proxy/ring.h"

namespace offcore {

inline constexpr uint64_t kWide = 3;

// How many were refused.
template <typename Calls>
uint64_t push_numbered(const proxy::RequestPort& port, uint32_t producer, uint64_t count) {
  uint64_t refused = 0;
  for (uint64_t number = 0; number < count; ++number) {
    const proxy::PutTicket ticket =
        number % kWide == 0
            ? Calls::put_bytes(port, 1, producer, number, 0, ~number & proxy::kOffsetMax, 1)
            : Calls::put(port, 1, producer, 0, number & proxy::kChunksMax, 1);
    refused += ticket.fault != proxy::kNone;
  }
  return refused;
}

// Whether it is the next of its producer, which is counted.
inline bool is_numbered(const proxy::Word (&words)[2], std::vector<uint64_t>& next) {
  const uint64_t producer = words[0] >> 48 & 63;
  if (producer >= next.size()) return false;
  const uint64_t number = next[producer]++;
  const unsigned op = proxy::op_of(words[0]);
  if (number % kWide != 0) {
    const proxy::Word chunk = words[0] >> proxy::kChunkBits & proxy::kChunksMax;
    return op == proxy::kPut && chunk == (number & proxy::kChunksMax);
  }
  const proxy::Word src = words[0] >> 4 & proxy::kOffsetMax;
  return op == proxy::kPutBytes && words[1] >> proxy::kLowBytesBits == number &&
         src == (~number & proxy::kOffsetMax);
}

}  // namespace offcore
