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
#include <memory>
#include <thread>
#include <vector>

#include "core/backend/exec/executor.h"
#include "core/backend/host/submission.h"

namespace offcore::host {

class Scheduler final : public exec::Executor {
 public:
  Scheduler(const Machine& machine, Rank ranks, std::vector<Rank> local_ranks);

  const std::vector<Rank>& local_ranks() const { return local_ranks_; }
  // Starts the engines that the program's queues need. Throws driver.
  void prepare(const HostProgram& compiled);
  void submit(const std::shared_ptr<exec::Submission>& submission, exec::Freed& freed) override;
  // Ends the engines, between two pieces of a copy at the latest. They run nothing afterwards.
  void close() override;

 private:
  struct EngineThread {
    enum class ThreadState : uint8_t { awake, standby, asleep };
    std::thread thread;
    std::condition_variable call;
    ThreadState state = ThreadState::awake;
  };
  // `own` is the submission that a caller waits for; null for an engine.
  void attend(exec::Submission& submission, const Deadline& deadline) override;  // and helps
  void begin(exec::Submission& submission, uint32_t part) override;
  void finish(exec::Submission& submission, exec::Freed& freed) override;
  void serve(uint32_t engine);
  void rest(ExecutorLock& lock, EngineThread& engine);
  void help(ExecutorLock& lock, HostSubmission& own, const Deadline& deadline);
  void watch(ExecutorLock& lock, const HostSubmission* own, int64_t wait_ns);
  void doze(ExecutorLock& lock, int64_t wait_ns);
  void sleep(ExecutorLock& lock, HostSubmission& own, const Deadline& deadline);
  QueueState* pick(const HostSubmission* own);
  void advance(ExecutorLock& lock, QueueState& context);
  void end_queue(QueueState& context, exec::Freed& freed);
  void call_engine();
  void leave();
  bool waiting() const;
  bool ready(bool heavy) const;

  const std::vector<Rank> local_ranks_;
  const bool crowded_;    // more ranks than cores: spinning keeps others from their work
  const uint32_t share_;  // the local ranks' share of the cores: threads worth keeping awake

  std::vector<EngineThread> engines_;
  std::condition_variable dozers_;  // callers that wait while somebody else watches
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
};

}  // namespace offcore::host
