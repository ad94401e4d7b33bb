#include "studies/fat_tree/fabric.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"

namespace offcore::tree {
namespace {

Time from_ns(double ns) { return static_cast<Time>(ns * kPerNs); }

int64_t pieces(int64_t bytes, int64_t size) {
  return std::max<int64_t>(1, (bytes + size - 1) / size);
}

}  // namespace

Fabric::Fabric(const TreeShape& shape, const Wire& wire, int lanes)
    : tree_(shape),
      wire_(wire),
      segment_bytes_(wire.segment_bytes > 0 ? wire.segment_bytes : wire.packet_bytes),
      ps_per_byte_(8000.0 / wire.gbitps),
      hop_time_(from_ns(wire.hop_ns)) {
  if (wire.gbitps <= 0 || wire.packet_bytes < 1 || segment_bytes_ < 1 || wire.recv_workers < 1 ||
      wire.hop_ns < 0 || wire.ack_packets < 1)
    fail(Code::invalid, "links need a bandwidth, packets a length, hosts a receive worker");
  const auto hosts = static_cast<size_t>(tree_.hosts());
  free_.resize(static_cast<size_t>(tree_.links()));
  links_.resize(free_.size());
  nics_.resize(hosts);
  for (Nic& nic : nics_) nic.lanes.resize(static_cast<size_t>(lanes));
  worker_free_.resize(hosts * static_cast<size_t>(wire.recv_workers));
}

int Fabric::packets_of(int64_t bytes) const {
  return static_cast<int>(pieces(bytes, segment_bytes_));
}

int64_t Fabric::payload(const MessageInFlight& flight, int packet) const {
  const int64_t before = int64_t{packet} * segment_bytes_;
  return std::min<int64_t>(segment_bytes_, flight.message.bytes - before);
}

int64_t Fabric::wire_packets(int64_t payload) const { return pieces(payload, wire_.packet_bytes); }

int64_t Fabric::wire_bytes(const MessageInFlight& flight, int packet) const {
  const int64_t bytes = payload(flight, packet);
  const bool stream = flight.message.kind == TreeMessageKind::unicast;
  return bytes + wire_packets(bytes) * (stream ? wire_.stream_header : wire_.datagram_header);
}

void Fabric::post(Time when, LinkEventKind what, int place, int message, int packet) {
  events_due_.push({when, order_++, what, place, message, packet, nullptr});
  if (what != LinkEventKind::inject) ++flights_[static_cast<size_t>(message)].uses;
}

void Fabric::at(Time when, Schedule& schedule, int host, int tag) {
  events_due_.push({when, order_++, LinkEventKind::timer, host, tag, 0, &schedule});
}

void Fabric::run(const std::vector<Schedule*>& schedules) {
  for (Schedule* schedule : schedules) schedule->start();
  while (!events_due_.empty()) {
    const LinkEvent event = events_due_.top();
    events_due_.pop();
    ++events_;
    handle(event);
  }
}

void Fabric::handle(const LinkEvent& event) {
  switch (event.what) {
    case LinkEventKind::timer:
      return event.schedule->timer(event.place, event.message, event.when);
    case LinkEventKind::inject:
      return inject(event.place, event.when);
    case LinkEventKind::ready:
      enqueue(event.message, event.when);
      break;
    case LinkEventKind::arrive: {
      const TreeMessage message = flights_[static_cast<size_t>(event.message)].message;
      message.owner->arrived(event.place, message, event.when);
      break;
    }
    case LinkEventKind::hop:
      switch (flights_[static_cast<size_t>(event.message)].message.kind) {
        case TreeMessageKind::unicast:
          unicast(event.message, event.packet, event.place, event.when);
          break;
        case TreeMessageKind::multicast:
          multicast(event.message, event.packet, event.place, event.when);
          break;
        case TreeMessageKind::reduce:
          reduce(event.message, event.packet, event.place, event.when);
          break;
      }
      break;
  }
  drop(event.message);
}

// An event that named the flight is over.
void Fabric::drop(int message) {
  MessageInFlight& flight = flights_[static_cast<size_t>(message)];
  if (--flight.uses == 0) unused_.push_back(message);
}

void Fabric::send(const TreeMessage& message, Time now) {
  int id = 0;
  if (unused_.empty()) {
    id = static_cast<int>(flights_.size());
    flights_.emplace_back();
  } else {
    id = unused_.back();
    unused_.pop_back();
  }
  MessageInFlight& flight = flights_[static_cast<size_t>(id)];
  flight = MessageInFlight{.message = message, .packets = packets_of(message.bytes), .uses = 1};
  if (message.kind == TreeMessageKind::unicast)
    flight.route = tree_.route(message.src, message.dst);
  if (message.kind == TreeMessageKind::unicast && wire_.message_ns > 0) {
    post(now + from_ns(wire_.message_ns), LinkEventKind::ready, message.src, id, 0);
  } else {
    enqueue(id, now);
  }
}

void Fabric::enqueue(int message, Time now) {
  const TreeMessage& sent = flights_[static_cast<size_t>(message)].message;
  Nic& nic = nics_[static_cast<size_t>(sent.src)];
  nic.lanes[static_cast<size_t>(sent.owner->lane)].push_back(message);
  if (nic.busy) return;
  nic.busy = true;
  post(now, LinkEventKind::inject, sent.src, 0, 0);
}

void Fabric::inject(int host, Time now) {
  Nic& nic = nics_[static_cast<size_t>(host)];
  if (const int left = std::exchange(nic.leaving, -1); left >= 0) {
    const TreeMessage message = flights_[static_cast<size_t>(left)].message;
    drop(left);
    message.owner->sent(message, now);
  }
  size_t tried = 0;
  while (tried < nic.lanes.size() && nic.lanes[nic.turn].empty()) {
    nic.turn = (nic.turn + 1) % nic.lanes.size();
    ++tried;
  }
  if (nic.lanes[nic.turn].empty()) {
    nic.busy = false;
    return;
  }
  auto& lane = nic.lanes[nic.turn];
  nic.turn = (nic.turn + 1) % nic.lanes.size();
  const int id = lane.front();
  MessageInFlight& flight = flights_[static_cast<size_t>(id)];
  const int packet = flight.injected++;
  if (flight.injected == flight.packets) {
    lane.pop_front();
    nic.leaving = id;
  }
  const int link = tree_.host_up(host);
  const int64_t bytes = wire_bytes(flight, packet), count = wire_packets(payload(flight, packet));
  const TreeMessageKind kind = flight.message.kind;
  const Passage passage = pass(link, bytes, count, now);
  post(passage.next, LinkEventKind::hop, kind == TreeMessageKind::unicast ? 1 : link, id, packet);
  Time busy = wire_time(bytes);
  if (kind == TreeMessageKind::multicast)
    busy = std::max(busy, static_cast<Time>(double(count) * wire_.datagram_send_ns * kPerNs));
  post(now + busy, LinkEventKind::inject, host, 0, 0);
}

Fabric::Passage Fabric::pass(int link, int64_t bytes, int64_t packets, Time now) {
  Time& free = free_[static_cast<size_t>(link)];
  LinkCount& count = links_[static_cast<size_t>(link)];
  const Time start = std::max(now, free), lasts = wire_time(bytes);
  count.bytes += bytes;
  count.packets += packets;
  const auto waiting = static_cast<int64_t>(double(start - now) / ps_per_byte_);
  count.queue_bytes_max = std::max(count.queue_bytes_max, waiting);
  free = start + lasts;
  return {start + hop_time_ + (wire_.cut_through ? 0 : lasts), start + lasts + hop_time_};
}

void Fabric::unicast(int message, int packet, int hops, Time now) {
  MessageInFlight& flight = flights_[static_cast<size_t>(message)];
  const int link = flight.route.links[static_cast<size_t>(hops)];
  const int64_t count = wire_packets(payload(flight, packet));
  const Passage passage = pass(link, wire_bytes(flight, packet), count, now);
  if (hops + 1 < flight.route.length) {
    post(passage.next, LinkEventKind::hop, hops + 1, message, packet);
    return;
  }
  flight.arrived += static_cast<int>(count);
  if (packet + 1 < flight.packets) return;
  // Acknowledgements take the way back, which is the same links in the other direction.
  if (wire_.ack_bytes > 0) {
    const Route back = tree_.route(flight.message.dst, flight.message.src);
    const int64_t acks = pieces(flight.arrived, wire_.ack_packets);
    for (int i = 0; i < back.length; ++i) {
      LinkCount& counted = links_[static_cast<size_t>(back.links[static_cast<size_t>(i)])];
      counted.bytes += acks * wire_.ack_bytes;
      counted.packets += acks;
    }
  }
  post(passage.tail, LinkEventKind::arrive, flight.message.dst, message, packet);
}

void Fabric::forward(int message, int packet, int link, Time now) {
  const MessageInFlight& flight = flights_[static_cast<size_t>(message)];
  const int64_t count = wire_packets(payload(flight, packet));
  const Passage passage = pass(link, wire_bytes(flight, packet), count, now);
  post(passage.next, LinkEventKind::hop, link, message, packet);
}

void Fabric::to_hosts(int message, int packet, int leaf, int except, Time now) {
  const MessageInFlight& flight = flights_[static_cast<size_t>(message)];
  const TreeMessage told = flight.message;
  const int64_t bytes = wire_bytes(flight, packet), count = wire_packets(payload(flight, packet));
  const int64_t worker = packet % wire_.recv_workers;
  const Time work = static_cast<Time>(double(count) * wire_.datagram_recv_ns * kPerNs);
  for (int host = tree_.leaf_first_host(leaf); host < tree_.leaf_end_host(leaf); ++host) {
    if (host == except) continue;
    const Passage passage = pass(tree_.host_down(host), bytes, count, now);
    Time& free = worker_free_[static_cast<size_t>(int64_t{host} * wire_.recv_workers + worker)];
    free = std::max(free, passage.tail) + work;
    told.owner->datagram(host, told, packet, free);
  }
}

void Fabric::to_leaves(int message, int packet, int pod, int except, Time now) {
  const int group = flights_[static_cast<size_t>(message)].message.dst;
  for (int leaf = tree_.pod_first_leaf(pod); leaf < tree_.pod_end_leaf(pod); ++leaf) {
    if (leaf != except) forward(message, packet, tree_.leaf_down(leaf, group), now);
  }
}

// A switch sends a packet on to every link of its tree but the one that it came by.
void Fabric::multicast(int message, int packet, int link, Time now) {
  const TreeMessage sent = flights_[static_cast<size_t>(message)].message;
  const int owner = tree_.owner_of(link);
  switch (tree_.tier_of(link)) {
    case Tier::host_up: {
      const int leaf = tree_.leaf_of(owner);
      to_hosts(message, packet, leaf, owner, now);
      if (tree_.leaves() > 1) forward(message, packet, tree_.leaf_up(leaf, sent.dst), now);
      break;
    }
    case Tier::leaf_up: {
      const int pod = tree_.pod_of(owner);
      to_leaves(message, packet, pod, owner, now);
      if (tree_.pods() > 1) forward(message, packet, tree_.spine_up(pod, sent.dst), now);
      break;
    }
    case Tier::spine_up: {
      const int from = owner / tree_.shape().spines;
      for (int pod = 0; pod < tree_.pods(); ++pod) {
        if (pod != from) forward(message, packet, tree_.spine_down(pod, sent.dst), now);
      }
      break;
    }
    case Tier::spine_down:
      to_leaves(message, packet, owner / tree_.shape().spines, -1, now);
      break;
    default:
      to_hosts(message, packet, owner, -1, now);
  }
}

// Where a contribution to `dst` is combined with others after it has come by `link`.
Fabric::Junction Fabric::junction(int link, int dst) const {
  const Tier tier = tree_.tier_of(link);
  const int owner = tree_.owner_of(link), home = tree_.leaf_of(dst), home_pod = tree_.pod_of(home);
  const auto place = [](uint64_t level, int which) { return level << 20 | uint64_t(which); };
  if (tier == Tier::host_up || tier == Tier::leaf_down) {
    const int leaf = tier == Tier::host_up ? tree_.leaf_of(owner) : owner;
    const int inputs = tree_.leaf_end_host(leaf) - tree_.leaf_first_host(leaf);
    if (leaf != home) return {place(0, leaf), inputs, tree_.leaf_up(leaf, dst)};
    return {place(0, leaf), inputs - 1 + (tree_.leaves() > 1), tree_.host_down(dst)};
  }
  if (tier == Tier::spine_up)
    return {place(2, 0), tree_.pods() - 1, tree_.spine_down(home_pod, dst)};
  const int pod = tier == Tier::leaf_up ? tree_.pod_of(owner) : home_pod;
  const int inputs = tree_.pod_end_leaf(pod) - tree_.pod_first_leaf(pod);
  if (pod != home_pod) return {place(1, pod), inputs, tree_.spine_up(pod, dst)};
  return {place(1, pod), inputs - 1 + (tree_.pods() > 1), tree_.leaf_down(home, dst)};
}

void Fabric::reduce(int message, int packet, int link, Time now) {
  const TreeMessage sent = flights_[static_cast<size_t>(message)].message;
  const Junction meets = junction(link, sent.dst);
  const uint64_t key = meets.place << 42 | uint64_t(sent.dst) << 24 | uint64_t(packet);
  if (++combined_[key] < meets.inputs) return;
  combined_.erase(key);
  if (tree_.tier_of(meets.output) != Tier::host_down) {
    forward(message, packet, meets.output, now);
    return;
  }
  const MessageInFlight& flight = flights_[static_cast<size_t>(message)];
  const int64_t count = wire_packets(payload(flight, packet));
  const Passage passage = pass(meets.output, wire_bytes(flight, packet), count, now);
  sent.owner->datagram(sent.dst, sent, packet, passage.tail);
}

}  // namespace offcore::tree
