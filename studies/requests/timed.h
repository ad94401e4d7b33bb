// What requests of this host's threads cost, and the same copies without requests: for
// `offcore gpu bench --backend host`. Buffer 0 is sent, buffer 1 is received. An empty answer, or
// 0 ns: a call has failed, which the engine's check() explains.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/proxy/ring.h"

namespace offcore {

// Round trips between a thread of each rank, each a put with a signal: ns, by the first clock.
std::vector<int64_t> time_trips(const proxy::RequestPort& first, const proxy::RequestPort& second,
                                uint64_t chunks, uint32_t rounds);

// The same by threads that copy for themselves, each to the other's memory, and raise a word.
std::vector<int64_t> time_plain_trips(std::byte* (&dsts)[2], const std::byte* (&srcs)[2],
                                      uint64_t bytes, uint32_t rounds);

// What a push takes its thread, and until the engine has taken it: ns each.
struct PushTimes {
  std::vector<int64_t> pushed;
  std::vector<int64_t> taken;
};
PushTimes time_pushes(const proxy::RequestPort& port, uint32_t rounds);

// Messages of so many chunks, `stride` chunks apart and round the buffer, pushed by many threads:
// ns until all have ended.
struct Messages {
  uint32_t threads = 1;
  uint64_t each = 1;
  uint64_t chunks = 1;
  uint64_t stride = 1;
  uint64_t chunks_of_buffer = 1;
};
int64_t time_messages(const proxy::RequestPort& port, const Messages& messages);

// The same number of bytes by a loop of memcpy.
int64_t time_copies(std::byte* dst, const std::byte* src, uint64_t bytes, uint64_t count,
                    uint64_t bytes_of_buffer);

}  // namespace offcore
