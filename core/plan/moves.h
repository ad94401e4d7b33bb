// Which bytes must get where: what, not how. Each collective is one function here; lower() knows
// none of them.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/ir/program.h"

namespace offcore {

// Of one operation: keeps every sum of offsets inside 64 bits.
inline constexpr uint64_t kMovedBytesMax = uint64_t{1} << 48;

struct Move {
  Slice dst;
  Slice src;
  uint64_t bytes = 0;

  friend bool operator==(const Move&, const Move&) = default;
};

struct Moves {
  std::string op;
  Rank ranks = 0;
  bool in_place = false;
  bool full_exchange = false;  // every rank hears from every rank, so finishing proves all entered
  // What the operation does at any size: calls of no bytes may name the variants that others may.
  bool one_to_many = false;     // the same bytes go to several peers
  bool exchange = false;        // two ranks swap ranges in place
  std::vector<Buffer> buffers;  // [kFlagBuffer] = flags; then `in` (unless in place), then `out`
  std::vector<Move> moves;      // no empty ones
};

// Sizes are bytes. `out` is a window (peers push into it), `in` is local to its rank; in place
// there is only `out`. Offsets of the _v forms are the running sums of the counts.

// counts[r]: bytes that rank r contributes; out holds all of them in rank order on every rank.
Moves moves_all_gather(std::span<const uint64_t> counts, bool in_place);
// counts[r * ranks + q]: bytes that rank r sends to rank q. In place needs equal counts and swaps.
Moves moves_all_to_all(Rank ranks, std::span<const uint64_t> counts, bool in_place);
Moves moves_broadcast(Rank ranks, Rank root, uint64_t bytes, bool in_place);
// counts[q]: bytes for (scatter) or from (gather) rank q; the root's side is packed.
Moves moves_scatter(Rank root, std::span<const uint64_t> counts);
Moves moves_gather(Rank root, std::span<const uint64_t> counts);
// Any moves between given buffers (kFlagBuffer's entry is added), merged. Throws invalid, naming
// the move, where one leaves its buffers.
Moves moves_batch(Rank ranks, std::vector<Buffer> buffers, std::vector<Move> moves);
// The same as they are given, empty ones too.
Moves moves_listed(Rank ranks, std::vector<Buffer> buffers, std::vector<Move> moves);

// Joins neighbours: moves that are contiguous on both sides become one. Drops empty moves.
std::vector<Move> merge(std::vector<Move> moves);

}  // namespace offcore
