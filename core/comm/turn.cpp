#include "core/comm/turn.h"

#include <algorithm>
#include <chrono>

#include "core/base/error.h"

namespace offcore {
namespace {

std::string name_of(uint32_t lane) {
  if (lane == kWindowsTurn) return "windows";
  return lane == kExchangeTurn ? "exchange" : cat("lane ", lane);
}

}  // namespace

uint32_t checked_lane(uint32_t lane) {
  if (lane >= kLanesMax) fail(Code::invalid, "lane ", lane, " is not below ", kLanesMax);
  return lane;
}

Turn::Turn(Turns& turns, Rendezvous* others, uint32_t lane, const Deadline& deadline)
    : turns_(turns), others_(others), lane_(lane), deadline_(deadline), lock_(turns.mutex) {
  while (turns.taken[lane]) {
    if (deadline.passed()) {
      fail(Code::timeout, "another thread's call waits for the other ranks: ", name_of(lane));
    }
    constexpr int64_t kSecondNs = 1'000'000'000;
    turns.over.wait_for(lock_, std::chrono::nanoseconds(std::min(deadline.left_ns(), kSecondNs)));
  }
  turns.taken[lane] = true;
}

Turn::~Turn() {
  turns_.taken[lane_] = false;
  turns_.over.notify_all();
}

std::vector<Parcel> Turn::exchange(std::string_view tag, std::string_view blob, int fd,
                                   const Deadline& deadline) {
  const std::string named = cat(name_of(lane_), ": ", tag);
  return aside([&] { return others_->exchange(named, blob, fd, deadline); });
}

}  // namespace offcore
