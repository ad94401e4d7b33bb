#include "core/plan/group.h"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

#include "core/base/error.h"
#include "core/plan/plan.h"
#include "core/plan/progression.h"

namespace offcore {
namespace {

void note_peer(PlannedCopy& piece, Rank executor, Rank touched) {
  if (touched == executor || touched == kHostRank) return;
  if (std::find(piece.peers.begin(), piece.peers.end(), touched) == piece.peers.end()) {
    piece.peers.push_back(touched);
  }
}

PlannedCopy plain(const Move& move, Rank executor) {
  PlannedCopy piece{
      .command = {.dst = move.dst, .src = move.src, .bytes = move.bytes, .op = Op::copy}};
  note_peer(piece, executor, move.dst.rank);
  note_peer(piece, executor, move.src.rank);
  return piece;
}

struct RowStep {
  int64_t dst = 0;
  int64_t src = 0;
  friend bool operator==(const RowStep&, const RowStep&) = default;
};

// The step from one slice to the next, when one command can take it.
std::optional<int64_t> step_between(const Slice& from, const Slice& to, Rank ranks) {
  if (from.buffer != to.buffer) return std::nullopt;
  if (from.rank == to.rank) return static_cast<int64_t>(to.offset - from.offset);
  const bool follows = from.rank != kHostRank && from.offset == to.offset;
  return follows && (from.rank + 1) % ranks == to.rank ? std::optional(kRankStep) : std::nullopt;
}

// Moves that follow each other at one step are rows of one command; `joins` says which of two in a
// row may be.
template <typename Joins>
std::vector<PlannedCopy> fold(const std::vector<Move>& moves, Rank executor, Rank ranks,
                              size_t rows_max, const Joins& joins) {
  std::vector<PlannedCopy> pieces;
  for (size_t i = 0; i < moves.size();) {
    const auto step_of = [&](size_t row) -> std::optional<RowStep> {
      const Move& from = moves[i + row];
      const Move& to = moves[i + row + 1];
      if (from.bytes != to.bytes || !joins(from, to)) return std::nullopt;
      const auto dst = step_between(from.dst, to.dst, ranks);
      const auto src = step_between(from.src, to.src, ranks);
      if (!dst || !src) return std::nullopt;
      const bool by_rank = *dst == kRankStep || *src == kRankStep;
      if (by_rank && row + 1 >= ranks) return std::nullopt;
      return RowStep{*dst, *src};
    };
    const size_t rows = run_of(std::min(moves.size() - i, rows_max), step_of);
    PlannedCopy& piece = pieces.emplace_back(plain(moves[i], executor));
    if (rows > 1) {
      const RowStep step = *step_of(0);
      piece.command.dst_step = step.dst;
      piece.command.src_step = step.src;
      piece.command.rows = static_cast<uint32_t>(rows);
    }
    for (size_t row = 1; row < rows; ++row) note_peer(piece, executor, moves[i + row].dst.rank);
    i += rows;
  }
  return pieces;
}

// Both the ring order and the order of ranks can be an arithmetic progression (an all-to-all wraps
// in ring order, a gather of peers without the own chunk wraps in the order of ranks).
std::vector<PlannedCopy> fan(std::vector<Move> moves, Rank executor, Rank ranks) {
  const auto any = [](const Move&, const Move&) { return true; };
  std::vector<PlannedCopy> ring = fold(moves, executor, ranks, SIZE_MAX, any);
  std::stable_sort(moves.begin(), moves.end(),
                   [](const Move& a, const Move& b) { return a.dst.rank < b.dst.rank; });
  std::vector<PlannedCopy> natural = fold(moves, executor, ranks, SIZE_MAX, any);
  return natural.size() < ring.size() ? natural : ring;
}

bool same_source(const Move& a, const Move& b) { return a.src == b.src && a.bytes == b.bytes; }

// Equal sources to the machine's number of destinations a command; the own slice by itself.
std::vector<PlannedCopy> bcst(const std::vector<Move>& moves, Rank executor, Rank ranks,
                              const Machine& machine) {
  const size_t rows_max = machine.native.bcst_rows > 1 ? machine.native.bcst_rows : SIZE_MAX;
  return fold(moves, executor, ranks, rows_max, [&](const Move& from, const Move& to) {
    return same_source(from, to) && from.dst.rank != executor && to.dst.rank != executor &&
           from.dst.rank != to.dst.rank;
  });
}

using SwapKey = std::tuple<Rank, BufferId, uint64_t, Rank, BufferId, uint64_t, uint64_t>;

SwapKey key_of(const Slice& a, const Slice& b, uint64_t bytes) {
  return {a.rank, a.buffer, a.offset, b.rank, b.buffer, b.offset, bytes};
}

bool all_mirrored(const Moves& moves) {
  std::map<SwapKey, int> seen;
  for (const Move& move : moves.moves) ++seen[key_of(move.dst, move.src, move.bytes)];
  return std::all_of(moves.moves.begin(), moves.moves.end(), [&](const Move& move) {
    return seen.contains(key_of(move.src, move.dst, move.bytes));
  });
}

// Which rank of a pair executes its swap: spreads the pairs evenly.
Rank swap_owner(Rank low, Rank high, Rank ranks) {
  const int distance = high - low;
  if (2 * distance == ranks) return low % 2 == 0 ? low : high;
  return 2 * distance < ranks ? low : high;
}

void swaps(const Moves& moves, std::vector<std::vector<PlannedCopy>>& pieces) {
  for (const Move& move : moves.moves) {
    const auto [low, high] = std::minmax(move.src.rank, move.dst.rank);
    if (move.src.rank != swap_owner(low, high, moves.ranks)) continue;
    PlannedCopy piece = plain(move, move.src.rank);
    piece.command.op = Op::swap;
    pieces[move.src.rank].push_back(piece);
  }
}

}  // namespace

Rank executor_of(const Slice& dst, const Slice& src) {
  if (src.rank != kHostRank) return src.rank;
  return dst.rank != kHostRank ? dst.rank : 0;
}

std::vector<Rank> in_ring_order(std::vector<Rank> peers, Rank from, Rank ranks) {
  const auto distance = [&](Rank rank) { return (rank + ranks - from) % ranks; };
  std::sort(peers.begin(), peers.end(), [&](Rank a, Rank b) { return distance(a) < distance(b); });
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

std::vector<std::vector<PlannedCopy>> group(const Moves& moves, Variant::Shape kind,
                                            const Machine& machine) {
  std::vector<std::vector<PlannedCopy>> pieces(moves.ranks);
  if (kind == Variant::Shape::swap) {
    swaps(moves, pieces);
    return pieces;
  }
  std::vector<std::vector<Move>> by_rank(moves.ranks);
  for (const Move& move : moves.moves) by_rank[executor_of(move.dst, move.src)].push_back(move);
  for (Rank rank = 0; rank < moves.ranks; ++rank) {
    std::vector<Move>& own = by_rank[rank];
    if (kind == Variant::Shape::fan) {
      pieces[rank] = fan(std::move(own), rank, moves.ranks);
    } else if (kind == Variant::Shape::bcst) {
      pieces[rank] = bcst(own, rank, moves.ranks, machine);
    } else {
      for (const Move& move : own) pieces[rank].push_back(plain(move, rank));
    }
    // The peers go first: the own slice is the quickest and nobody waits for it elsewhere. And a
    // peer's queue is then the same one whether there is an own slice to copy or not.
    std::stable_partition(pieces[rank].begin(), pieces[rank].end(),
                          [](const PlannedCopy& piece) { return !piece.peers.empty(); });
  }
  return pieces;
}

std::string why_not(const Moves& moves, const Variant& variant, const ProtocolForm& form) {
  const Variant::Shape kind = variant.kind;
  const bool none = moves.moves.empty();
  const bool exchange_in_place = moves.exchange && moves.ranks > 1;
  if (kind == Variant::Shape::pipelined) {
    if (form.captured) return "a graph would run its chunks one after another";
    return form.staged || none ? "" : "chunks pass through slots; use protocol eager";
  }
  if (variant.prelaunch && form.captured) {
    return "a graph holds its commands itself, so nothing can be armed ahead of it; use the variant"
           " without prelaunch_";
  }
  if (kind == Variant::Shape::swap) {
    if (form.staged) return "swap needs the buffer itself in a window of every rank";
    // A rank alone swaps with nobody, whatever the operation.
    const bool mirrored = none ? moves.exchange || moves.ranks == 1 : all_mirrored(moves);
    if (!moves.in_place || !mirrored) {
      return cat("swap exchanges two ranges in place; ", moves.op,
                 moves.in_place ? " in place" : " out of place", " is not such an exchange");
    }
    return "";
  }
  if (exchange_in_place && !form.staged && !none) {
    return "in place, peers would overwrite chunks not yet sent; use swap or separate buffers";
  }
  if (exchange_in_place && !one_engine(variant)) {
    return "in place, only one engine's order keeps a chunk until it is sent; use b2b or fan, on "
           "one engine";
  }
  if (kind == Variant::Shape::bcst) {
    if (none && moves.one_to_many) return "";
    const auto& list = moves.moves;
    const auto shared = [&](size_t i) {
      return same_source(list[i - 1], list[i]) && list[i - 1].dst.rank != list[i - 1].src.rank &&
             list[i].dst.rank != list[i].src.rank && list[i - 1].dst.rank != list[i].dst.rank;
    };
    for (size_t i = 1; i < list.size(); ++i) {
      if (shared(i)) return "";
    }
    return cat("bcst needs one source with several destinations; ", moves.op, " of ", moves.ranks,
               " ranks has none");
  }
  return "";
}

}  // namespace offcore
