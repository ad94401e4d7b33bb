// Requests that are parked ahead, by a schedule.
#include "core/proxy/control.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "core/base/threads.h"
#include "core/proxy/decode.h"

namespace offcore::proxy {
namespace {

constexpr size_t kPlannedMax = 1 << 16;  // requests of a rank's schedule
constexpr uint64_t kParkedAtOnce = 16;
constexpr int64_t kQuietNs = 5'000'000;
constexpr double kSlowestNsPerByte = 0.1;  // of a copy to a peer

using PeerCounts = std::array<Word, kRanksMax>;

bool ended(const PeerCounts& sent, const PeerCounts& started) {
  return std::equal(sent.begin(), sent.end(), started.begin(), std::greater_equal<>());
}

}  // namespace

void check_schedule(const ProxyOptions& options, const std::vector<BufferPlace>& buffers,
                    Rank ranks) {
  if (options.schedule.empty()) return;
  if (options.schedule.size() != ranks) {
    fail(Code::invalid, "schedule: ", options.schedule.size(), " lists of requests for ", ranks,
         " ranks");
  }
  for (Rank rank = 0; rank < ranks; ++rank) {
    if (options.schedule[rank].size() > kPlannedMax) {
      fail(Code::invalid, "schedule: rank ", rank, " has ", options.schedule[rank].size(),
           " requests, ", kPlannedMax, " are the limit");
    }
    for (const PlannedRequest& one : options.schedule[rank]) {
      const bool here = one.peer < ranks && one.peer != rank && one.dst < buffers.size() &&
                        one.src < buffers.size() && one.chunk <= kChunksMax &&
                        one.chunks <= kChunksMax;
      const uint64_t end = (one.chunk + one.chunks) * options.chunk_bytes;
      if (here && end <= buffers[one.dst].bytes && end <= buffers[one.src].bytes) continue;
      fail(Code::invalid, "schedule: rank ", rank, " sends chunks ", one.chunk, "+", one.chunks,
           " of buffer ", one.src, " to rank ", one.peer, "'s buffer ", one.dst,
           ": one of them is not registered");
    }
  }
}

void RequestProxy::lay_schedule() {
  if (!options_.schedule.empty()) {
    const std::vector<Word> table =
        lay_table(port_, options_, buffers_,
                  [&](const DecodedRequest& one) { queues_[one.peer].planned.push_back(one); });
    port_.start = reinterpret_cast<Word*>(control(rank_, kStart));
    const uint64_t place = received_from(control_->ranks());
    port_.schedule = reinterpret_cast<Word*>(control(rank_, place));
    control_->write(rank_, place, table.data(), 8 * table.size());
    std::vector<std::byte*> windows{control(rank_, 0)};
    for (const BufferPlace& buffer : buffers_) windows.push_back(buffer.window->base(rank_));
    engine_->prepare_parking(windows);
  }
  control_->write(rank_, kPort, &port_, sizeof port_);
}

// Parks what kernels will ask for, many at once: the driver's calls disturb what is under way.
// Whether there was room for anything.
bool RequestProxy::park() {
  bool parked = false;
  for (Rank peer = 0; peer < queues_.size(); ++peer) {
    PeerQueue& queue = queues_[peer];
    if (queue.planned.empty()) continue;
    const uint64_t room = engine_->room(peer);
    if (room < kParkedAtOnce) continue;
    for (uint64_t i = 0; i < room; ++i) park(peer, queue);
    parked = true;
  }
  return parked;
}

void RequestProxy::park(Rank peer, PeerQueue& queue) {
  const DecodedRequest& request = queue.planned[queue.parked++ % queue.planned.size()];
  ParkedRequest parked{
      .gate = {control(rank_, kStart + 8 * uint64_t{peer}), queue.parked},
      .copy = request.copy,
      .signal = std::nullopt,
      .sent = {control(rank_, kSent + 8 * uint64_t{peer}), queue.parked},
  };
  if (request.signals()) {
    parked.signal = {control(peer, received_from(rank_) + 8 * uint64_t{request.dst}),
                     ++queue.signals[request.dst]};
  }
  engine_->park(peer, parked);
}

std::array<Word, kRanksMax> RequestProxy::read_counts(uint64_t place) const {
  std::array<Word, kRanksMax> counts{};
  control_->read(counts.data(), rank_, place, 8 * queues_.size());
  return counts;
}

// Takes back what no kernel has started, once what was has ended. Until the gates are held a kernel
// may start more, which nothing counts: it has ended when no `sent` has moved for as long as the
// largest copy takes.
void RequestProxy::recall() {
  started_ = read_counts(kStart);
  recalled_.store(true, std::memory_order_release);
  PeerCounts parked = started_;
  uint64_t most = 0;
  for (Rank peer = 0; peer < queues_.size(); ++peer) {
    parked[peer] = std::min<Word>(parked[peer], queues_[peer].parked);
    for (const DecodedRequest& one : queues_[peer].planned) most = std::max(most, one.copy.bytes);
  }
  const Deadline deadline = Deadline::after_s(kDrainS);
  while (!ended(read_counts(kSent), parked)) {
    if (deadline.passed()) fail(Code::driver, "rank ", rank_, ": started requests did not end");
    nap(0);
  }
  const int64_t quiet_ns = kQuietNs + static_cast<int64_t>(most * kSlowestNsPerByte);
  PeerCounts last{};
  int64_t since_ns = now_ns();
  engine_->recall(kHeld, kClosed, [&] {
    const PeerCounts sent = read_counts(kSent);
    if (std::exchange(last, sent) != sent) since_ns = now_ns();
    return now_ns() - since_ns < quiet_ns;
  });
}

// What kernels have started has ended.
bool RequestProxy::all_started_ended() const {
  auto started = read_counts(kStart);
  if (recalled_.load(std::memory_order_acquire)) started = started_;
  return ended(read_counts(kSent), started);
}

// Of what has ended: all of it was parked one by one.
ProxyStats RequestProxy::parked_stats() const {
  ProxyStats stats;
  const auto ended = read_counts(kSent);  // what was recalled has not written it
  for (Rank peer = 0; peer < queues_.size(); ++peer) {
    const std::vector<DecodedRequest>& planned = queues_[peer].planned;
    for (size_t i = 0; i < planned.size(); ++i) {
      const uint64_t times = (ended[peer] + planned.size() - 1 - i) / planned.size();
      stats.requests += times;
      stats.batches += times;
      stats.signals += planned[i].signals() ? times : 0;
      stats.copies += planned[i].copy.bytes > 0 ? times : 0;
      stats.bytes += planned[i].copy.bytes * times;
    }
  }
  return stats;
}

}  // namespace offcore::proxy
