// Threads that push requests as kernels do, and what came of it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/proxy/ring.h"
#include "studies/requests/soak.h"

namespace offcore {

struct RingTrial {
  uint64_t wrong = 0;  // requests lost, doubled, out of their producer's order, or torn
  int64_t time_ns = 0;
};

// `requests` in all, a third of them of two words, by racing producers through one ring: each by
// itself, or that many as the lanes of a warp, which push as one.
RingTrial trial_ring(uint32_t producers, uint64_t requests, uint32_t slots, uint32_t lanes);

// A rank of an exchange: buffer 0 is sent, buffer 1 is received.
struct ExchangeEnd {
  const proxy::RequestPort* port;
  std::byte* send;
  const std::byte* receive;
};

// In each round every producer of every rank writes a chunk of its own for each peer and puts it
// with a signal; when all have come, the peer looks at every byte. Buffers have ranks x producers
// chunks, of which rank r fills those from r x producers on. Returns how many chunks were wrong,
// or the calls that failed.
uint64_t trial_exchange(const std::vector<ExchangeEnd>& ends, uint32_t producers, uint64_t rounds,
                        uint64_t chunk_bytes);

// A soak from one rank to another by a thread a lane, each with one that watches its clock; null:
// nobody does. How many of them failed.
uint64_t trial_soak(const proxy::RequestPort& sender, const proxy::RequestPort& receiver,
                    const SoakShape& shape, const proxy::Word* clocks);

}  // namespace offcore
