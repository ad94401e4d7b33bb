#include "core/plan/moves.h"

#include <algorithm>
#include <numeric>

#include "core/base/error.h"

namespace offcore {
namespace {

constexpr Rank kRanksMax = 1024;
constexpr size_t kBuffersMax = 250;  // ids are bytes, and a plan adds some

struct Sides {
  BufferId in;
  BufferId out;
};

// The buffers of a collective: `in` is what a rank reads, `out` what its peers write.
Sides declare(Moves& moves, uint64_t in_bytes, uint64_t out_bytes) {
  moves.buffers.push_back({.name = "flag"});
  if (!moves.in_place) {
    moves.buffers.push_back({.name = "in", .kind = Buffer::Home::local, .bytes = in_bytes});
  }
  moves.buffers.push_back({.name = "out", .kind = Buffer::Home::window, .bytes = out_bytes});
  const auto out = static_cast<BufferId>(moves.buffers.size() - 1);
  return {.in = moves.in_place ? out : BufferId{1}, .out = out};
}

void add(Moves& moves, const Slice& dst, const Slice& src, uint64_t bytes) {
  if (bytes != 0 && !(dst == src)) moves.moves.push_back({.dst = dst, .src = src, .bytes = bytes});
}

void check_ranks(size_t ranks) {
  if (ranks < 1 || ranks > kRanksMax) {
    fail(Code::invalid, "the number of ranks must lie in 1..", kRanksMax, ", not ", ranks);
  }
}

void check_root(Rank root, size_t ranks) {
  if (root >= ranks) fail(Code::invalid, "root is ", root, "; it must lie in 0..", ranks - 1);
}

// Running sums, one longer than the counts; its last element is the total.
std::vector<uint64_t> offsets_of(std::span<const uint64_t> counts) {
  std::vector<uint64_t> offsets(counts.size() + 1, 0);
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] > kMovedBytesMax || offsets[i] + counts[i] > kMovedBytesMax) {
      fail(Code::invalid, "more than 2^48 bytes in one operation: split it");
    }
    offsets[i + 1] = offsets[i] + counts[i];
  }
  return offsets;
}

uint64_t largest(std::span<const uint64_t> counts) {
  return *std::max_element(counts.begin(), counts.end());
}

// What the caller of a batch gives is indexed by, long before a program is verified.
void check_slice(const Moves& moves, size_t index, const char* side, const Slice& slice,
                 uint64_t bytes) {
  const auto reject = [&](const auto&... reason) {
    fail(Code::invalid, "move ", index, ": ", side, " ", reason...);
  };
  if (slice.buffer == kFlagBuffer || slice.buffer >= moves.buffers.size()) {
    reject("is in buffer ", int{slice.buffer}, "; the buffers are 1 to ", moves.buffers.size() - 1);
  }
  const Buffer& buffer = moves.buffers[slice.buffer];
  if (buffer.kind == Buffer::Home::host ? slice.rank != kHostRank : slice.rank >= moves.ranks) {
    reject("is on rank ", slice.rank, "; ", buffer.name, " is a ", to_string(buffer.kind),
           " buffer of ", moves.ranks, " ranks");
  }
  if (bytes > buffer.bytes || slice.offset > buffer.bytes - bytes) {
    reject("leaves ", buffer.name, " of ", buffer.bytes, " bytes");
  }
}

// Ranks in the order in which rank `first` serves them: itself, then round the ring, so that no
// two ranks start with the same peer.
Rank ring(Rank first, Rank distance, Rank ranks) {
  return static_cast<Rank>((first + distance) % ranks);
}

}  // namespace

Moves moves_all_gather(std::span<const uint64_t> counts, bool in_place) {
  check_ranks(counts.size());
  const auto ranks = static_cast<Rank>(counts.size());
  const auto offsets = offsets_of(counts);
  Moves moves{.op = "all_gather",
              .ranks = ranks,
              .in_place = in_place,
              .full_exchange = true,
              .one_to_many = ranks > 2};
  const Sides sides = declare(moves, largest(counts), offsets.back());
  for (Rank rank = 0; rank < ranks; ++rank) {
    const Slice src{in_place ? offsets[rank] : 0, rank, sides.in};
    for (Rank distance = 0; distance < ranks; ++distance) {
      add(moves, {offsets[rank], ring(rank, distance, ranks), sides.out}, src, counts[rank]);
    }
  }
  return moves;
}

Moves moves_all_to_all(Rank ranks, std::span<const uint64_t> counts, bool in_place) {
  check_ranks(ranks);
  if (counts.size() != size_t{ranks} * ranks) {
    fail(Code::invalid, "all_to_all needs ranks x ranks counts, got ", counts.size());
  }
  if (in_place && std::any_of(counts.begin(), counts.end(),
                              [&](uint64_t count) { return count != counts[0]; })) {
    fail(Code::unsupported, "an in-place all_to_all needs equal counts; use separate buffers");
  }
  Moves moves{.op = "all_to_all",
              .ranks = ranks,
              .in_place = in_place,
              .full_exchange = true,
              .exchange = in_place};
  std::vector<std::vector<uint64_t>> sent(ranks), received(ranks);  // offsets, by rank
  uint64_t in_bytes = 0, out_bytes = 0;
  for (Rank rank = 0; rank < ranks; ++rank) {
    std::vector<uint64_t> column(ranks);
    for (Rank peer = 0; peer < ranks; ++peer) column[peer] = counts[size_t{peer} * ranks + rank];
    sent[rank] = offsets_of(counts.subspan(size_t{rank} * ranks, ranks));
    received[rank] = offsets_of(column);
    in_bytes = std::max(in_bytes, sent[rank].back());
    out_bytes = std::max(out_bytes, received[rank].back());
  }
  const Sides sides = declare(moves, in_bytes, out_bytes);
  for (Rank rank = 0; rank < ranks; ++rank) {
    for (Rank distance = 0; distance < ranks; ++distance) {
      const Rank peer = ring(rank, distance, ranks);
      add(moves, {received[peer][rank], peer, sides.out}, {sent[rank][peer], rank, sides.in},
          counts[size_t{rank} * ranks + peer]);
    }
  }
  return moves;
}

Moves moves_broadcast(Rank ranks, Rank root, uint64_t bytes, bool in_place) {
  check_ranks(ranks);
  check_root(root, ranks);
  offsets_of({&bytes, 1});
  Moves moves{.op = "broadcast", .ranks = ranks, .in_place = in_place, .one_to_many = ranks > 2};
  const Sides sides = declare(moves, bytes, bytes);
  for (Rank distance = 0; distance < ranks; ++distance) {
    add(moves, {0, ring(root, distance, ranks), sides.out}, {0, root, sides.in}, bytes);
  }
  return moves;
}

Moves moves_scatter(Rank root, std::span<const uint64_t> counts) {
  check_ranks(counts.size());
  const auto ranks = static_cast<Rank>(counts.size());
  check_root(root, ranks);
  const auto offsets = offsets_of(counts);
  Moves moves{.op = "scatter", .ranks = ranks};
  const Sides sides = declare(moves, offsets.back(), largest(counts));
  for (Rank distance = 0; distance < ranks; ++distance) {
    const Rank peer = ring(root, distance, ranks);
    add(moves, {0, peer, sides.out}, {offsets[peer], root, sides.in}, counts[peer]);
  }
  return moves;
}

Moves moves_gather(Rank root, std::span<const uint64_t> counts) {
  check_ranks(counts.size());
  const auto ranks = static_cast<Rank>(counts.size());
  check_root(root, ranks);
  const auto offsets = offsets_of(counts);
  Moves moves{.op = "gather", .ranks = ranks};
  const Sides sides = declare(moves, largest(counts), offsets.back());
  for (Rank rank = 0; rank < ranks; ++rank) {
    add(moves, {offsets[rank], root, sides.out}, {0, rank, sides.in}, counts[rank]);
  }
  return moves;
}

Moves moves_batch(Rank ranks, std::vector<Buffer> buffers, std::vector<Move> moves) {
  Moves result = moves_listed(ranks, std::move(buffers), std::move(moves));
  result.moves = merge(std::move(result.moves));
  return result;
}

Moves moves_listed(Rank ranks, std::vector<Buffer> buffers, std::vector<Move> moves) {
  check_ranks(ranks);
  if (buffers.size() > kBuffersMax) fail(Code::invalid, "more than ", kBuffersMax, " buffers");
  Moves result{.op = "batch", .ranks = ranks};
  result.buffers.push_back({.name = "flag"});
  result.buffers.insert(result.buffers.end(), buffers.begin(), buffers.end());
  for (size_t i = 0; i < moves.size(); ++i) {
    check_slice(result, i, "dst", moves[i].dst, moves[i].bytes);
    check_slice(result, i, "src", moves[i].src, moves[i].bytes);
  }
  result.moves = std::move(moves);
  return result;
}

std::vector<Move> merge(std::vector<Move> moves) {
  std::erase_if(moves, [](const Move& move) { return move.bytes == 0; });
  std::stable_sort(moves.begin(), moves.end(), [](const Move& a, const Move& b) {
    const auto key = [](const Move& move) {
      return std::tuple(move.dst.buffer, move.dst.rank, move.src.buffer, move.src.rank,
                        move.dst.offset);
    };
    return key(a) < key(b);
  });
  std::vector<Move> merged;
  for (const Move& move : moves) {
    const auto follows = [&](const Slice& next, const Slice& last, uint64_t bytes) {
      return next.buffer == last.buffer && next.rank == last.rank &&
             next.offset == last.offset + bytes;
    };
    if (!merged.empty() && follows(move.dst, merged.back().dst, merged.back().bytes) &&
        follows(move.src, merged.back().src, merged.back().bytes)) {
      merged.back().bytes += move.bytes;
    } else {
      merged.push_back(move);
    }
  }
  return merged;
}

}  // namespace offcore
