// Simulated GPU threads and an engine on the ring of core/proxy/ring.h, in virtual time: the calls
// of device.cuh and the engine's reader as they are, on memory whose operations take their time.
// What a producer writes to the host arrives late and out of order, and so does the replica of the
// head. One thread runs at a time, whose next operation is due first; a seed decides what chance
// decides. The same seed gives the same run.
#pragma once
#include <cstdint>

namespace offcore {

struct SimulatedRing {
  uint64_t wrong = 0;       // requests lost, doubled, torn, or out of their producer's order
  int64_t time_ns = 0;      // of the GPU
  uint64_t operations = 0;  // of memory
  uint64_t waits = 0;       // looks of producers that found the ring full
};

// `requests` of each producer, a third of them of two words.
SimulatedRing simulate_ring(uint32_t producers, uint64_t requests, uint32_t slots, uint64_t seed);

}  // namespace offcore
