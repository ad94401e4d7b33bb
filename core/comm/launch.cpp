// One launch of a kept plan: where its buffers lie this time, and what keeps them mapped.
#include <tuple>
#include <utility>

#include "core/comm/cached_plan.h"

namespace offcore {
namespace {

// The side of the request that a buffer stands for, where it is memory that only its rank's own
// queues see. Its addresses are no collective fact, and every call may bring others.
const std::vector<Operand>* own_side(const Buffer& buffer, const Request& request) {
  if (buffer.role == Role::input) return &request.in;
  if (request.view()) return nullptr;
  const bool own = buffer.kind == Buffer::Home::local || request.out[0].window == nullptr;
  return buffer.role == Role::output && own ? &request.out : nullptr;
}

using Windows = std::vector<std::shared_ptr<Window>>;

// Where this process's engines find an operand: in a window that holds others' memory, not at their
// address.
std::byte* address_of(const Operand& operand, Rank rank) {
  std::byte* base = operand.window == nullptr ? nullptr : operand.window->base(rank);
  return base == nullptr ? operand.data : base + operand.offset;
}

// Those that a request names. The ranks of a process name the same one, as a rule.
Windows windows_of(const Request& request) {
  Windows windows;
  for (const auto* side : {&request.out, &request.in}) {
    for (const Operand& operand : *side) {
      const bool known = !windows.empty() && windows.back() == operand.window;
      if (operand.window != nullptr && !known) windows.push_back(operand.window);
    }
  }
  return windows;
}

}  // namespace

// What a refused launch had taken is given back, so that the call can be made again.
void Communicator::launch(CachedPlan& plan, const Request& request, Lane& lane, Pending& pending) {
  if (plan.credits) {
    if (!plan.credited) grant(plan, lane, request.streams);  // the caller enters now
    plan.credited = false;
  }
  ++plan.launches;
  try {
    if (plan.program->mode == Mode::armed) {
      launch_armed(plan, request, lane, pending);
    } else {
      const Bound bound = bind(plan, request, lane);
      pending.view_ = std::exchange(plan.view, {});
      bound.run(
          [&](const Launch& launch) { pending.run_ = owned_here(plan.loaded->launch(launch)); });
    }
  } catch (const Refused&) {
    --plan.launches;
    plan.credited = plan.credits != nullptr;
    throw;
  }
}

void Communicator::launch_armed(CachedPlan& plan, const Request& request, Lane& lane,
                                Pending& pending) {
  const auto arm = [&] {
    Bound bound = bind(plan, request, lane);
    bound.run([&](const Launch& launch) { plan.held = plan.loaded->arm(launch); });
    return std::make_unique<Launch>(std::move(bound.launch));
  };
  std::unique_ptr<Launch> armed = std::exchange(plan.armed, nullptr);
  if (armed == nullptr) {
    armed = arm();
  } else {
    // Armed for the last call's memory; with other memory the backend arms once more.
    pending.armed_ahead_ = !bind_own(*plan.program, request, *armed) && plan.held;
    using ArmedOwner = std::tuple<std::shared_ptr<void>, Windows, std::shared_ptr<void>>;
    armed->owner = std::make_shared<ArmedOwner>(armed->owner, windows_of(request), request.keep);
  }
  pending.view_ = std::exchange(plan.view, {});
  armed->streams = request.streams;
  armed->behind = request.behind;
  try {
    pending.run_ = owned_here(plan.loaded->launch(*armed));
  } catch (const Refused&) {
    plan.armed = std::move(armed);
    throw;
  }
  try {
    plan.armed = arm();       // at once: the next call finds its program on the engines
  } catch (const Refused&) {  // the next call tries again
  }
}

// Tells the peers that write into this rank that they may, for the plan's next launch.
void Communicator::grant(CachedPlan& plan, const Lane& lane,
                         const std::vector<uintptr_t>& streams) {
  Launch launch = bind_words(*plan.program, plan.own_track->flags, lane);
  launch.streams = streams;
  using GrantOwner = std::pair<std::shared_ptr<void>, std::shared_ptr<void>>;
  launch.owner = std::make_shared<GrantOwner>(plan.own_track->flags.memory.owner, control_.owner);
  plan.credits->launch(launch);
  plan.credited = true;
}

// A launch with its flag words, and nothing else yet.
Launch Communicator::bind_words(const Program& program, const Flags& flags,
                                const Lane& lane) const {
  Launch launch{
      .binding = Binding(program.buffers.size(), ranks_), .epoch = flags.epoch, .lane = lane.index};
  launch.wakeups.reserve(ranks_);
  for (Rank rank = 0; rank < ranks_; ++rank) {
    launch.wakeups.push_back(&wakeup(rank));
    launch.binding.base(kFlagBuffer, rank) = flags.base(rank);
  }
  launch.binding.base(kFlagBuffer, kHostRank) = flags.base(kHostRank);
  return launch;
}

template <typename Step>
void Communicator::Bound::run(const Step& step) const {
  try {
    step(launch);
  } catch (const Refused&) {
    track->flags.epoch = launch.epoch;
    if (slots != nullptr) slots->give_back(slot, turned);
    throw;
  }
}

Communicator::Bound Communicator::bind(CachedPlan& plan, const Request& request, Lane& lane) {
  const auto& buffers = plan.program->buffers;
  const bool captured = request.capture != 0;
  LaneState& track = captured         ? lane.find(request.capture)->track
                     : plan.own_track ? *plan.own_track
                                      : lane.track;
  Flags& flags = track.flags;
  Bound bound{.launch = bind_words(*plan.program, flags, lane), .track = &track};
  Launch& launch = bound.launch;
  launch.streams = request.streams;
  launch.behind = request.behind;
  if (!captured) flags.epoch += plan.program->flag_span;
  Binding& binding = launch.binding;

  const auto take = [&](Slots& slots, bool turned, BufferId id) {
    bound.slots = &slots;
    bound.turned = turned;
    bound.slot = slots.take(turned);
    for (Rank rank = 0; rank < ranks_; ++rank) binding.base(id, rank) = bound.slot.base(rank);
  };
  for (size_t i = 1; i < buffers.size(); ++i) {
    const auto id = static_cast<BufferId>(i);
    const Buffer& buffer = buffers[i];
    if (buffer.role == Role::slot) {
      take(track.slots, captured || plan.proves_entry, id);
    } else if (buffer.role == Role::scratch) {
      for (const Share& share : track.scratch) binding.base(id, share.rank) = share.data;
    } else if (plan.views && buffer.role == Role::output) {
      take(track.views, true, id);
      plan.view = {.window = bound.slot.window, .offset = bound.slot.offset};
    } else if (own_side(buffer, request) == nullptr) {
      for (Rank rank = 0; rank < ranks_; ++rank) {
        std::byte* base = request.out[0].window->base(rank);
        binding.base(id, rank) = base == nullptr ? nullptr : base + request.out[0].offset;
      }
    }
  }
  using LaunchOwner = std::tuple<Slots::SlotPlace, Windows, std::shared_ptr<void>,
                                 std::shared_ptr<void>, std::vector<Share>, std::shared_ptr<void>>;
  // A graph keeps windows, and no more: what else it uses is its user's to keep, as in any graph.
  launch.owner = std::make_shared<LaunchOwner>(bound.slot, windows_of(request), flags.memory.owner,
                                               control_.owner, track.scratch,
                                               captured ? nullptr : request.keep);
  bind_own(*plan.program, request, launch);
  return bound;
}

// Binds what the ranks alone see to this call's memory; whether any of it was bound elsewhere.
bool Communicator::bind_own(const Program& program, const Request& request, Launch& launch) const {
  bool moved = false;
  for (size_t id = 1; id < program.buffers.size(); ++id) {
    const std::vector<Operand>* side = own_side(program.buffers[id], request);
    for (size_t i = 0; side != nullptr && i < side->size(); ++i) {
      std::byte*& base = launch.binding.base(static_cast<BufferId>(id), local_ranks_[i]);
      std::byte* const own = address_of((*side)[i], local_ranks_[i]);
      moved |= base != own;
      base = own;
    }
  }
  return moved;
}

}  // namespace offcore
