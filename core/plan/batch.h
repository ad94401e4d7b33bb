// Batches of copies that are made once: any moves, in no order, with one prologue and one epilogue
// for all of them (DMA-Latte section 6).
//
//   merge   moves that continue each other on both sides become one
//   fold    moves of equal size whose places are arithmetic progressions become one strided copy
//   bcst    one source to the same place on several ranks becomes one command (section 4.2)
//   queues  one engine, back to back, for small batches (section 4.4); engines by destination for
//           large ones, as many as the way there can feed
//
// Swaps (section 4.3) are made only of moves that ask for one: no copy can tell that it is half of
// a swap. What the machine lacks is expanded, as everywhere.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/machine/machine.h"
#include "core/plan/moves.h"

namespace offcore {

// Forces choices; what is left open follows the machine.
struct BatchPolicy {
  bool merge = true;
  std::optional<bool> fold;    // none: where the machine has strided copies and they are no slower
  uint32_t fold_rows_min = 4;  // fewer are not worth a command of another kind
  std::optional<bool> bcst;    // none: where the machine has it
  uint16_t engines = 0;        // of a rank, at most; 0: as the bytes of the batch say
  std::optional<uint64_t> b2b_bytes_max;  // none: the machine's
  // Single copies of a queue that are handed over at once (SubBatches); 0: no fences. None: the
  // machine's number.
  std::optional<uint32_t> sub_batch;
  bool timed = true;      // timestamps around the data of each queue
  bool captured = false;  // to be recorded in a graph
};

struct Batch {
  std::shared_ptr<const Program> program;
  uint32_t moves = 0;   // given
  uint32_t empty = 0;   // of no bytes
  uint32_t merged = 0;  // that became a part of another one
  uint32_t folded = 0;  // then: that became rows of strided copies
  uint32_t strided = 0;
  uint32_t bcst = 0;  // then: that became destinations of broadcasts
  uint32_t swaps = 0;
  uint64_t bytes = 0;  // given; a swap's count once
};

// `moves` as moves_listed returns them; `swaps`: indices of the moves that exchange their places.
// `seams`: places where memory begins that no command reaches from before it: a driver may refuse
// to write rows into several allocations, even where these lie at equal steps.
// Throws invalid, naming both moves, where one writes what another one reads or writes, and for a
// move across a seam.
Batch plan_batch(const Moves& moves, std::span<const uint32_t> swaps, const BatchPolicy& policy,
                 const Machine& machine, std::span<const Slice> seams = {});

}  // namespace offcore
