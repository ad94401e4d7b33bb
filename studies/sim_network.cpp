#include "studies/sim_network.h"

#include <algorithm>

namespace offcore::mcast {

SimNetwork::NetworkHost::NetworkHost(SimNetwork& in, const Group& of, size_t number)
    : network(in), group(of), communicator(number), rank(of.rank), last_ns(of.ranks, 0) {
  endpoint = std::make_unique<Endpoint>(group, *this);
}

SimNetwork::SimNetwork(std::vector<Group> groups, const Faults& faults)
    : ranks_(groups.empty() ? 0 : groups.front().ranks), faults_(faults), random_(faults.seed) {
  for (Group& group : groups) {
    if (group.ranks != ranks_) fail(Code::invalid, "communicators of different numbers of ranks");
    for (group.rank = 0; group.rank < ranks_; ++group.rank) {
      hosts_.push_back(std::make_unique<NetworkHost>(*this, group, hosts_.size() / ranks_));
    }
  }
}

SimNetwork::NetworkHost& SimNetwork::host(GroupRank rank, size_t communicator) const {
  if (rank >= ranks_ || communicator >= hosts_.size() / ranks_) {
    fail(Code::invalid, "no rank ", rank, " of communicator ", communicator);
  }
  return *hosts_[communicator * ranks_ + rank];
}

SimNetwork::~SimNetwork() {
  for (const auto& one : hosts_) one->dead = true;  // nobody is left to say goodbye to
  hosts_.clear();
}

// Uniform in [0, 1): splitmix64.
double SimNetwork::chance() {
  uint64_t word = random_ += 0x9e3779b97f4a7c15;
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
  word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
  return static_cast<double>((word ^ (word >> 31)) >> 11) * 0x1p-53;
}

void SimNetwork::at(int64_t at_ns, NetworkHost& host, std::function<void(NetworkHost&)> run) {
  events_.push({std::max(at_ns, now_ns_), events_made_++, &host, std::move(run)});
}

bool SimNetwork::run_until(int64_t until_ns) {
  while (!events_.empty() && events_.top().at_ns <= until_ns) {
    const NetworkEvent event = events_.top();
    events_.pop();
    now_ns_ = event.at_ns;
    if (!event.host->dead) event.run(*event.host);
  }
  if (!events_.empty()) now_ns_ = until_ns;
  return events_.empty();
}

// The endpoint has done something: it may die of it, and may want to be called later.
void SimNetwork::after_call(NetworkHost& host) {
  if (++host.calls >= host.kill_after && !host.dead) {
    for (const auto& other : hosts_) {
      if (other->rank == host.rank) other->dead = true;  // with all its communicators
      if (other->dead || host.told_ns < 0) continue;
      at(now_ns_ + host.told_ns, *other, [this, lost = host.rank](NetworkHost& told) {
        told.endpoint->on_peer_lost(lost, "connection reset", now_ns_);
        after_call(told);
      });
    }
    return;
  }
  const int64_t next_ns = host.endpoint->next_time();
  if (next_ns == kNever || next_ns >= host.timer_ns) return;
  host.timer_ns = next_ns;
  at(next_ns, host, [this, next_ns](NetworkHost& due) {
    if (due.timer_ns != next_ns) return;  // an earlier one took its place
    due.timer_ns = kNever;
    due.endpoint->on_time(now_ns_);
    after_call(due);
  });
}

void SimNetwork::drop(GroupRank receiver, GroupRank source, uint32_t psn) {
  drops_.emplace(receiver, source, psn);
}

void SimNetwork::cut(const std::set<GroupRank>& side, int64_t from_ns, int64_t until_ns,
                     bool reliable_too) {
  cuts_.push_back({side, from_ns, until_ns, reliable_too});
}

void SimNetwork::kill(GroupRank rank, uint64_t after_calls, int64_t told_ns) {
  NetworkHost& doomed = host(rank, 0);
  doomed.kill_after = after_calls;
  doomed.told_ns = told_ns;
  if (after_calls == 0) after_call(doomed);
}

int64_t SimNetwork::opens_ns(GroupRank a, GroupRank b, bool reliable) const {
  int64_t opens = now_ns_;
  for (const Cut& one : cuts_) {
    if (reliable && !one.reliable_too) continue;
    if (one.side.contains(a) == one.side.contains(b)) continue;
    if (one.from_ns <= now_ns_ && now_ns_ < one.until_ns) opens = std::max(opens, one.until_ns);
  }
  return opens;
}

void SimNetwork::NetworkHost::wake() {
  if (std::exchange(woken, true)) return;
  network.at(network.now_ns_, *this, [](NetworkHost& host) {
    host.woken = false;
    host.endpoint->on_time(host.network.now_ns_);
    host.network.after_call(host);
  });
}

void SimNetwork::NetworkHost::stop() {
  stopped = true;
  sending = {};
}

void SimNetwork::NetworkHost::send(GroupRank to, const Message& message) {
  network.carry(*this, to, message, {});
}

void SimNetwork::NetworkHost::send(GroupRank to, const Message& reply,
                                   std::span<const std::byte> data) {
  network.carry(*this, to, reply, {data.begin(), data.end()});
}

void SimNetwork::carry(NetworkHost& from, GroupRank to, const Message& message,
                       std::vector<std::byte> data) {
  if (from.stopped || from.dead) return;
  const double wire_ns =
      static_cast<double>(kMessageBytes + data.size()) / from.group.link_bytes_s * 1e9;
  const int64_t open_ns = opens_ns(from.rank, to, true);
  if (open_ns == kNever) return;
  const int64_t free_ns = std::max(open_ns + faults_.latency_ns, from.last_ns[to]);
  from.last_ns[to] = free_ns + static_cast<int64_t>(wire_ns);
  at(from.last_ns[to], host(to, from.communicator),
     [this, sender = from.rank, message = Message(message),
      data = std::move(data)](NetworkHost& host) mutable {
       if (!data.empty()) {
         const std::span<std::byte> place = host.endpoint->place_of(sender, message);
         if (place.size() == data.size()) std::ranges::copy(data, place.begin());
         if (place.empty()) message.payload_bytes = 0;
       }
       host.endpoint->on_message(sender, message, now_ns_);
       after_call(host);
     });
}

void SimNetwork::NetworkHost::multicast(const BlockPart& part) {
  const bool idle = sending.empty();
  sending.push({part});
  if (idle)
    network.at(network.now_ns_, *this, [](NetworkHost& host) { host.network.send_next(host); });
}

void SimNetwork::send_next(NetworkHost& host) {
  if (host.sending.empty()) return;
  Sending& sending = host.sending.front();
  const BlockPart& part = sending.part;
  const uint32_t head = head_bytes(host.group);
  auto datagram = std::make_shared<NetworkDatagram>();
  datagram->subgroup = part.subgroup;
  datagram->bytes.resize(head + part.chunk_size(sending.index, host.group.chunk_bytes));
  write_head(host.group, part, sending.index, datagram->bytes.data());
  std::copy_n(part.data + part.offset(sending.index, host.group.chunk_bytes),
              datagram->bytes.size() - head, datagram->bytes.begin() + head);
  for (const auto& to : hosts_) {
    // One multicast group for all communicators: strangers' datagrams arrive too.
    if (to->rank != host.rank) deliver(host, *to, datagram);
  }
  const double wire_ns =
      static_cast<double>(datagram->bytes.size()) / host.group.link_bytes_s * 1e9;
  const int64_t out_ns = now_ns_ + static_cast<int64_t>(wire_ns);
  if (++sending.index < part.chunks) {
    at(out_ns, host, [this](NetworkHost& more) { send_next(more); });
    return;
  }
  at(out_ns, host, [this, part](NetworkHost& done) {
    if (done.sending.empty()) return;  // stopped
    done.sending.pop();
    if (!done.sending.empty()) send_next(done);
    done.endpoint->on_sent(part, now_ns_);
    after_call(done);
  });
}

void SimNetwork::deliver(NetworkHost& from, NetworkHost& to, const Shared& datagram) {
  if (faults_.burst_begin > 0) {
    to.burst = to.burst ? chance() >= faults_.burst_end : chance() < faults_.burst_begin;
  }
  const uint32_t psn = read_head(datagram->bytes.data()).psn;
  const bool chosen = drops_.erase({to.rank, from.rank, psn}) > 0;
  if (chosen || to.burst || chance() < faults_.loss) return;
  if (opens_ns(from.rank, to.rank, false) > now_ns_ || datagram->subgroup >= to.group.subgroups) {
    return;
  }
  const int copies = chance() < faults_.duplicate ? 2 : 1;
  for (int i = 0; i < copies; ++i) {
    double delay_ns = static_cast<double>(faults_.latency_ns);
    delay_ns += chance() * static_cast<double>(faults_.jitter_ns);
    if (chance() < faults_.reorder) delay_ns += static_cast<double>(faults_.reorder_ns);
    at(now_ns_ + static_cast<int64_t>(delay_ns), to,
       [this, datagram](NetworkHost& host) { arrive(host, datagram); });
  }
}

int64_t SimNetwork::drain_ns(const NetworkHost& host, uint64_t bytes) const {
  if (!host.slow) return faults_.gather_ns;
  return static_cast<int64_t>(static_cast<double>(bytes) / faults_.drain_bytes_s * 1e9);
}

void SimNetwork::arrive(NetworkHost& host, const Shared& datagram) {
  const uint64_t bytes = datagram->bytes.size();
  if (host.slow && host.arrived_bytes + bytes > faults_.queue_bytes) return;  // overrun
  host.arrived.push(datagram);
  host.arrived_bytes += bytes;
  if (std::exchange(host.draining, true)) return;
  at(now_ns_ + drain_ns(host, bytes), host, [this](NetworkHost& due) { drain(due); });
}

// As one buffer, or scattered: chunks at once to where they belong if they come in order.
void SimNetwork::hand_over(NetworkHost& host, uint32_t subgroup, std::span<const std::byte> buffer,
                           uint32_t segment) {
  Receiver::ReceiveVisit batch(host.endpoint->receiver(subgroup));
  const uint32_t head = head_bytes(host.group);
  const size_t whole = segment == head + host.group.chunk_bytes ? buffer.size() / segment : 0;
  if (whole > 0 && chance() < faults_.scatter) {
    std::vector<std::byte*> places(whole);
    places.resize(batch.next_places(places));
    std::vector<std::byte> heads(places.size() * head);
    for (size_t i = 0; i < places.size(); ++i) {
      std::copy_n(buffer.begin() + i * segment, head, heads.begin() + i * head);
      std::copy_n(buffer.begin() + i * segment + head, segment - head, places[i]);
    }
    buffer = buffer.subspan(batch.take_placed(heads, places) * segment);
  }
  if (!buffer.empty()) batch.take(buffer, segment);
}

// Hands over the first datagrams that have arrived, as one buffer where GRO would make it one.
void SimNetwork::drain(NetworkHost& host) {
  host.draining = false;
  if (host.arrived.empty()) return;
  const uint32_t subgroup = host.arrived.front()->subgroup;
  const size_t segment = host.arrived.front()->bytes.size();
  std::vector<std::byte> buffer;
  for (uint32_t count = 0; count < faults_.together && !host.arrived.empty(); ++count) {
    const NetworkDatagram& next = *host.arrived.front();
    if (next.subgroup != subgroup || next.bytes.size() > segment) break;
    const bool last = next.bytes.size() < segment;
    buffer.insert(buffer.end(), next.bytes.begin(), next.bytes.end());
    host.arrived.pop();
    if (last) break;
  }
  host.arrived_bytes -= buffer.size();
  hand_over(host, subgroup, buffer, static_cast<uint32_t>(segment));
  if (host.arrived.empty()) return;
  host.draining = true;
  at(now_ns_ + drain_ns(host, buffer.size()), host, [this](NetworkHost& due) { drain(due); });
}

void SimNetwork::inject(GroupRank to, uint32_t subgroup, std::span<const std::byte> bytes,
                        uint32_t segment_bytes) {
  NetworkHost& reached = host(to, 0);
  if (subgroup >= reached.group.subgroups || reached.dead) return;
  Receiver::ReceiveVisit(reached.endpoint->receiver(subgroup)).take(bytes, segment_bytes);
}

void SimNetwork::inject(GroupRank to, GroupRank from, const Message& message) {
  NetworkHost& reached = host(to, 0);
  if (reached.dead) return;
  reached.endpoint->on_message(from, message, now_ns_);
  after_call(reached);
}

}  // namespace offcore::mcast
