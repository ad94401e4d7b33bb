#include "core/mcast/receiver.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace offcore::mcast {

void ReceiverCounters::add(const ReceiverCounters& other) {
  taken += other.taken;
  bytes += other.bytes;
  duplicates += other.duplicates;
  foreign += other.foreign;
  stale += other.stale;
  malformed += other.malformed;
  forged += other.forged;
}

Receiver::Receiver(const Group& group, uint32_t subgroup, std::function<void()> wake)
    : group_(group), subgroup_(subgroup), wake_(std::move(wake)) {}

Receiver::ReceiveVisit::~ReceiveVisit() {
  const bool news = std::exchange(receiver_.news_, false);
  lock_.unlock();
  if (news) receiver_.wake_();
}

void Receiver::ReceiveVisit::take(std::span<const std::byte> buffer, uint32_t segment_bytes) {
  if (segment_bytes == 0) {
    if (!buffer.empty()) ++receiver_.counters_.foreign;
    return;
  }
  const uint32_t head = head_bytes(receiver_.group_);
  while (!buffer.empty()) {
    const size_t bytes = std::min<size_t>(segment_bytes, buffer.size());
    // What is too short for a head is not looked at behind it.
    receiver_.take_one(buffer.data(), buffer.data() + head, static_cast<uint32_t>(bytes));
    buffer = buffer.subspan(bytes);
  }
}

size_t Receiver::ReceiveVisit::next_places(std::span<std::byte*> places) const {
  const Receiver& own = receiver_;
  if (own.layout_ == nullptr) return 0;
  const Source& from = own.sources_[own.next_source_];
  const uint32_t chunk_bytes = own.group_.chunk_bytes;
  size_t count = 0;
  for (uint32_t index = own.next_index_; count < places.size(); ++index, ++count) {
    const bool whole =
        index + 1 < from.chunks || (index + 1 == from.chunks && from.last_bytes == chunk_bytes);
    if (!whole || own.taken_.test(from.bit + index)) break;
    places[count] = from.place + static_cast<uint64_t>(index) * chunk_bytes;
  }
  return count;
}

size_t Receiver::ReceiveVisit::take_placed(std::span<const std::byte> heads,
                                           std::span<std::byte* const> places) {
  Receiver& own = receiver_;
  const uint32_t head = head_bytes(own.group_);
  const uint32_t first = own.sources_[own.next_source_].psn + own.next_index_;
  for (uint32_t i = 0; i < places.size(); ++i) {
    const std::byte* at = heads.data() + size_t{i} * head;
    if (read_head(at).psn != first + i) return i;
    own.take_one(at, places[i], head + own.group_.chunk_bytes);
  }
  return places.size();
}

void Receiver::take_one(const std::byte* datagram, const std::byte* payload, uint32_t bytes) {
  if (bytes < head_bytes(group_)) {
    ++counters_.foreign;
    return;
  }
  const DatagramHead head = read_head(datagram);
  if (head.magic != kMagic || head.version != kVersion ||
      head.flags != (group_.sealed ? kFlagSealed : 0) || head.tag != group_.key.tag) {
    ++counters_.foreign;
    return;
  }
  if (layout_ == nullptr || head.op != op_) {
    ++counters_.stale;
    return;
  }
  const uint32_t chunk_bytes = bytes - head_bytes(group_);
  const bool fits =
      head.source < sources_.size() && head.subgroup == subgroup_ && head.bytes == chunk_bytes;
  const Source& from = sources_[fits ? head.source : 0];
  const uint32_t index = head.psn - from.psn;  // wraps where it is less
  if (!fits || index >= from.chunks ||
      chunk_bytes != (index + 1 == from.chunks ? from.last_bytes : group_.chunk_bytes)) {
    ++counters_.malformed;
    return;
  }
  // Before the bit is set: who forges a datagram must not make the right one a duplicate.
  const std::span<const std::byte> chunk(payload, chunk_bytes);
  if (group_.sealed &&
      load_big<uint64_t>(datagram + kHeaderBytes) != mac_of(group_.key, datagram, chunk)) {
    ++counters_.forged;
    return;
  }
  if (!taken_.set(from.bit + index)) {
    ++counters_.duplicates;
    return;
  }
  std::byte* place = from.place + static_cast<uint64_t>(index) * group_.chunk_bytes;
  if (payload != place) std::memcpy(place, payload, chunk_bytes);
  next_source_ = head.source;
  next_index_ = index + 1;
  ++counters_.taken;
  counters_.bytes += chunk_bytes;
  ++taken_now_;
  --missing_;
  const bool closes = from.closes && index + 1 == from.chunks;
  if (closes) --lasts_missing_;
  const bool last = closes && lasts_missing_ == 0;
  news_ = news_ || missing_ == 0 || last || tells_all_;
}

void Receiver::arm(std::shared_ptr<const BlockLayout> layout, uint64_t op, std::byte* out) {
  const std::lock_guard lock(mutex_);
  op_ = op;
  layout_ = std::move(layout);
  sources_.assign(layout_->ranks(), {});
  missing_ = lasts_missing_ = taken_now_ = 0;
  tells_all_ = false;
  next_source_ = 0;
  next_index_ = 0;
  uint64_t bits = 0;
  for (GroupRank rank = 0; rank < layout_->ranks(); ++rank) {
    const ChunkRun part = layout_->part(rank, subgroup_);
    if (rank == group_.rank || part.chunks == 0) continue;
    const ChunkRun last{.source = rank, .psn = part.psn + part.chunks - 1, .chunks = 1};
    sources_[rank] = {.bit = bits,
                      .psn = part.psn,
                      .chunks = part.chunks,
                      .last_bytes = static_cast<uint32_t>(layout_->bytes_of(last)),
                      .place = out + layout_->offset(rank, part.psn)};
    bits += part.chunks;
  }
  close_chains();
  missing_ = bits;
  taken_.resize(bits);
  claimed_.resize(0);
}

// Roots of a chain send one after the other, so the last one's last chunk closes the chain.
void Receiver::close_chains() {
  Source* last = nullptr;
  for (GroupRank rank = 0; rank < layout_->ranks(); ++rank) {
    if (!layout_->sends(rank)) continue;
    if (sources_[rank].chunks > 0) last = &sources_[rank];
    if (layout_->next(rank) != rank || last == nullptr) continue;
    last->closes = true;
    ++lasts_missing_;
    last = nullptr;
  }
}

void Receiver::disarm() {
  const std::lock_guard lock(mutex_);
  layout_.reset();
}

void Receiver::report_all() {
  const std::lock_guard lock(mutex_);
  tells_all_ = true;
}

Receiver::ReceiverState Receiver::state() const {
  const std::lock_guard lock(mutex_);
  return {.missing = missing_, .taken = taken_now_, .ended = lasts_missing_ == 0};
}

bool Receiver::has(const ChunkRun& run) const {
  const std::lock_guard lock(mutex_);
  const Source& from = sources_[run.source];
  const uint64_t first = from.bit + (run.psn - from.psn);
  const uint64_t end = first + run.chunks;
  return taken_.find_clear(first, end) == end &&
         (claimed_.empty() || claimed_.find_set(first, end) == end);
}

ChunkRun Receiver::claim(GroupRank source, uint32_t psn, uint32_t most) {
  const std::lock_guard lock(mutex_);
  const Source& from = sources_[source];
  const uint64_t end = from.bit + from.chunks;
  uint64_t bit = taken_.find_clear(from.bit + (psn - from.psn), end);
  ChunkRun run{.source = source, .psn = from.psn + static_cast<uint32_t>(bit - from.bit)};
  if (claimed_.empty()) claimed_.resize(taken_.bytes() * 8);
  for (; bit < end && run.chunks < most && taken_.set(bit); ++bit) {
    claimed_.set(bit);
    ++run.chunks;
  }
  return run;
}

void Receiver::fetched(const ChunkRun& run) {
  const std::lock_guard lock(mutex_);
  const Source& from = sources_[run.source];
  const uint64_t first = from.bit + (run.psn - from.psn);
  for (uint64_t bit = first; bit < first + run.chunks; ++bit) claimed_.clear(bit);
  missing_ -= run.chunks;
}

ReceiverCounters Receiver::counters() const {
  const std::lock_guard lock(mutex_);
  return counters_;
}

uint64_t Receiver::state_bytes() const {
  const std::lock_guard lock(mutex_);
  return taken_.bytes() + claimed_.bytes() + sources_.size() * sizeof(Source);
}

}  // namespace offcore::mcast
