#include "core/mcast/fabric.h"

#include <algorithm>

namespace offcore::mcast {

Fabric::Node::Node(Fabric& in, const Group& group)
    : fabric(in), rank(group.rank), last_ns(group.ranks, 0) {
  endpoint = std::make_unique<Endpoint>(group, *this);
}

Fabric::Fabric(const Group& group, const Faults& faults)
    : group_(group), faults_(faults), random_(faults.seed) {
  for (Rank rank = 0; rank < group.ranks; ++rank) {
    Group own = group;
    own.rank = rank;
    nodes_.push_back(std::make_unique<Node>(*this, own));
  }
}

Fabric::~Fabric() = default;

// Uniform in [0, 1): splitmix64.
double Fabric::chance() {
  uint64_t word = random_ += 0x9e3779b97f4a7c15;
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
  word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
  return static_cast<double>((word ^ (word >> 31)) >> 11) * 0x1p-53;
}

void Fabric::at(int64_t at_ns, Rank rank, std::function<void(Node&)> run) {
  events_.push({std::max(at_ns, now_ns_), events_made_++, rank, std::move(run)});
}

bool Fabric::run_until(int64_t until_ns) {
  while (!events_.empty() && events_.top().at_ns <= until_ns) {
    const Event event = events_.top();
    events_.pop();
    now_ns_ = event.at_ns;
    Node& node = *nodes_[event.rank];
    if (!node.dead) event.run(node);
  }
  if (!events_.empty()) now_ns_ = until_ns;
  return events_.empty();
}

// The endpoint has done something: it may die of it, and may want to be called later.
void Fabric::after_call(Node& node) {
  if (++node.calls >= node.kill_after && !node.dead) {
    node.dead = true;
    for (Rank rank = 0; node.told_ns >= 0 && rank < group_.ranks; ++rank) {
      if (rank == node.rank) continue;
      at(now_ns_ + node.told_ns, rank, [this, lost = node.rank](Node& told) {
        told.endpoint->on_peer_lost(lost, "connection reset", now_ns_);
        after_call(told);
      });
    }
    return;
  }
  const int64_t next_ns = node.endpoint->next_time();
  if (next_ns == kNever || next_ns >= node.timer_ns) return;
  node.timer_ns = next_ns;
  at(next_ns, node.rank, [this, next_ns](Node& due) {
    if (due.timer_ns != next_ns) return;  // an earlier one took its place
    due.timer_ns = kNever;
    due.endpoint->on_time(now_ns_);
    after_call(due);
  });
}

void Fabric::drop(Rank receiver, Rank source, uint32_t psn) {
  drops_.emplace(receiver, source, psn);
}

void Fabric::cut(const std::set<Rank>& side, int64_t from_ns, int64_t until_ns, bool reliable_too) {
  cuts_.push_back({side, from_ns, until_ns, reliable_too});
}

void Fabric::kill(Rank rank, uint64_t after_calls, int64_t told_ns) {
  nodes_[rank]->kill_after = after_calls;
  nodes_[rank]->told_ns = told_ns;
  if (after_calls == 0) after_call(*nodes_[rank]);
}

int64_t Fabric::opens_ns(Rank a, Rank b, bool reliable) const {
  int64_t opens = now_ns_;
  for (const Cut& one : cuts_) {
    if (reliable && !one.reliable_too) continue;
    if (one.side.contains(a) == one.side.contains(b)) continue;
    if (one.from_ns <= now_ns_ && now_ns_ < one.until_ns) opens = std::max(opens, one.until_ns);
  }
  return opens;
}

void Fabric::Node::wake() {
  if (std::exchange(woken, true)) return;
  fabric.at(fabric.now_ns_, rank, [](Node& node) {
    node.woken = false;
    node.endpoint->on_time(node.fabric.now_ns_);
    node.fabric.after_call(node);
  });
}

void Fabric::Node::stop() {
  stopped = true;
  sending = {};
}

void Fabric::Node::send(Rank to, const Message& message) { fabric.carry(*this, to, message, {}); }

void Fabric::Node::send(Rank to, const Message& reply, std::span<const std::byte> data) {
  fabric.carry(*this, to, reply, {data.begin(), data.end()});
}

void Fabric::carry(Node& from, Rank to, const Message& message, std::vector<std::byte> data) {
  if (from.stopped || from.dead) return;
  const double wire_ns =
      static_cast<double>(kMessageBytes + data.size()) / group_.link_bytes_s * 1e9;
  const int64_t free_ns =
      std::max(opens_ns(from.rank, to, true) + faults_.latency_ns, from.last_ns[to]);
  if (free_ns == kNever) return;
  from.last_ns[to] = free_ns + static_cast<int64_t>(wire_ns);
  at(from.last_ns[to], to, [this, sender = from.rank, message, data = std::move(data)](Node& node) {
    if (!data.empty()) {
      const std::span<std::byte> place = node.endpoint->place_of(sender, message);
      if (place.size() == data.size()) std::ranges::copy(data, place.begin());
    }
    node.endpoint->on_message(sender, message, now_ns_);
    after_call(node);
  });
}

void Fabric::Node::multicast(const Part& part) {
  const bool idle = sending.empty();
  sending.push({part});
  if (idle) fabric.at(fabric.now_ns_, rank, [](Node& node) { node.fabric.send_next(node); });
}

void Fabric::send_next(Node& node) {
  if (node.sending.empty()) return;
  Sending& sending = node.sending.front();
  const Part& part = sending.part;
  const uint32_t head = head_bytes(group_);
  auto datagram = std::make_shared<Datagram>();
  datagram->subgroup = part.subgroup;
  datagram->bytes.resize(head + part.chunk_size(sending.index, group_.chunk_bytes));
  write_head(group_, part, sending.index, datagram->bytes.data());
  std::copy_n(part.data + part.offset(sending.index, group_.chunk_bytes),
              datagram->bytes.size() - head, datagram->bytes.begin() + head);
  for (const auto& to : nodes_) {
    if (to->rank != node.rank) deliver(node, *to, datagram);
  }
  const double wire_ns = static_cast<double>(datagram->bytes.size()) / group_.link_bytes_s * 1e9;
  const int64_t out_ns = now_ns_ + static_cast<int64_t>(wire_ns);
  if (++sending.index < part.chunks) {
    at(out_ns, node.rank, [this](Node& more) { send_next(more); });
    return;
  }
  at(out_ns, node.rank, [this, part](Node& done) {
    if (done.sending.empty()) return;  // stopped
    done.sending.pop();
    if (!done.sending.empty()) send_next(done);
    done.endpoint->on_sent(part, now_ns_);
    after_call(done);
  });
}

void Fabric::deliver(Node& from, Node& to, const Shared& datagram) {
  if (faults_.burst_begin > 0) {
    to.burst = to.burst ? chance() >= faults_.burst_end : chance() < faults_.burst_begin;
  }
  const uint32_t psn = load_big<uint32_t>(datagram->bytes.data() + 4);
  const bool chosen = drops_.erase({to.rank, from.rank, psn}) > 0;
  if (chosen || to.burst || chance() < faults_.loss) return;
  if (opens_ns(from.rank, to.rank, false) > now_ns_) return;
  const int copies = chance() < faults_.duplicate ? 2 : 1;
  for (int i = 0; i < copies; ++i) {
    double delay_ns = static_cast<double>(faults_.latency_ns);
    delay_ns += chance() * static_cast<double>(faults_.jitter_ns);
    if (chance() < faults_.reorder) delay_ns += static_cast<double>(faults_.reorder_ns);
    at(now_ns_ + static_cast<int64_t>(delay_ns), to.rank,
       [this, datagram](Node& node) { arrive(node, datagram); });
  }
}

void Fabric::arrive(Node& node, const Shared& datagram) {
  const uint64_t bytes = datagram->bytes.size();
  if (node.slow && node.arrived_bytes + bytes > faults_.queue_bytes) return;  // overrun
  node.arrived.push(datagram);
  node.arrived_bytes += bytes;
  if (std::exchange(node.draining, true)) return;
  const double wait_ns = node.slow ? static_cast<double>(bytes) / faults_.drain_bytes_s * 1e9 : 0;
  at(now_ns_ + static_cast<int64_t>(wait_ns), node.rank, [this](Node& due) { drain(due); });
}

// Hands over the first datagrams that have arrived, as one buffer where GRO would make it one.
void Fabric::drain(Node& node) {
  node.draining = false;
  if (node.arrived.empty()) return;
  const uint32_t subgroup = node.arrived.front()->subgroup;
  const size_t segment = node.arrived.front()->bytes.size();
  std::vector<std::byte> buffer;
  for (uint32_t count = 0; count < faults_.together && !node.arrived.empty(); ++count) {
    const Datagram& next = *node.arrived.front();
    if (next.subgroup != subgroup || next.bytes.size() > segment) break;
    const bool last = next.bytes.size() < segment;
    buffer.insert(buffer.end(), next.bytes.begin(), next.bytes.end());
    node.arrived.pop();
    if (last) break;
  }
  node.arrived_bytes -= buffer.size();
  Receiver::Batch(node.endpoint->receiver(subgroup)).take(buffer, static_cast<uint32_t>(segment));
  if (node.arrived.empty()) return;
  node.draining = true;
  const double wait_ns =
      node.slow ? static_cast<double>(buffer.size()) / faults_.drain_bytes_s * 1e9 : 0;
  at(now_ns_ + static_cast<int64_t>(wait_ns), node.rank, [this](Node& due) { drain(due); });
}

void Fabric::inject(Rank to, uint32_t subgroup, std::span<const std::byte> bytes,
                    uint32_t segment_bytes) {
  if (nodes_[to]->dead) return;
  Receiver::Batch(nodes_[to]->endpoint->receiver(subgroup)).take(bytes, segment_bytes);
}

void Fabric::inject(Rank to, Rank from, const Message& message) {
  if (nodes_[to]->dead) return;
  nodes_[to]->endpoint->on_message(from, message, now_ns_);
  after_call(*nodes_[to]);
}

}  // namespace offcore::mcast
