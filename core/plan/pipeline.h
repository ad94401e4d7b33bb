// Staged moves in chunks: whatever goes over a link, is copied out of a slot and signals a free
// part of it, overlaps, and a slot holds a few chunks rather than the whole output.
//
// Every rank pushes what a peer gets in chunks into the peer's slot, which is a ring of kRingDepth
// chunks a sender. The peer's queue that drains copies each chunk on into the output and signals
// when its place is free again. What a rank keeps has a queue of its own where it is large.
#pragma once
#include "core/plan/plan.h"

namespace offcore {

// The program for moves that are staged, in chunks of `chunk_bytes`; 0: the cheapest by the cost
// model. Throws unsupported as lower does.
Program lower_pipelined(const Moves& moves, uint64_t chunk_bytes, const Machine& machine,
                        const ProtocolForm& form);

}  // namespace offcore
