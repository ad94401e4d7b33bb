#include <set>
#include <utility>

#include "core/base/error.h"
#include "studies/fat_tree/schedules.h"

namespace offcore::tree {
namespace {

// Reproducible whatever order events come in.
double drawn(uint64_t seed, uint64_t host, uint64_t chunk) {
  uint64_t x = seed * 0x9E3779B97F4A7C15u + host * 0xBF58476D1CE4E5B9u + chunk;
  for (int round = 0; round < 2; ++round) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    x ^= x >> 31;
  }
  return double(x >> 11) * 0x1p-53;
}

// Barrier; roots of M chains one after the other; cutoff timer and fetch ring; final handshake.
class Multicast final : public TreeCollective {
 public:
  Multicast(Fabric& fabric, const Load& load)
      : TreeCollective(fabric, load),
        hosts_state_(size_t(hosts_)),
        first_chunk_(size_t(hosts_) + 1) {
    if (load.chains < 1) fail(Code::invalid, "an all-gather has at least one chain");
    chains_ = std::min(load.chains, hosts_);
    for (int rank = 0; rank < hosts_; ++rank)
      first_chunk_[size_t(rank) + 1] = first_chunk_[size_t(rank)] + chunks_of(rank);
    powers_ = 1;
    while (powers_ * 2 <= hosts_) powers_ *= 2;
    cutoff_ = fabric.wire_time(load.bytes) + static_cast<Time>(load.alpha_ns * kPerNs);
  }

  void start() override {
    if (hosts_ == 1) return done(0, 0);
    for (int host = 0; host < hosts_; ++host) enter(host);
  }

  void sent(const TreeMessage& message, Time now) override {
    if (message.kind != TreeMessageKind::multicast) return;
    const int root = message.src;
    state(root).sent = true;
    state(root).data_end = std::max(state(root).data_end, now);
    const int next = root + 1;
    if (load_.op == "all_gather" && next < hosts_ && chain_of(next) == chain_of(root))
      send(root, next, kControlBytes, kActivate, now);
    received(root);
  }

  void arrived(int host, const TreeMessage& message, Time now) override {
    switch (message.tag) {
      case kActivate:
        state(host).active = true;
        return multicast(host, now);
      case kRequest:
        return serve(host, now);
      case kData:
        return fetched(host, message.part, now);
      case kFinal:
        state(host).final = true;
        return close(host, now);
      default:
        state(host).heard |= 1u << message.tag;
        return synchronize(host, now);
    }
  }

  void datagram(int host, const TreeMessage& message, int packet, Time when) override {
    Host& self = state(host);
    ++self.seen;
    const int64_t chunk = first_chunk_[size_t(message.src)] + packet;
    if (load_.loss > 0 && drawn(load_.seed, uint64_t(host), uint64_t(chunk)) < load_.loss) {
      self.missing.insert(chunk);
      ++lost_;
      return;
    }
    self.data_end = std::max(self.data_end, when);
    received(host);
  }

  void timer(int host, int tag, Time now) override {
    Host& self = state(host);
    if (tag == kReceived) return complete(host, now);
    if (self.completed >= 0) return;
    // What is still on its way is no loss: the timer was too short, so it runs once more.
    if (!over(host) || now < self.data_end)
      return fabric_.at(std::max(now, self.data_end) + alpha(), *this, host, kCutoff);
    if (self.missing.empty()) return;
    const auto bytes = kControlBytes + 4 * static_cast<int64_t>(self.missing.size());
    send(host, wrapped(host - 1), bytes, kRequest, now);
  }

  Outcome outcome() const override {
    Outcome outcome = TreeCollective::outcome();
    if (hosts_ == 1) return outcome;
    outcome.lost = lost_;
    outcome.fetched = fetched_;
    for (size_t host = 0; host < hosts_state_.size(); ++host) {
      const Host& self = hosts_state_[host];
      outcome.phases.barrier_ns += double(self.entered) / kPerNs / hosts_;
      outcome.phases.multicast_ns += double(self.data_end - self.entered) / kPerNs / hosts_;
      outcome.phases.fetch_ns += double(self.completed - self.data_end) / kPerNs / hosts_;
      outcome.phases.handshake_ns += double(done_[host] - self.completed) / kPerNs / hosts_;
    }
    return outcome;
  }

 private:
  // Tags below are the barrier's steps: 0 to the doubled pairs, 1 + log2 after them.
  enum Tag { kFold = 0, kUnfold = 30, kActivate = 40, kRequest, kData, kFinal, kCutoff, kReceived };

  struct Host {
    uint32_t heard = 0;  // steps of the barrier
    int step = 0;
    bool ready = false, active = false, started = false, sent = false, final = false;
    Time entered = 0, data_end = 0, completed = -1;
    int64_t seen = 0;
    std::set<int64_t> missing;
    std::set<int64_t> wanted;  // by the right neighbour, and missing here too
  };

  Host& state(int host) { return hosts_state_[size_t(host)]; }
  bool is_root(int host) const { return load_.op == "all_gather" || host == load_.root; }
  int64_t chunks_of(int rank) const {
    return is_root(rank) ? fabric_.packets_of(payload(rank)) : 0;
  }
  int64_t payload(int rank) const { return load_.op == "broadcast" ? load_.bytes : block(rank); }
  int64_t expected(int host) const { return first_chunk_.back() - chunks_of(host); }
  int chain_of(int host) const { return int(int64_t{host} * chains_ / hosts_); }
  bool leads(int host) const { return host == 0 || chain_of(host - 1) != chain_of(host); }
  Time alpha() const { return std::max<Time>(kPerNs, Time(load_.alpha_ns * kPerNs)); }

  // Recursive doubling among the largest power of two; the others join a partner before and after.
  void enter(int host) {
    if (host >= powers_) return send(host, host - powers_, kControlBytes, kFold, 0);
    if (host + powers_ < hosts_) return;
    state(host).heard |= 1u << kFold;
    synchronize(host, 0);
  }

  void synchronize(int host, Time now) {
    Host& self = state(host);
    if (host >= powers_) {
      if (self.heard >> kUnfold & 1) entered(host, now);
      return;
    }
    while (self.heard >> self.step & 1) {
      const int distance = 1 << self.step++;
      if (distance < powers_) {
        send(host, host ^ distance, kControlBytes, self.step, now);
      } else {
        if (host + powers_ < hosts_) send(host, host + powers_, kControlBytes, kUnfold, now);
        return entered(host, now);
      }
    }
  }

  void entered(int host, Time now) {
    Host& self = state(host);
    self.entered = self.data_end = now;
    self.active = self.active || load_.op == "broadcast" || leads(host);
    fabric_.at(now + cutoff_, *this, host, kCutoff);
    self.ready = true;
    multicast(host, now);
  }

  void multicast(int host, Time now) {
    Host& self = state(host);
    if (!is_root(host) || !self.active || self.started || !self.ready) return;
    self.started = true;
    const int group = load_.op == "all_gather" ? chain_of(host) : load_.root;
    fabric_.send({this, TreeMessageKind::multicast, host, group, 0, 0, payload(host)}, now);
  }

  bool over(int host) { return state(host).seen == expected(host) && sent_own(host); }
  bool sent_own(int host) { return !is_root(host) || state(host).sent; }

  void received(int host) {
    if (over(host) && state(host).missing.empty())
      fabric_.at(state(host).data_end, *this, host, kReceived);
  }

  void complete(int host, Time now) {
    Host& self = state(host);
    if (self.completed >= 0) return;
    self.completed = now;
    send(host, wrapped(host - 1), kControlBytes, kFinal, now);
    close(host, now);
  }

  void close(int host, Time now) {
    if (state(host).completed >= 0 && state(host).final) done(host, now);
  }

  // The right neighbour asks: it gets at once what is here, and the rest as it comes.
  void serve(int host, Time now) {
    const std::set<int64_t>& asked = state(wrapped(host + 1)).missing;
    std::vector<int64_t> here;
    for (const int64_t chunk : asked)
      state(host).missing.count(chunk) ? void(state(host).wanted.insert(chunk))
                                       : here.push_back(chunk);
    give(host, std::move(here), now);
  }

  void give(int host, std::vector<int64_t> chunks, Time now) {
    if (chunks.empty()) return;
    const int64_t bytes = kControlBytes + int64_t(chunks.size()) * fabric_.segment_bytes();
    const int part = static_cast<int>(given_.size());
    given_.push_back(std::move(chunks));
    send(host, wrapped(host + 1), bytes, kData, now, part);
  }

  void fetched(int host, int part, Time now) {
    Host& self = state(host);
    std::vector<int64_t> more;
    for (const int64_t chunk : given_[size_t(part)]) {
      self.missing.erase(chunk);
      ++fetched_;
      if (self.wanted.erase(chunk) > 0) more.push_back(chunk);
    }
    give(host, std::move(more), now);
    if (self.missing.empty()) complete(host, now);
  }

  std::vector<Host> hosts_state_;
  std::vector<int64_t> first_chunk_;
  std::vector<std::vector<int64_t>> given_;
  int chains_ = 1, powers_ = 1;
  Time cutoff_ = 0;
  int64_t lost_ = 0, fetched_ = 0;
};

class InNetwork final : public TreeCollective {
 public:
  InNetwork(Fabric& fabric, const Load& load) : TreeCollective(fabric, load), got_(size_t(hosts_)) {
    if (fabric.packets_of(block(0)) >= 1 << 24) fail(Code::invalid, "too many packets a block");
  }

  void start() override {
    for (int host = 0; host < hosts_; ++host) {
      if (hosts_ == 1) return done(host, 0);
      contribute(host, 0, 0);
    }
  }
  // The next block leaves when the last one has: all hosts take them in one order.
  void sent(const TreeMessage& message, Time now) override {
    contribute(message.src, message.dst + 1, now);
  }
  void datagram(int host, const TreeMessage&, int, Time when) override {
    if (++got_[size_t(host)] == fabric_.packets_of(block(host))) done(host, when);
  }

 private:
  void contribute(int host, int dst, Time now) {
    dst += dst == host;
    if (dst < hosts_)
      fabric_.send({this, TreeMessageKind::reduce, host, dst, 0, 0, block(dst)}, now);
  }
  std::vector<int> got_;
};

}  // namespace

Made make_multicast(Fabric& fabric, const Load& load) {
  return std::make_unique<Multicast>(fabric, load);
}

Made make_in_network(Fabric& fabric, const Load& load) {
  return std::make_unique<InNetwork>(fabric, load);
}

}  // namespace offcore::tree
