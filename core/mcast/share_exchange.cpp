#include "core/mcast/share_exchange.h"

#include <algorithm>
#include <ranges>

#include "core/base/reduce.h"

namespace offcore::mcast {

uint64_t piece_bytes_for(const Group& group) {
  constexpr uint64_t kWhole = 64;  // of elements of any dtype, and of cache lines
  const uint64_t senders = std::max(2U, group.ranks) - 1;
  const uint64_t bytes = group.share_bytes / (kPiecesAhead * senders) / kWhole * kWhole;
  return std::clamp(bytes, kWhole, kPieceBytesMax);
}

void ShareExchange::begin(std::shared_ptr<const BlockLayout> layout,
                          const OperationRequest& request) {
  layout_ = std::move(layout);
  reduction_ = *request.reduction;
  out_ = request.out;
  in_ = request.in;
  reduced_ = 0;
  shares_ = 0;
  states_.assign(group_.ranks, {});
  sources_.resize(group_.ranks);
  for (GroupRank rank = 0; rank < group_.ranks; ++rank) states_[rank].pieces = pieces_of(rank);
  const uint64_t ahead = std::min(kPiecesAhead, states_[group_.rank].pieces);
  const uint64_t bytes = ahead * (group_.ranks - 1) * piece_bytes_;
  if (bytes <= places_bytes_) return;
  places_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
  places_bytes_ = bytes;
}

uint32_t ShareExchange::pieces_of(GroupRank rank) const {
  return static_cast<uint32_t>((layout_->block(rank).bytes + piece_bytes_ - 1) / piece_bytes_);
}

uint64_t ShareExchange::bytes_of(GroupRank rank, uint32_t piece) const {
  return std::min(piece_bytes_, layout_->block(rank).bytes - piece * piece_bytes_);
}

std::byte* ShareExchange::place(GroupRank from, uint32_t piece) const {
  const uint64_t senders = group_.ranks - 1;
  const uint64_t sender = from < group_.rank ? from : from - 1;
  return places_.get() + (piece % kPiecesAhead * senders + sender) * piece_bytes_;
}

// The right neighbour first: not everybody to rank 0 at once.
void ShareExchange::give(const Give& give) {
  for (GroupRank distance = 1; distance < group_.ranks; ++distance) {
    const GroupRank to = (group_.rank + distance) % group_.ranks;
    ShareState& state = states_[to];
    const uint32_t end = std::min(state.pieces, state.taken + kPiecesAhead);
    for (; state.given < end; ++state.given) {
      const std::byte* share = in_ + layout_->block(to).offset + state.given * piece_bytes_;
      give(to, state.given, {share, bytes_of(to, state.given)});
    }
  }
}

std::span<std::byte> ShareExchange::place_of(GroupRank from, uint32_t piece, uint64_t bytes) {
  ShareState& state = states_[from];
  const uint32_t end = std::min(pieces_of(group_.rank), reduced_ + kPiecesAhead);
  if (piece != state.arrived || piece >= end || state.placed ||
      bytes != bytes_of(group_.rank, piece)) {
    return {};
  }
  state.placed = true;
  return {place(from, piece), bytes};
}

bool ShareExchange::arrived(GroupRank from, uint32_t piece, uint64_t bytes) {
  ShareState& state = states_[from];
  if (!state.placed || piece != state.arrived || bytes != bytes_of(group_.rank, piece)) {
    return false;
  }
  state.placed = false;
  ++state.arrived;
  ++shares_;
  return true;
}

void ShareExchange::reduce(const Tell& tell) {
  const uint64_t own = layout_->block(group_.rank).offset;
  const uint32_t before = reduced_;
  const auto has_come = [&](GroupRank rank) {
    return rank == group_.rank || states_[rank].arrived > reduced_;
  };
  const auto ranks = std::views::iota(GroupRank{0}, group_.ranks);
  for (const uint32_t pieces = pieces_of(group_.rank); reduced_ < pieces; ++reduced_) {
    if (!std::ranges::all_of(ranks, has_come)) break;
    for (const GroupRank rank : ranks) {
      const bool here = rank == group_.rank;
      sources_[rank] = here ? in_ + own + reduced_ * piece_bytes_ : place(rank, reduced_);
    }
    offcore::reduce(reduction_, out_ + reduced_ * piece_bytes_, sources_,
                    bytes_of(group_.rank, reduced_));
  }
  if (reduced_ == before) return;
  for (const GroupRank rank : ranks) {
    if (rank != group_.rank) tell(rank, reduced_);
  }
}

bool ShareExchange::taken(GroupRank from, uint32_t pieces, bool held) {
  ShareState& state = states_[from];
  // Who has reduced the last piece has read all shares: they may go.
  if (pieces < state.taken || pieces > state.given || (pieces == state.pieces && held)) {
    return false;
  }
  state.taken = pieces;
  return true;
}

std::optional<GroupRank> ShareExchange::awaited() const {
  const bool reduced = reduced_ == pieces_of(group_.rank);
  for (GroupRank distance = 1; distance < group_.ranks; ++distance) {
    const GroupRank rank = (group_.rank + distance) % group_.ranks;
    if (!reduced && states_[rank].arrived <= reduced_) return rank;
  }
  for (GroupRank distance = 1; distance < group_.ranks; ++distance) {
    const GroupRank rank = (group_.rank + distance) % group_.ranks;
    if (states_[rank].taken < states_[rank].pieces) return rank;
  }
  return {};
}

}  // namespace offcore::mcast
