#include "core/mcast/barrier.h"

#include <bit>

namespace offcore::mcast {

Message announcement(const AnnouncedCall& call, uint32_t round) {
  return {.kind = MessageKind::barrier,
          .detail = round,
          .source = call.kind,
          .psn = static_cast<uint32_t>(call.bytes >> 32),
          .chunks = static_cast<uint32_t>(call.bytes),
          .value = call.digest};
}

AnnouncedCall announced(const Message& barrier) {
  return {.digest = barrier.value,
          .kind = barrier.source,
          .bytes = uint64_t{barrier.psn} << 32 | barrier.chunks};
}

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

bool Barrier::hear(GroupRank from, const Message& barrier) {
  for (size_t i = 0; i < steps_.size(); ++i) {
    const Step& step = steps_[i];
    if (!step.waits || step.partner != from || step.round != barrier.detail) continue;
    std::optional<AnnouncedCall>& heard = heard_[barrier.op % 2][i];
    if (heard) return false;
    heard = announced(barrier);
    return true;
  }
  return false;
}

void Barrier::forget(uint64_t op) {
  for (auto& heard : heard_[op % 2]) heard.reset();
}

}  // namespace offcore::mcast
