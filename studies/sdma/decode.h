// From dwords back to packets, and from packets back to a program's commands.
//
// decode(encode(p)) is p where every command of p is one packet, or a plain copy of rows that are
// one each: where the program is legalized for a machine with SDMA's commands. What has no command
// (an atomic, a trap, a fill, a broadcast to places that no step joins) is an error. Every error
// names the dword.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/backend/sdma/encode_program.h"
#include "core/ir/program.h"
#include "studies/sdma/unpack.h"

namespace offcore::sdma {

struct Decoded {
  Packet packet;
  uint32_t dword = 0;  // its first
};

// All packets, without nops. Throws invalid.
std::vector<Decoded> decode(std::span<const uint32_t> dwords);

// Tells which place of a program's buffers an address is.
class Places {
 public:
  Places(const Program& program, const Addresses& addresses);
  // Throws invalid where `bytes` bytes from there on do not lie in one buffer. Flags: a whole word.
  Slice find(uint64_t address, uint64_t bytes) const;

 private:
  struct Region {
    uint64_t begin = 0;
    uint64_t last = 0;
    BufferId buffer = 0;
    Rank rank = 0;
  };
  std::vector<Region> regions_;  // by begin; of no two ranks or buffers may one lie in another
};

// A queue's commands. Throws invalid or unsupported.
std::vector<Command> decode(std::span<const uint32_t> dwords, const Program& program,
                            const Addresses& addresses);

// The program whose engine queues are what these streams say.
Program decode(const std::vector<EncodedQueue>& streams, Program program,
               const Addresses& addresses);

// Addresses of a program's own making, for where it runs nowhere: rank r's buffers from
// (r + 1) << 40 on, the host's from 1 << 39 on, each from the next multiple of 2 MiB; the flags
// first, then in the order of buffers. Scratch and timestamps lie from 1 << 38 on.
Addresses model_addresses(const Program& program);

}  // namespace offcore::sdma
