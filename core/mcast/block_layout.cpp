#include "core/mcast/block_layout.h"

#include <algorithm>
#include <numeric>

#include "core/base/digest.h"
#include "core/base/error.h"

namespace offcore::mcast {
namespace {

// Of `count` things in `parts` nearly equal stretches: where stretch `index` begins.
uint64_t begin_of(uint64_t index, uint64_t count, uint64_t parts) { return index * count / parts; }
// And the stretch that thing `at` belongs to: the last one that begins at or before it.
uint64_t stretch_of(uint64_t at, uint64_t count, uint64_t parts) {
  return ((at + 1) * parts - 1) / count;
}

}  // namespace

BlockLayout::BlockLayout(const Group& group, OperationKind kind, GroupRank root,
                         const std::vector<uint64_t>& counts)
    : chunk_bytes_(group.chunk_bytes),
      subgroups_(group.subgroups),
      blocks_(counts.size()),
      place_(counts.size()) {
  Digest digest;
  digest.add(kind);
  digest.add(root);
  for (const uint32_t agreed :
       {group.ranks, group.chunk_bytes, group.subgroups, group.chains, uint32_t{group.multicast},
        uint32_t{group.sealed}, group.share_bytes}) {
    digest.add(agreed);
  }
  for (GroupRank rank = 0; rank < counts.size(); ++rank) {
    const uint64_t bytes = counts[rank];
    if (bytes / chunk_bytes_ >= UINT32_MAX || bytes > INT64_MAX - bytes_) {
      fail(Code::invalid, "rank ", rank, "'s block has ", bytes, " bytes: more than ", UINT32_MAX,
           " chunks of ", chunk_bytes_, " bytes, split it");
    }
    blocks_[rank] = {.offset = bytes_, .bytes = bytes};
    bytes_ += bytes;
    place_[rank] = static_cast<uint32_t>(senders_.size());
    if (bytes > 0) senders_.push_back(rank);
    digest.add(bytes);
  }
  chains_ = std::max(1U, std::min(group.chains, static_cast<uint32_t>(senders_.size())));
  digest_ = digest.value();
}

uint32_t BlockLayout::chunks_of(uint64_t bytes) const {
  return static_cast<uint32_t>(bytes / chunk_bytes_ + (bytes % chunk_bytes_ != 0));
}

ChunkRun BlockLayout::part(GroupRank source, uint32_t subgroup) const {
  const uint32_t all = chunks(source);
  const auto first = static_cast<uint32_t>(begin_of(subgroup, all, subgroups_));
  const auto end = static_cast<uint32_t>(begin_of(subgroup + 1, all, subgroups_));
  return {.source = source, .psn = first, .chunks = end - first};
}

uint32_t BlockLayout::subgroup_of(GroupRank source, uint32_t psn) const {
  return static_cast<uint32_t>(stretch_of(psn, chunks(source), subgroups_));
}

uint64_t BlockLayout::bytes_of(const ChunkRun& run) const {
  const uint64_t begin = uint64_t{run.psn} * chunk_bytes_;
  const uint64_t end = begin + uint64_t{run.chunks} * chunk_bytes_;
  return std::min(end, blocks_[run.source].bytes) - begin;
}

bool BlockLayout::holds(const ChunkRun& run) const {
  return run.source < ranks() && run.chunks > 0 &&
         uint64_t{run.psn} + run.chunks <= chunks(run.source);
}

uint64_t BlockLayout::chain_of(GroupRank rank) const {
  return stretch_of(place_[rank], senders_.size(), chains_);
}

bool BlockLayout::begins(GroupRank rank) const { return sends(rank) && previous(rank) == rank; }

GroupRank BlockLayout::next(GroupRank rank) const {
  const size_t at = place_[rank] + size_t{1};
  return at < senders_.size() && chain_of(senders_[at]) == chain_of(rank) ? senders_[at] : rank;
}

GroupRank BlockLayout::previous(GroupRank rank) const {
  const size_t at = place_[rank];
  return at > 0 && chain_of(senders_[at - 1]) == chain_of(rank) ? senders_[at - 1] : rank;
}

}  // namespace offcore::mcast
