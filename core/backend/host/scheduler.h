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

#include "core/backend/host/submission.h"

namespace offcore::host {

class Scheduler : public std::enable_shared_from_this<Scheduler> {
 public:
  Scheduler(const Machine& machine, Rank ranks, std::vector<Rank> local_ranks);

  const std::vector<Rank>& local_ranks() const { return local_ranks_; }
  // Starts the engines that the program's queues need. Throws driver.
  void prepare(const HostProgram& compiled);
  // Throws cancelled after stop().
  void enqueue(std::shared_ptr<HostSubmission> submission);
  // Helps until the submission is done. Throws timeout, peer, or cancelled after stop().
  void wait(HostSubmission& submission, const Deadline& deadline);
  // Ends the engines, between two pieces of a copy at the latest. They run nothing afterwards.
  void stop();

 private:
  using SchedulerLock = std::unique_lock<std::mutex>;
  using LaneSubmissions = std::deque<std::shared_ptr<HostSubmission>>;
  using LaneKey = std::pair<uint32_t, uint32_t>;  // lane, local rank's index
  // What ended while the mutex was held; freed after it is released, for owners run foreign code.
  using Ended = std::vector<std::shared_ptr<void>>;

  struct EngineThread {
    enum class ThreadState : uint8_t { awake, standby, asleep };
    std::thread thread;
    std::condition_variable call;
    ThreadState state = ThreadState::awake;
  };
  // `own` is the submission that a caller waits for; null for an engine.
  SchedulerLock enter();
  void serve(uint32_t engine);
  void rest(SchedulerLock& lock, EngineThread& engine);
  void help(SchedulerLock& lock, HostSubmission& own, const Deadline& deadline);
  void watch(SchedulerLock& lock, const HostSubmission* own, int64_t wait_ns);
  void doze(SchedulerLock& lock, int64_t wait_ns);
  void sleep(SchedulerLock& lock, HostSubmission& own, const Deadline& deadline);
  QueueState* pick(const HostSubmission* own);
  void advance(SchedulerLock& lock, QueueState& context);
  void finish(QueueState& context, Ended& ended);
  void activate(HostSubmission& submission, uint32_t part);
  void turn(LaneKey key, LaneSubmissions& submissions, Ended& ended);
  void call_engine();
  void leave();
  bool waiting() const;
  bool ready(bool heavy) const;

  const std::vector<Rank> local_ranks_;
  const bool crowded_;    // more ranks than cores: spinning keeps others from their work
  const uint32_t share_;  // the local ranks' share of the cores: threads worth keeping awake

  std::mutex mutex_;
  std::vector<EngineThread> engines_;
  std::condition_variable dozers_;            // callers that wait while somebody else watches
  std::map<LaneKey, LaneSubmissions> lanes_;  // a lane that was used once stays
  std::vector<QueueState*> active_;
  Wakeup* watched_ = nullptr;
  const HostSubmission* watcher_own_ = nullptr;
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

}  // namespace offcore::host
