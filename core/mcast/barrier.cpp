#include "core/mcast/barrier.h"

#include <bit>

namespace offcore::mcast {

Barrier::Barrier(GroupRank rank, GroupRank ranks) {
  const GroupRank core = std::bit_floor(ranks);  // these do the doubling
  const auto rounds = static_cast<uint32_t>(std::countr_zero(core));
  const uint32_t enter = 0, leave = rounds + 1;
  if (rank >= core) {
    steps_.push_back({.partner = rank - core, .round = enter, .sends = true});
    steps_.push_back({.partner = rank - core, .round = leave, .waits = true});
  } else {
    const bool reported_to = rank + core < ranks;
    if (reported_to) steps_.push_back({.partner = rank + core, .round = enter, .waits = true});
    for (uint32_t round = 0; round < rounds; ++round) {
      steps_.push_back({.partner = rank ^ (GroupRank{1} << round),
                        .round = round + 1,
                        .sends = true,
                        .waits = true});
    }
    if (reported_to) steps_.push_back({.partner = rank + core, .round = leave, .sends = true});
  }
  for (auto& heard : heard_) heard.resize(steps_.size());
}

bool Barrier::hear(uint64_t op, GroupRank from, uint32_t round, uint64_t digest) {
  for (size_t i = 0; i < steps_.size(); ++i) {
    const Step& step = steps_[i];
    if (!step.waits || step.partner != from || step.round != round) continue;
    std::optional<uint64_t>& heard = heard_[op % 2][i];
    if (heard) return false;
    heard = digest;
    return true;
  }
  return false;
}

void Barrier::forget(uint64_t op) {
  for (auto& heard : heard_[op % 2]) heard.reset();
}

}  // namespace offcore::mcast
