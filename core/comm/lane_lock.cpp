#include "core/comm/lane_lock.h"

#include "core/base/error.h"
#include "core/base/threads.h"

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

LaneLock::LaneLock(LaneLocks& turns, Rendezvous* others, uint32_t lane, const Deadline& deadline)
    : lane_locks_(turns), others_(others), lane_(lane), deadline_(deadline), lock_(turns.mutex) {
  if (!sleep_until(turns.over, lock_, deadline, [&] { return !turns.taken[lane]; })) {
    fail(Code::timeout, "another thread's call waits for the other ranks: ", name_of(lane));
  }
  turns.taken[lane] = true;
}

LaneLock::~LaneLock() {
  lane_locks_.taken[lane_] = false;
  lane_locks_.over.notify_all();
}

std::vector<Parcel> LaneLock::exchange(std::string_view tag, std::string_view blob, int fd,
                                       const Deadline& deadline) {
  const std::string named = cat(name_of(lane_), ": ", tag);
  return unlocked([&] { return others_->exchange(named, blob, fd, deadline); });
}

}  // namespace offcore
