// Groups one rank's moves into commands, by variant. This is where equal sources become bcst,
// mirrored moves become swap and arithmetic progressions become one strided copy.
#pragma once
#include <vector>

#include "core/machine/machine.h"
#include "core/plan/moves.h"
#include "core/plan/variant.h"

namespace offcore {

// Of what a rank keeps: below that a queue of its own costs more than it gains.
inline constexpr uint64_t kOwnQueueBytesMin = 128 << 10;

// The rank whose engines execute a move: pushes are far cheaper than pulls, so its source; a move
// from host memory runs on the device it goes to.
Rank executor_of(const Slice& dst, const Slice& src);

// Sorted so that every rank serves the one behind it first; each once.
std::vector<Rank> in_ring_order(std::vector<Rank> peers, Rank from, Rank ranks);

// A data command and the remote ranks whose memory it touches.
struct PlannedCopy {
  Command command;
  std::vector<Rank> peers;
};

// One entry a rank: the pieces that its engines execute, in order.
std::vector<std::vector<PlannedCopy>> group(const Moves& moves, Variant::Shape kind,
                                            const Machine& machine);

}  // namespace offcore
