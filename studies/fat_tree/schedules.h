// The schedules that run on a Fabric, and what they share.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "studies/fat_tree/fabric.h"
#include "studies/fat_tree/simulate.h"

namespace offcore::tree {

inline constexpr int64_t kControlBytes = 64;

// One load's schedule; it is over when every host is done.
class TreeCollective : public Schedule {
 public:
  TreeCollective(Fabric& fabric, const Load& load)
      : fabric_(fabric), load_(load), hosts_(fabric.tree().hosts()), done_(size_t(hosts_), -1) {}

  virtual Outcome outcome() const {
    Outcome outcome;
    for (const Time done : done_) outcome.host_ns.push_back(double(done) / kPerNs);
    return outcome;
  }
  bool finished() const {
    return std::all_of(done_.begin(), done_.end(), [](Time done) { return done >= 0; });
  }

 protected:
  // Block `rank` of the total array, as equal as whole bytes allow.
  int64_t block(int rank) const {
    return load_.bytes / hosts_ + (rank < load_.bytes % hosts_ ? 1 : 0);
  }
  int wrapped(int host) const { return (host % hosts_ + hosts_) % hosts_; }
  void done(int host, Time now) { done_[size_t(host)] = std::max(done_[size_t(host)], now); }
  void send(int src, int dst, int64_t bytes, int tag, Time now, int part = 0) {
    fabric_.send({this, TreeMessageKind::unicast, src, dst, tag, part, bytes}, now);
  }

  Fabric& fabric_;
  const Load load_;
  const int hosts_;
  std::vector<Time> done_;
};

using Made = std::unique_ptr<TreeCollective>;

// In a ring and between all pairs a host sends the next block when the last one has arrived, as
// libraries do that wait for both halves of a step; in trees it does not wait.
//
// all_gather and reduce_scatter: block by block to the right.
Made make_ring(Fabric& fabric, const Load& load);
// all_gather: every host to every other one.
Made make_linear(Fabric& fabric, const Load& load);
// all_gather: what is held so far, to partners twice as far each time. Hosts: a power of two.
Made make_doubling(Fabric& fabric, const Load& load);
// broadcast: along trees.
Made make_knomial(Fabric& fabric, const Load& load);
Made make_binary_tree(Fabric& fabric, const Load& load);
// broadcast: a binomial scatter, then a ring all-gather.
Made make_scatter_ring(Fabric& fabric, const Load& load);
// broadcast and all_gather: the protocol of paper 004.
Made make_multicast(Fabric& fabric, const Load& load);
// reduce_scatter: switches combine what their links bring.
Made make_in_network(Fabric& fabric, const Load& load);

}  // namespace offcore::tree
