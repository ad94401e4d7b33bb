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
#include "core/mcast/wire.h"

namespace offcore::mcast {

// What a rank is about to do, as its barrier messages say it.
struct AnnouncedCall {
  uint64_t digest = 0;  // of all that ranks must agree on
  uint32_t kind = 0;    // an OperationKind; of a reduction also its operation and dtype
  uint64_t bytes = 0;   // of the whole array

  bool operator==(const AnnouncedCall&) const = default;
};
Message announcement(const AnnouncedCall& call, uint32_t round);
AnnouncedCall announced(const Message& barrier);

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
  bool hear(GroupRank from, const Message& barrier);
  // What was heard at a step for `op`; empty: nothing yet.
  const std::optional<AnnouncedCall>& heard(uint64_t op, size_t step) const {
    return heard_[op % 2][step];
  }
  void forget(uint64_t op);  // it is over: its place is the one's after the next

 private:
  std::vector<Step> steps_;
  std::array<std::vector<std::optional<AnnouncedCall>>, 2> heard_;  // by parity of the operation
};

}  // namespace offcore::mcast
