// Drives the launches of a backend: whoever waits looks at every queue whose turn it is, and where
// nobody waits one thread does.
//
// A lane's launches take their turns at each rank. They look without a pause while something
// moves, every kPauseNs otherwise, and sleeps while nothing is under way. A launch whose rank is
// poisoned has its engines' polls released, and ends once the engines have gone through.
#pragma once
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/backend/sdma/flight.h"

namespace offcore::sdma {

class Fleet : public std::enable_shared_from_this<Fleet> {
 public:
  explicit Fleet(std::unique_ptr<Way> way) : way_(std::move(way)) {}

  Way& way();                             // throws cancelled after stop()
  std::mutex& mutex() { return mutex_; }  // guards the way's rings and batches
  // Throws cancelled after stop().
  void enqueue(std::shared_ptr<Flight> flight);
  // Rings of a prelaunched program's own: others of its lane would wait behind its first poll. A
  // GPU has few: 0 where they do not suffice for these queues (each a rank and an index).
  using Queues = std::vector<std::pair<Rank, uint16_t>>;
  uint32_t take_rings(const Queues& queues);
  // Sends an armed flight's packets to its own rings, ahead of its turn, unless those of the one
  // before are not all there yet.
  void send(Flight& flight, const Flight* before);
  // Ends such rings, with the armed flights in them, once `before` has ended. The first poll of
  // what is armed has not passed, so nothing of it has run; and nothing will: whatever is enqueued
  // in the lane from now on, and might signal what that poll waits for, begins afterwards.
  struct Doomed {
    uint32_t group = 0;
    Queues queues;
    std::vector<std::shared_ptr<Flight>> flights;
    std::shared_ptr<Flight> before;
    uint64_t number = 0;  // given when taken back
  };
  void take_back(Doomed doomed);

  // Throws timeout, peer, driver, or cancelled after stop().
  void wait(Flight& flight, const Deadline& deadline);
  // Ends all launches, or gives up on engines that do not come to an end.
  void stop();

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Key = std::pair<uint32_t, Rank>;           // lane, rank
  static constexpr uint32_t kOwnRings = 1u << 31;  // other groups are lanes

  void serve();
  bool sweep();
  void drop_doomed();
  bool behind_doomed(const Flight& flight) const;
  void look(Flight& flight, Rank rank, bool& moved);
  bool poisoned(Flight& flight) const;
  void finish(const std::shared_ptr<Flight>& flight);

  std::unique_ptr<Way> way_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable ended_;
  std::map<Key, std::deque<std::shared_ptr<Flight>>> lanes_;
  std::vector<std::shared_ptr<Flight>> finished_;  // freed outside of the mutex
  uint32_t under_way_ = 0;
  uint32_t callers_ = 0;  // who wait
  std::vector<Doomed> doomed_;
  uint64_t taken_back_ = 0;             // so far
  std::map<Rank, uint32_t> own_rings_;  // how many, by rank
  uint32_t ring_groups_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace offcore::sdma
