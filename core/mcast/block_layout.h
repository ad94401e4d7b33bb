// How the bytes of an operation are cut: blocks (one a root), parts of a block (one a subgroup),
// chunks (one a datagram). And in which order roots send: chains (section IV-A of the paper).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/mcast/wire.h"

namespace offcore::mcast {

enum class OperationKind : uint8_t { broadcast, all_gather, reduce_scatter };

// The root's bytes in the operation's buffer; of a reduce-scatter, a rank's part of the input.
struct Block {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// Chunks [psn, psn + chunks) of a source's block.
struct ChunkRun {
  GroupRank source = 0;
  uint32_t psn = 0;
  uint32_t chunks = 0;
};

class BlockLayout {
 public:
  // Blocks lie one after the other. broadcast: `counts` has the root's bytes at the root, else 0.
  // Throws invalid where a block has more chunks than a PSN can tell.
  BlockLayout(const Group& group, OperationKind kind, GroupRank root,
              const std::vector<uint64_t>& counts);

  GroupRank ranks() const { return static_cast<GroupRank>(blocks_.size()); }
  const Block& block(GroupRank source) const { return blocks_[source]; }
  uint64_t bytes() const { return bytes_; }    // of all blocks
  uint64_t digest() const { return digest_; }  // the same at all ranks, or they disagree
  uint32_t chunk_bytes() const { return chunk_bytes_; }

  uint32_t chunks(GroupRank source) const { return chunks_of(blocks_[source].bytes); }
  // The chunks that a subgroup carries of a block: contiguous, and as many as of any other or one
  // less.
  ChunkRun part(GroupRank source, uint32_t subgroup) const;
  uint32_t subgroup_of(GroupRank source, uint32_t psn) const;
  // Where a chunk lies in the operation's buffer; bytes of a run, whose last chunk may be short.
  uint64_t offset(GroupRank source, uint32_t psn) const {
    return blocks_[source].offset + static_cast<uint64_t>(psn) * chunk_bytes_;
  }
  uint64_t bytes_of(const ChunkRun& run) const;
  bool holds(const ChunkRun& run) const;  // whether it has chunks and all are the block's

  // Chains. The ranks with something to send are split into chains of neighbours whose lengths
  // differ by at most one; the first of each begins, and each activates the next.
  bool begins(GroupRank rank) const;
  uint32_t chains() const { return chains_; }  // no more than there are senders
  bool sends(GroupRank rank) const { return blocks_[rank].bytes > 0; }
  // The next of `rank`'s chain; `rank` itself where it is the last.
  GroupRank next(GroupRank rank) const;
  GroupRank previous(GroupRank rank) const;

 private:
  uint32_t chunks_of(uint64_t bytes) const;
  uint64_t chain_of(GroupRank rank) const;

  uint32_t chunk_bytes_;
  uint32_t subgroups_;
  uint32_t chains_;
  uint64_t bytes_ = 0;
  uint64_t digest_ = 0;
  std::vector<Block> blocks_;
  std::vector<GroupRank> senders_;  // ascending
  std::vector<uint32_t> place_;     // of a rank among the senders
};

}  // namespace offcore::mcast
