// What answers requests in virtual time.
#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "core/proxy/virtual.h"

namespace offcore::proxy {

double VirtualRequests::reach_ns() const {
  return engine_ == VirtualEngine::device ? cost_.device_trip_ns / 2 : cost_.reach_ns;
}

void VirtualRequests::arrived(Rank rank, Word words) {
  ends_[rank]->visible += words;
  engine_ == VirtualEngine::device ? issue(rank) : turn(rank);
}

// The next request, if it has come and is one; what is none ends the engine.
bool VirtualRequests::accept(Rank rank, DecodedRequest& request) {
  VirtualEnd& end = *ends_[rank];
  Word words[2] = {};
  if (end.ended || end.reader->position() >= end.visible || end.reader->take(words) == 0) {
    return false;
  }
  try {
    request = decode(words, rank, ranks_, options_.chunk_bytes, buffers_);
  } catch (const Error& error) {
    this->end(rank, kInvalid, error);
    return false;
  }
  VirtualQueue& queue = end.queues[request.peer];
  queue.position = end.reader->position();
  end.taken = queue.position;
  ++end.stats.requests;
  end.stats.bytes += request.copy.bytes;
  if (request.signals()) {
    ++end.stats.signals;
    ++queue.signals[request.dst];
    queue.signalled |= uint64_t{1} << request.dst;
  }
  return true;
}

// The producers' replica of the head, whenever a quarter of the ring more is taken.
void VirtualRequests::refresh(Rank rank) {
  VirtualEnd& end = *ends_[rank];
  const Word position = end.reader->position();
  if (end.ended || position - end.refreshed < options_.slots / 4) return;
  end.refreshed = position;
  events_.after(reach_ns(), [this, rank, position] {
    VirtualEnd& here = *ends_[rank];
    here.head = std::max(here.head, position);
    look(rank);
  });
}

void VirtualRequests::merge(VirtualQueue& queue, const DecodedRequest& request) {
  if (request.copy.bytes == 0) return;
  if (!queue.copies.empty()) {
    DecodedRequest& last = queue.copies.back();  // phantom buffers lie at one address
    const bool same = last.dst == request.dst && last.src == request.src;
    if (same && extend(last.copy, request.copy)) return;
  }
  queue.copies.push_back(request);
}

// All that has come: how many.
uint64_t VirtualRequests::take(Rank rank) {
  VirtualEnd& end = *ends_[rank];
  uint64_t taken = 0;
  for (DecodedRequest request; end.waiting < options_.slots && accept(rank, request); ++taken) {
    VirtualQueue& queue = end.queues[request.peer];
    ++queue.waiting;
    ++end.waiting;
    merge(queue, request);
  }
  return taken;
}

// The host's thread: takes what has come, then submits for one peer.
void VirtualRequests::turn(Rank rank) {
  VirtualEnd& end = *ends_[rank];
  if (end.busy || end.ended) return;
  if (const uint64_t taken = take(rank); taken > 0) {
    end.busy = true;
    events_.after(cost_.take_ns * static_cast<double>(taken), [this, rank] {
      ends_[rank]->busy = false;
      refresh(rank);
      turn(rank);
    });
    return;
  }
  for (Rank i = 0; i < ranks_; ++i) {
    const auto peer = static_cast<Rank>((end.turn + i) % ranks_);
    const VirtualQueue& queue = end.queues[peer];
    if (queue.waiting == 0 || queue.batches.size() >= RequestEngine::kInFlightMax) continue;
    end.turn = static_cast<Rank>(peer + 1);
    end.busy = true;
    return submit(rank, peer);
  }
}

VirtualRequests::VirtualBatch VirtualRequests::next_batch(Rank rank, Rank peer) {
  VirtualEnd& end = *ends_[rank];
  VirtualQueue& queue = end.queues[peer];
  VirtualBatch batch;
  const size_t count = std::min(queue.copies.size(), RequestEngine::kCallCopiesMax);
  for (size_t i = 0; i < count; ++i) batch.copies.push_back(queue.copies[i].copy);
  queue.copies.erase(queue.copies.begin(), queue.copies.begin() + static_cast<ptrdiff_t>(count));
  end.stats.copies += count;
  ++end.stats.batches;
  if (!queue.copies.empty()) return batch;  // the words come behind the last call
  for (uint64_t left = std::exchange(queue.signalled, 0); left != 0; left &= left - 1) {
    const auto buffer = static_cast<unsigned>(std::countr_zero(left));
    batch.signals.emplace_back(buffer, queue.signals[buffer]);
  }
  batch.position = queue.position;
  end.waiting -= std::exchange(queue.waiting, 0);
  return batch;
}

void VirtualRequests::submit(Rank rank, Rank peer) {
  auto batch = std::make_shared<VirtualBatch>(next_batch(rank, peer));
  if (engine_ == VirtualEngine::stores) return store(rank, peer, std::move(batch), 0);
  const Cost& cost = machine_.cost;
  const double further = machine_.batches.copy_ns > 0 ? machine_.batches.copy_ns : cost.control_ns;
  const auto more = static_cast<double>(std::max<size_t>(batch->copies.size(), 1) - 1);
  events_.after(cost.control_ns + cost.doorbell_ns + more * further, [this, rank, peer, batch] {
    VirtualQueue& queue = ends_[rank]->queues[peer];
    queue.batches.push_back(std::move(*batch));
    if (!queue.active) begin(rank, peer, machine_.cost.wake_ns + machine_.cost.fetch_ns);
    ends_[rank]->busy = false;
    turn(rank);
  });
}

// Copy by copy, then the words; the thread does nothing else meanwhile.
void VirtualRequests::store(Rank rank, Rank peer, std::shared_ptr<VirtualBatch> batch,
                            size_t index) {
  if (index == batch->copies.size()) {
    events_.after(cost_.reach_ns, [this, rank, peer, batch] { tell(rank, peer, *batch); });
    ends_[rank]->busy = false;
    return turn(rank);
  }
  copy(peer, kHostRank, uint32_t{rank} * ranks_ + peer, cost_.store_gbps, batch->copies[index],
       [this, rank, peer, batch, index] { store(rank, peer, batch, index + 1); });
}

// Armed: the peer's requests up to there are asked for.
void VirtualRequests::gate(Rank rank, Rank peer, uint64_t started) {
  VirtualEnd& end = *ends_[rank];
  VirtualQueue& queue = end.queues[peer];
  for (; queue.parked < started; ++queue.parked) {
    const DecodedRequest& request = queue.planned[queue.parked % queue.planned.size()];
    VirtualBatch batch;
    if (request.copy.bytes > 0) batch.copies.push_back(request.copy);
    if (request.signals()) {
      batch.signals.emplace_back(request.dst, ++queue.signals[request.dst]);
      ++end.stats.signals;
    }
    batch.position = queue.parked + 1;
    ++end.stats.requests;
    ++end.stats.batches;
    end.stats.copies += batch.copies.size();
    end.stats.bytes += request.copy.bytes;
    queue.batches.push_back(std::move(batch));
  }
  if (!queue.active && !queue.batches.empty()) begin(rank, peer, machine_.cost.poll_ns);
}

// The first submission of a queue, so much later.
void VirtualRequests::begin(Rank rank, Rank peer, double ns) {
  VirtualQueue& queue = ends_[rank]->queues[peer];
  queue.active = true;
  queue.next = 0;
  queue.running = 0;
  events_.after(ns, [this, rank, peer] { start_copies(rank, peer); });
}

void VirtualRequests::start_copies(Rank rank, Rank peer) {
  VirtualQueue& queue = ends_[rank]->queues[peer];
  VirtualBatch& batch = queue.batches.front();
  while (queue.next < batch.copies.size() && queue.running < cost_.overlap) {
    ++queue.running;
    const double wait_ns = std::max(0.0, queue.fetched_ns - events_.now_ns());
    queue.fetched_ns = events_.now_ns() + wait_ns + machine_.cost.fetch_ns;
    events_.after(wait_ns + machine_.cost.setup_ns,
                  [this, rank, peer, what = batch.copies[queue.next]] {
                    copy(peer, rank, uint32_t{rank} * ranks_ + peer, machine_.links.engine_gbps,
                         what, [this, rank, peer] {
                           --ends_[rank]->queues[peer].running;
                           start_copies(rank, peer);
                         });
                  });
    ++queue.next;
  }
  if (queue.running > 0 || queue.next < batch.copies.size()) return;
  events_.after(machine_.cost.sync_ns,
                [this, rank, peer, done = std::move(batch)] { tell(rank, peer, done); });
  queue.batches.pop_front();
  queue.active = false;
  if (!queue.batches.empty()) {
    const bool armed = engine_ == VirtualEngine::armed;
    begin(rank, peer, armed ? machine_.cost.poll_ns : machine_.cost.fetch_ns);
  }
  if (engine_ == VirtualEngine::proxy) turn(rank);  // there is room
}

// The words behind a batch's copies. Their values only grow, in whatever order they come.
void VirtualRequests::tell(Rank rank, Rank peer, const VirtualBatch& batch) {
  for (const auto& [buffer, count] : batch.signals) {
    Word& word = ends_[peer]->received[rank * kSignalStride + buffer];
    word = std::max<Word>(word, count);
  }
  Word& sent = ends_[rank]->sent[peer];
  sent = std::max(sent, batch.position);
  if (!batch.signals.empty()) look(peer);
  look(rank);
}

// An external engine: the next request begins when the link could take it.
void VirtualRequests::issue(Rank rank) {
  VirtualEnd& end = *ends_[rank];
  if (end.issuing) return;
  while (end.in_flight < cost_.device_overlap && end.reader->position() < end.visible) {
    if (events_.now_ns() < end.issue_ns) {
      end.issuing = true;
      events_.after(end.issue_ns - events_.now_ns(), [this, rank] {
        ends_[rank]->issuing = false;
        issue(rank);
      });
      return;
    }
    DecodedRequest request;
    if (!accept(rank, request)) return;
    refresh(rank);
    const Rank peer = request.peer;
    VirtualQueue& queue = end.queues[peer];
    const uint64_t count = queue.signals[request.dst];
    queue.outstanding.push_back(
        {request.copy.bytes == 0, request.signals(), request.dst, count, queue.position});
    if (request.copy.bytes == 0) {
      retire(rank, peer);
      continue;
    }
    ++end.in_flight;
    ++end.stats.copies;
    ++end.stats.batches;
    end.issue_ns = events_.now_ns() + static_cast<double>(request.copy.bytes) / cost_.device_gbps;
    VirtualRequest* const here = &queue.outstanding.back();  // deques keep their places
    events_.after(cost_.device_trip_ns, [this, rank, peer, here, what = request.copy] {
      copy(peer, rank, uint32_t{rank} * ranks_ + rank, cost_.device_gbps, what,
           [this, rank, peer, here] {
             here->done = true;
             --ends_[rank]->in_flight;
             retire(rank, peer);
             issue(rank);
           });
    });
  }
}

// In the order in which they came, as signals need it.
void VirtualRequests::retire(Rank rank, Rank peer) {
  std::deque<VirtualRequest>& outstanding = ends_[rank]->queues[peer].outstanding;
  VirtualBatch told;
  while (!outstanding.empty() && outstanding.front().done) {
    const VirtualRequest& first = outstanding.front();
    if (first.signals) told.signals.emplace_back(first.dst, first.count);
    told.position = first.position;
    outstanding.pop_front();
  }
  if (told.position == 0) return;
  events_.after(cost_.device_trip_ns / 2,
                [this, rank, peer, told = std::move(told)] { tell(rank, peer, told); });
}

void VirtualRequests::move(const RequestCopy& what, bool second) const {
  if (phantom_) return;
  const uint64_t half = what.bytes / 2;
  const uint64_t from = second ? half : 0;
  const uint64_t count = second ? what.bytes - half : half;
  if (count > 0) std::memcpy(what.dst + from, what.src + from, count);
}

void VirtualRequests::copy(Rank dst, Rank src, uint32_t engine, double gbps,
                           const RequestCopy& what, VirtualEvents::Act ended) {
  move(what, false);
  events_.flow(dst, src, engine, gbps, what.bytes, [this, what, ended = std::move(ended)] {
    move(what, true);
    ended();
  });
}

}  // namespace offcore::proxy
