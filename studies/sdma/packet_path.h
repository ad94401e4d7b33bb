// A program on its way through packets: what a simulated engine fetches is what its queue's ring
// holds, and not the program that was loaded.
//
// The engine queues are encoded once, for addresses of the program's own making (so that phantom
// buffers do as well). Each launch replays the packets with its epoch, sends them through a ring
// that is smaller than most programs, and decodes what comes out. A command that is one packet
// comes back as itself: a legalized program runs as if it had been run directly, in every byte and
// nanosecond. Others come back as the packets that the machine needs for them.
#pragma once
#include "core/backend/options.h"
#include "core/machine/machine.h"

namespace offcore::sdma {

// The simulator's `fetch_path`. Throws unsupported for a machine without such engines; loading a
// program throws what encode throws.
sim::SimOptions::FetchPath through_packets(const Machine& machine);

}  // namespace offcore::sdma
