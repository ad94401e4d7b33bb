// A call's turn in its lane.
//
// Calls of a lane come one after the other. While one of them waits for the other ranks, those of
// other lanes go on: it lets go of the communicator's mutex, and what it exchanges with the ranks
// bears the lane's name. So threads that use a lane each may meet in any order, another one on
// every rank. All that is not such a wait happens under the mutex.
#pragma once
#include <bitset>
#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/window/rendezvous.h"

namespace offcore {

// Besides lanes there are turns to make windows, whose numbers go by their order, and to exchange.
inline constexpr uint32_t kLanesMax = 64;
inline constexpr uint32_t kWindowsTurn = kLanesMax;
inline constexpr uint32_t kExchangeTurn = kLanesMax + 1;

uint32_t checked_lane(uint32_t lane);  // itself; throws invalid where it is none

struct LaneLocks {
  std::mutex mutex;
  std::condition_variable over;
  std::bitset<kLanesMax + 2> taken;  // guarded by the mutex
};

class LaneLock final : public Rendezvous {
 public:
  // Holds the mutex from here on. `others`: null where all ranks are local. Throws timeout where
  // another thread's turn does not end.
  LaneLock(LaneLocks& turns, Rendezvous* others, uint32_t lane, const Deadline& deadline);
  ~LaneLock() override;
  LaneLock(const LaneLock&) = delete;
  LaneLock& operator=(const LaneLock&) = delete;

  const Deadline& deadline() const { return deadline_; }
  // The ranks, as this turn meets them; null where all are local.
  Rendezvous* ranks_together() { return others_ == nullptr ? nullptr : this; }

  // Runs `wait` without the mutex.
  template <typename Wait>
  auto unlocked(const Wait& wait) {
    struct Back {
      std::unique_lock<std::mutex>& lock;
      ~Back() { lock.lock(); }
    };
    lock_.unlock();
    const Back back{lock_};
    return wait();
  }

  Rank rank() const override { return others_->rank(); }
  Rank ranks() const override { return others_->ranks(); }
  std::vector<Parcel> exchange(std::string_view tag, std::string_view blob, int fd,
                               const Deadline& deadline) override;
  void on_peer_loss(std::function<void(Rank)> callback) override {
    others_->on_peer_loss(std::move(callback));
  }
  void close() override { others_->close(); }

 private:
  LaneLocks& lane_locks_;
  Rendezvous* others_;
  uint32_t lane_;
  Deadline deadline_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace offcore
