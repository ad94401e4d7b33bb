// Where a backend's engine threads and waiting callers share the work of its local ranks.
//
// One mutex guards everything but the commands themselves. A lane's launches take their turns at
// each local rank; the contexts whose turn it is are `active`. Whoever is awake runs the active
// contexts that are ready, a piece of a copy at a time, and looks around after each. No more
// threads are called than the ranks' share of the cores, and an engine makes way for a caller: a
// second thread on a core, or a copy that moves to another one, costs more than it brings.
//
// Attention [invariant]: while active contexts wait for something, at least one thread attends: it
// is awake, watches (sleeps on the first local rank's wakeup; one thread at a time), or stands by
// (an engine that looks again within kStandbyMaxNs, so that a caller who launches and waits at
// once, over and over, need not wake anybody). Every other thread sleeps until called.
#pragma once
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/backend/host/flight.h"

namespace offcore {

class Station : public std::enable_shared_from_this<Station> {
 public:
  Station(const Machine& machine, Rank ranks, std::vector<Rank> local_ranks);

  const std::vector<Rank>& local_ranks() const { return local_ranks_; }
  // Starts the engines that the program's queues need. Throws driver.
  void prepare(const Cargo& cargo);
  // Throws cancelled after stop().
  void enqueue(std::shared_ptr<Flight> flight);
  // Helps until the flight is done. Throws timeout, peer, or cancelled after stop().
  void wait(Flight& flight, const Deadline& deadline);
  // Ends the engines, between two pieces of a copy at the latest. They run nothing afterwards.
  void stop();

 private:
  using Lock = std::unique_lock<std::mutex>;
  using LaneFlights = std::deque<std::shared_ptr<Flight>>;
  using LaneKey = std::pair<uint32_t, uint32_t>;  // lane, local rank's index
  // What ended while the mutex was held; freed after it is released, for owners run foreign code.
  using Ended = std::vector<std::shared_ptr<void>>;

  struct Engine {
    enum class State : uint8_t { awake, standby, asleep };
    std::thread thread;
    std::condition_variable call;
    State state = State::awake;
  };
  // `own` is the flight that a caller waits for; null for an engine.
  Lock enter();
  void serve(uint32_t engine);
  void rest(Lock& lock, Engine& engine);
  void help(Lock& lock, Flight& own, const Deadline& deadline);
  void watch(Lock& lock, const Flight* own, int64_t wait_ns);
  void doze(Lock& lock, int64_t wait_ns);
  void sleep(Lock& lock, Flight& own, const Deadline& deadline);
  Context* pick(const Flight* own);
  void advance(Lock& lock, Context& context);
  void finish(Context& context, Ended& ended);
  void activate(Flight& flight, uint32_t part);
  void turn(LaneKey key, LaneFlights& flights, Ended& ended);
  void call_engine();
  void leave();
  bool waiting() const;
  bool ready(bool heavy) const;

  const std::vector<Rank> local_ranks_;
  const bool crowded_;    // more ranks than cores: spinning keeps others from their work
  const uint32_t share_;  // the local ranks' share of the cores: threads worth keeping awake

  std::mutex mutex_;
  std::vector<Engine> engines_;
  std::condition_variable dozers_;        // callers that wait while somebody else watches
  std::map<LaneKey, LaneFlights> lanes_;  // a lane that was used once stays
  std::vector<Context*> active_;
  Wakeup* watched_ = nullptr;
  const Flight* watcher_own_ = nullptr;
  uint32_t awake_ = 0;         // threads that run contexts or look for them
  uint32_t callers_ = 0;       // that wait
  uint32_t callers_idle_ = 0;  // awake, and looking for a context
  uint32_t callers_asleep_ = 0;
  bool standby_ = false;
  int64_t spin_ns_ = 0;  // of a caller, before it sleeps
  int64_t standby_ns_ = 0;
  std::atomic<int64_t> seen_ns_{0};  // when a caller last enqueued, or went
  std::atomic<bool> stopping_{false};
};

}  // namespace offcore
