#include <utility>

#include "core/base/error.h"
#include "studies/fat_tree/schedules.h"

namespace offcore::tree {
namespace {

// A reduce-scatter moves as an all-gather does: hosts - 1 blocks to the right.
class Ring : public TreeCollective {
 public:
  Ring(Fabric& fabric, const Load& load)
      : TreeCollective(fabric, load),
        got_(size_t(hosts_)),
        given_(got_),
        begun_(got_),
        holds_own_(got_.size()) {}

  void start() override {
    for (int host = 0; host < hosts_; ++host) begin(host, 0);
  }

  void arrived(int host, const TreeMessage& message, Time now) override {
    if (++got_[size_t(host)] == hosts_ - 1) done(host, now);
    ++given_[size_t(message.src)];
    next(host, now);
    next(message.src, now);
  }

 protected:
  void begin(int host, Time now) {
    if (hosts_ == 1) return done(host, now);
    holds_own_[size_t(host)] = true;
    next(host, now);
  }

 private:
  // Whichever of a step's two halves ends last leads to the next one.
  void next(int host, Time now) {
    const int step = given_[size_t(host)];
    if (!holds_own_[size_t(host)] || step >= hosts_ - 1 || got_[size_t(host)] < step ||
        begun_[size_t(host)] > step)
      return;
    begun_[size_t(host)] = step + 1;
    send(host, wrapped(host + 1), block(wrapped(host - step)), step, now);
  }

  // Blocks received; blocks sent that have arrived; blocks sent.
  std::vector<int> got_, given_, begun_;
  std::vector<bool> holds_own_;
};

class ScatterRing final : public Ring {
 public:
  using Ring::Ring;

  void start() override {
    int span = 1;
    while (span < hosts_) span *= 2;
    scatter(0, span, 0);
  }

  void arrived(int host, const TreeMessage& message, Time now) override {
    if (message.part == 0) return Ring::arrived(host, message, now);
    scatter(wrapped(host - load_.root), message.part, now);
  }

 private:
  // Host `place` counted from the root holds `span` blocks from its own on: it sends halves.
  void scatter(int place, int span, Time now) {
    for (int half = span / 2; half > 0; half /= 2) {
      const int first = place + half, end = std::min(hosts_, place + 2 * half);
      if (first >= end) continue;
      int64_t bytes = 0;
      for (int one = first; one < end; ++one) bytes += block(wrapped(one + load_.root));
      send(wrapped(place + load_.root), wrapped(first + load_.root), bytes, 0, now, half);
    }
    begin(wrapped(place + load_.root), now);
  }
};

class Linear final : public TreeCollective {
 public:
  Linear(Fabric& fabric, const Load& load) : TreeCollective(fabric, load), got_(size_t(hosts_)) {}

  void start() override {
    for (int host = 0; host < hosts_; ++host) {
      if (hosts_ == 1) return done(host, 0);
      send(host, wrapped(host + 1), block(host), 1, 0);
    }
  }
  void arrived(int host, const TreeMessage& message, Time now) override {
    if (++got_[size_t(host)] == hosts_ - 1) done(host, now);
    const int away = message.tag + 1;
    if (away < hosts_) send(message.src, wrapped(message.src + away), message.bytes, away, now);
  }

 private:
  std::vector<int> got_;
};

class Doubling final : public TreeCollective {
 public:
  Doubling(Fabric& fabric, const Load& load)
      : TreeCollective(fabric, load), steps_(size_t(hosts_)), arrived_(size_t(hosts_)) {
    if ((hosts_ & (hosts_ - 1)) != 0)
      fail(Code::invalid, "recursive doubling needs a power of two of hosts, not ", hosts_);
  }

  void start() override {
    for (int host = 0; host < hosts_; ++host) step(host, 0);
  }
  void arrived(int host, const TreeMessage& message, Time now) override {
    arrived_[size_t(host)] |= 1u << message.tag;
    while (arrived_[size_t(host)] >> steps_[size_t(host)] & 1) {
      ++steps_[size_t(host)];
      step(host, now);
    }
  }

 private:
  void step(int host, Time now) {
    const int distance = 1 << steps_[size_t(host)];
    if (distance >= hosts_) return done(host, now);
    const int first = host & ~(distance - 1);
    int64_t bytes = 0;
    for (int one = first; one < first + distance; ++one) bytes += block(one);
    send(host, host ^ distance, bytes, steps_[size_t(host)], now);
  }

  std::vector<int> steps_;
  std::vector<uint32_t> arrived_;
};

class TreeBroadcast final : public TreeCollective {
 public:
  // children: of each host, counted from the root, in the order they are served
  TreeBroadcast(Fabric& fabric, const Load& load, std::vector<std::vector<int>> children)
      : TreeCollective(fabric, load), children_(std::move(children)), got_(size_t(hosts_)) {
    if (load.segments < 1) fail(Code::invalid, "a message has at least one segment");
  }

  void start() override {
    for (int segment = 0; segment < load_.segments; ++segment) pass_on(load_.root, segment, 0);
    done(load_.root, 0);
  }
  void arrived(int host, const TreeMessage& message, Time now) override {
    pass_on(host, message.tag, now);
    if (++got_[size_t(host)] == load_.segments) done(host, now);
  }
  void sent(const TreeMessage& message, Time now) override {
    if (message.src == load_.root) done(load_.root, now);
  }

 private:
  void pass_on(int host, int segment, Time now) {
    const int64_t bytes =
        load_.bytes / load_.segments + (segment < load_.bytes % load_.segments ? 1 : 0);
    for (const int child : children_[size_t(wrapped(host - load_.root))])
      send(host, wrapped(child + load_.root), bytes, segment, now);
  }

  std::vector<std::vector<int>> children_;
  std::vector<int> got_;
};

}  // namespace

Made make_ring(Fabric& fabric, const Load& load) { return std::make_unique<Ring>(fabric, load); }

Made make_linear(Fabric& fabric, const Load& load) {
  return std::make_unique<Linear>(fabric, load);
}

Made make_doubling(Fabric& fabric, const Load& load) {
  return std::make_unique<Doubling>(fabric, load);
}

Made make_scatter_ring(Fabric& fabric, const Load& load) {
  return std::make_unique<ScatterRing>(fabric, load);
}

Made make_knomial(Fabric& fabric, const Load& load) {
  if (load.radix < 2) fail(Code::invalid, "a k-nomial tree has a radix of at least 2");
  const int hosts = fabric.tree().hosts();
  std::vector<std::vector<int>> children(static_cast<size_t>(hosts));
  for (int host = 0; host < hosts; ++host) {
    // A host's children lie at distances below the lowest digit of its number, the farthest first.
    int64_t distance = 1;
    while (distance < hosts && host % (distance * load.radix) == 0) distance *= load.radix;
    while ((distance /= load.radix) >= 1) {
      for (int64_t child = host + distance; child < host + distance * load.radix && child < hosts;
           child += distance)
        children[size_t(host)].push_back(static_cast<int>(child));
    }
  }
  return std::make_unique<TreeBroadcast>(fabric, load, std::move(children));
}

Made make_binary_tree(Fabric& fabric, const Load& load) {
  const int hosts = fabric.tree().hosts();
  std::vector<std::vector<int>> children(static_cast<size_t>(hosts));
  for (int host = 0; host < hosts; ++host) {
    for (int child = 2 * host + 1; child <= 2 * host + 2 && child < hosts; ++child)
      children[size_t(host)].push_back(child);
  }
  return std::make_unique<TreeBroadcast>(fabric, load, std::move(children));
}

}  // namespace offcore::tree
