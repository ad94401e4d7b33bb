// One reduce-scatter past its barrier: every rank gives each other rank its share of that rank's
// part of the array, in pieces, and reduces its own part piece by piece.
//
// A rank receives at most `kPiecesAhead` pieces of each other rank that it has not reduced, in
// places of its own, so what is under way to it is bounded whatever the number of ranks. That the
// first ones may come is known from the barrier; `taken` makes room for more. The last `taken` says
// that a share is not needed any more, so there is no handshake. See docs/decisions/0009.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/mcast/block_layout.h"
#include "core/mcast/operation.h"

namespace offcore::mcast {

inline constexpr uint32_t kPiecesAhead = 4;
inline constexpr uint64_t kPieceBytesMax = 256 << 10;

uint64_t piece_bytes_for(const Group& group);  // the same at all ranks

class ShareExchange {
 public:
  using Give = std::function<void(GroupRank to, uint32_t piece, std::span<const std::byte>)>;
  using Tell = std::function<void(GroupRank to, uint32_t pieces)>;

  explicit ShareExchange(const Group& group)
      : group_(group), piece_bytes_(piece_bytes_for(group)) {}

  void begin(std::shared_ptr<const BlockLayout> layout, const OperationRequest& request);
  void give(const Give& give);    // what there is room for
  void reduce(const Tell& tell);  // what has come from everybody

  // Where a share's bytes go, once; empty: it is not awaited, or they have a place.
  std::span<std::byte> place_of(GroupRank from, uint32_t piece, uint64_t bytes);
  bool arrived(GroupRank from, uint32_t piece, uint64_t bytes);  // are in their place
  // A peer has reduced its first pieces. `held`: this rank's shares for it are still being read.
  bool taken(GroupRank from, uint32_t pieces, bool held);

  // Who is waited for; empty: this rank's part is reduced, and nobody needs its input any more.
  std::optional<GroupRank> awaited() const;
  uint64_t shares() const { return shares_; }  // that have come

 private:
  struct ShareState {      // of another rank
    uint32_t pieces = 0;   // of its part
    uint32_t given = 0;    // to it
    uint32_t taken = 0;    // of them, by it
    uint32_t arrived = 0;  // from it
    bool placed = false;   // who delivers the next one has its place
  };
  uint32_t pieces_of(GroupRank rank) const;
  uint64_t bytes_of(GroupRank rank, uint32_t piece) const;
  std::byte* place(GroupRank from, uint32_t piece) const;

  const Group& group_;
  const uint64_t piece_bytes_;
  std::shared_ptr<const BlockLayout> layout_;
  Reduction reduction_;
  std::byte* out_ = nullptr;
  const std::byte* in_ = nullptr;
  std::vector<ShareState> states_;  // by rank
  uint32_t reduced_ = 0;            // pieces of this rank's part
  uint64_t shares_ = 0;
  std::unique_ptr<std::byte[]> places_;  // kept: pages that have been touched
  uint64_t places_bytes_ = 0;
  std::vector<const std::byte*> sources_;
};

}  // namespace offcore::mcast
