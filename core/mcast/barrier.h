// The barrier before an operation: recursive doubling. Where the ranks are no power of two, those
// past the largest one in them report to a rank below and are released by it.
//
// Nobody leaves before all have entered. A peer may be one operation ahead: what it says is kept.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/mcast/group.h"

namespace offcore::mcast {

class Barrier {
 public:
  Barrier(GroupRank rank, GroupRank ranks);

  struct Step {
    GroupRank partner = 0;
    uint32_t round = 0;
    bool sends = false;
    bool waits = false;
  };
  const std::vector<Step>& steps() const { return steps_; }

  // A partner's message for operation `op`, which is the running one or the next. False: it is not
  // awaited, or came before.
  bool hear(uint64_t op, GroupRank from, uint32_t round, uint64_t digest);
  // What was heard at a step for `op`; empty: nothing yet.
  std::optional<uint64_t> heard(uint64_t op, size_t step) const { return heard_[op % 2][step]; }
  void forget(uint64_t op);  // it is over: its place is the one's after the next

 private:
  std::vector<Step> steps_;
  std::array<std::vector<std::optional<uint64_t>>, 2> heard_;  // by parity of the operation
};

}  // namespace offcore::mcast
