// Drives the launches of a backend: one thread looks at every queue whose turn it is.
//
// A lane's launches take their turns at each rank. The thread looks without a pause while something
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
  // Sends a prelaunched program's packets to its rings ahead of its turn, unless those of the
  // launch before are not all there yet. The rings are not its lane's but its own: others of the
  // lane would wait behind its first poll.
  void send(Flight& flight, const Flight* before);
  // Takes an armed flight back, with its rings, once the launch before it in them has ended: its
  // first poll has not passed, so nothing of it has run.
  void take_back(std::shared_ptr<Flight> flight, std::shared_ptr<Flight> before);
  uint32_t new_ring_group() { return ++ring_groups_ | kOwnRings; }
  // Throws timeout, peer, driver, or cancelled after stop().
  void wait(Flight& flight, const Deadline& deadline);
  // Ends all launches, or gives up on engines that do not come to an end.
  void stop();

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Key = std::pair<uint32_t, Rank>;           // lane, rank
  static constexpr uint32_t kOwnRings = 1u << 31;  // other groups are lanes
  struct Doomed {
    std::shared_ptr<Flight> flight;
    std::shared_ptr<Flight> before;
  };

  void serve();
  bool sweep();
  void drop_doomed();
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
  std::vector<Doomed> doomed_;
  std::atomic<uint32_t> ring_groups_{0};
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace offcore::sdma
