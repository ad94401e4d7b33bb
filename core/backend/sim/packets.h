// A program on its way through packets: what a simulated engine fetches is what its queue's ring
// holds, and not the program that was loaded.
//
// The engine queues are encoded once, for addresses of the program's own making (so that phantom
// buffers do as well). Each launch replays the packets with its epoch, sends them through a ring
// that is smaller than most programs, and decodes what comes out. A command that is one packet
// comes back as itself: a legalized program runs as if it had been run directly, in every byte and
// nanosecond. Others come back as the packets that the machine needs for them.
#pragma once
#include <vector>

#include "core/backend/sdma/encode_program.h"
#include "core/backend/sdma/packet_ring.h"
#include "core/machine/machine.h"

namespace offcore::sim {

class PacketPath {
 public:
  // Throws what encode throws.
  PacketPath(const Program& program, const Machine& machine);

  // The program as its engines fetch it in a launch of this epoch.
  Program fetched(uint32_t epoch);

 private:
  std::vector<uint32_t> through_ring(const std::vector<uint32_t>& dwords);

  const Program& program_;
  sdma::Addresses addresses_;
  std::vector<sdma::EncodedQueue> streams_;
  std::vector<uint32_t> ring_dwords_;
  uint64_t rptr_ = 0;
  uint64_t wptr_ = 0;
  uint64_t doorbell_ = 0;
  sdma::PacketRing ring_;
};

}  // namespace offcore::sim
