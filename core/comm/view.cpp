// Views: full exchanges whose output is the next slot of a ring that belongs to the lane, so that
// they need neither an entry round nor a copy into a buffer of the caller's (see lane.h).
#include "core/base/digest.h"
#include "core/base/error.h"
#include "core/comm/cached_plan.h"

namespace offcore {

// Makes the output the slot that the call will take, as far as it can be known before all ranks
// have met: then an input that is its own part of the slot is found to be in place.
void Communicator::lay_view(Request& request) const {
  const std::string_view name = to_string(request.collective);
  const bool gather = request.collective == Collective::all_gather;
  if (!gather && request.collective != Collective::all_to_all) {
    fail(Code::unsupported, name, " has no view: its ranks do not all hear from each other");
  }
  if (!request.out.empty() || !request.counts.empty()) {
    fail(Code::invalid, "protocol view hands out the output of equal parts: call ", name, "_view");
  }
  if (request.in.empty()) fail(Code::invalid, name, "_view: the input is missing");
  const auto lane = lanes_.find(request.lane);
  for (size_t i = 0; i < request.in.size(); ++i) {
    Operand out{.bytes = request.in[i].bytes * (gather ? ranks_ : 1)};
    if (i < local_ranks_.size() && lane != lanes_.end() && lane->second &&
        lane->second->track.views.bytes() >= out.bytes) {
      const Slots::SlotPlace slot = lane->second->track.views.upcoming();
      out.data = slot.base(local_ranks_[i]);
      if (request.in[i].window != nullptr && request.in[i].window == slot.window) {
        out.window = slot.window;
        out.offset = slot.offset;
      }
    }
    request.out.push_back(std::move(out));
  }
}

Slots::SlotPlace Communicator::next_input(uint32_t index, uint64_t bytes,
                                          const Deadline& deadline) {
  LaneLock turn(lane_locks_, rendezvous_.get(), checked_lane(index), deadline);
  check_alive();
  const auto known = lanes_.find(index);
  if (known != lanes_.end() && known->second) {
    const Slots& views = known->second->track.views;
    const Slots::SlotPlace place = views.upcoming();
    if (place.window && bytes <= views.bytes() / ranks_) return place;
  }
  const std::vector<uint64_t> counts(ranks_, bytes);
  const uint64_t slot_bytes = moves_all_gather(counts, true).buffers.back().bytes;
  // A call like any other, as far as the ranks can tell: who makes another one finds out.
  const std::string text =
      cat("next_input ranks=", ranks_, " counts=", bytes, "x", ranks_, " lane=", index);
  return together(text, [&] {
    const Entry entry{.key = digest(text), .text = text};
    Lane& lane = this->lane(index, turn);
    agree(lane, entry, {}, turn);
    Slots& views = lane.track.views;
    views.grow(*backend_, turn.ranks_together(), ranks_, slot_bytes, deadline);
    return views.upcoming();
  });
}

}  // namespace offcore
