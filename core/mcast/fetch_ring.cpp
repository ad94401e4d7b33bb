#include "core/mcast/fetch_ring.h"

#include <algorithm>

namespace offcore::mcast {
namespace {

bool same(const ChunkRun& a, const ChunkRun& b) {
  return a.source == b.source && a.psn == b.psn && a.chunks == b.chunks;
}
bool overlap(const ChunkRun& a, const ChunkRun& b) {
  return a.source == b.source && a.psn < b.psn + b.chunks && b.psn < a.psn + a.chunks;
}

}  // namespace

void FetchRing::begin(std::shared_ptr<const BlockLayout> layout, std::byte* out) {
  layout_ = std::move(layout);
  out_ = out;
  distance_ = 1;
  subgroup_ = psn_ = 0;
  asked_for_.clear();
  bytes_asked_for_ = 0;
  // What is asked for is no longer taken from datagrams: little, until it is plain that it is lost.
  window_bytes_ = group_.multicast ? group_.fetch_bytes : window_bytes_most();
  waiting_.clear();
  own_offered_ = false;
  fetches_ = fetched_chunks_ = served_chunks_ = 0;
}

// The next run of missing chunks, claimed. chunks == 0: there is none any more.
ChunkRun FetchRing::next() {
  const uint32_t most = std::max(1U, group_.fetch_bytes / group_.chunk_bytes);
  for (; distance_ < group_.ranks; ++distance_, subgroup_ = 0) {
    const GroupRank source = (group_.rank + group_.ranks - distance_) % group_.ranks;
    for (; subgroup_ < group_.subgroups; ++subgroup_, psn_ = 0) {
      const ChunkRun part = layout_->part(source, subgroup_);
      psn_ = std::max(psn_, part.psn);
      const ChunkRun run = receivers_[subgroup_]->claim(source, psn_, most);
      if (run.chunks == 0) continue;
      psn_ = run.psn + run.chunks;
      return run;
    }
  }
  return {};
}

uint64_t FetchRing::window_bytes_most() const {
  return uint64_t{group_.fetch_bytes} * group_.fetches_in_flight;
}

void FetchRing::ask(const Ask& ask) {
  while (bytes_asked_for_ < window_bytes_ && asked_for_.size() < kFetchesWaitingMax) {
    const ChunkRun run = next();
    if (run.chunks == 0) return;
    asked_for_.push_back({.run = run});
    bytes_asked_for_ += layout_->bytes_of(run);
    ++fetches_;
    ask(run);
  }
}

std::span<std::byte> FetchRing::bytes_of(const ChunkRun& run) const {
  return {out_ + layout_->offset(run.source, run.psn), layout_->bytes_of(run)};
}

std::span<std::byte> FetchRing::place_of(const ChunkRun& run, uint64_t bytes) {
  for (Asked& mine : asked_for_) {
    if (!same(mine.run, run) || mine.placed || layout_->bytes_of(run) != bytes) continue;
    mine.placed = true;
    return bytes_of(run);
  }
  return {};
}

bool FetchRing::arrived(const ChunkRun& run, uint64_t bytes) {
  const auto found = std::ranges::find_if(
      asked_for_, [&](const Asked& mine) { return mine.placed && same(mine.run, run); });
  if (found == asked_for_.end() || layout_->bytes_of(run) != bytes) return false;
  asked_for_.erase(found);
  bytes_asked_for_ -= layout_->bytes_of(run);
  window_bytes_ = std::min(window_bytes_most(), window_bytes_ + layout_->bytes_of(run));
  fetched_chunks_ += run.chunks;
  receivers_[layout_->subgroup_of(run.source, run.psn)]->fetched(run);
  changed_ = changed_ || std::ranges::any_of(waiting_, [&](const ChunkRun& theirs) {
               return overlap(theirs, run);
             });
  return true;
}

bool FetchRing::asked(const ChunkRun& run) {
  if (!layout_->holds(run) || layout_->bytes_of(run) > kReplyBytesMax ||
      waiting_.size() >= kFetchesWaitingMax ||
      layout_->subgroup_of(run.source, run.psn) !=
          layout_->subgroup_of(run.source, run.psn + run.chunks - 1)) {
    return false;
  }
  waiting_.push_back(run);
  changed_ = true;
  return true;
}

bool FetchRing::has(const ChunkRun& run) const {
  if (run.source == group_.rank) return own_offered_;
  return receivers_[layout_->subgroup_of(run.source, run.psn)]->has(run);
}

void FetchRing::answer(const Answer& answer) {
  if (!changed_) return;
  changed_ = false;
  std::erase_if(waiting_, [&](const ChunkRun& run) {
    if (!has(run)) return false;
    served_chunks_ += run.chunks;
    answer(run, bytes_of(run));
    return true;
  });
}

}  // namespace offcore::mcast
