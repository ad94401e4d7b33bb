// An executor of queues that get on only while somebody looks: whoever waits sweeps all whose turn
// it is, and where nobody waits one thread does.
//
// It sweeps without a pause while something moves, every kPauseNs otherwise, and sleeps while
// nothing is under way. A launch whose rank is poisoned, or which has failed, has its tasks
// released, and ends once they have.
#pragma once
#include <condition_variable>
#include <memory>
#include <thread>
#include <vector>

#include "core/backend/exec/executor.h"

namespace offcore::exec {

// One queue of one launch.
class QueueTask {
 public:
  explicit QueueTask(uint32_t queue) : queue_(queue) {}
  virtual ~QueueTask() = default;
  virtual bool advance() = 0;  // as far as it gets now; false where that is nowhere
  virtual bool ended() const = 0;
  virtual size_t reached() const = 0;  // the command that it is at; beyond the last one: it is idle
  // Its launch is dead: nothing of it has to be done any more, and what waits has to be let go.
  virtual void release() = 0;

  uint32_t queue() const { return queue_; }

 private:
  const uint32_t queue_;
};

class TaskSubmission : public Submission {
 public:
  TaskSubmission(std::shared_ptr<const CompiledProgram> compiled, const Launch& launch_)
      : Submission(compiled, launch_, compiled->locals.size()), tasks(parts_left) {}

  bool part_ended(uint32_t part) override;

  std::vector<std::vector<std::unique_ptr<QueueTask>>> tasks;  // by part

 protected:
  size_t reached(uint32_t queue) const override;
};

class TaskExecutor : public Executor {
 public:
  using Executor::Executor;
  void submit(const std::shared_ptr<Submission>& submission, Freed& freed) override;
  void close() override { stop(); }

 protected:
  void attend(Submission& submission, const Deadline& deadline) override;
  void finish(Submission& submission, Freed& freed) override;
  // Whether something that the lanes do not show has to end before it.
  virtual bool held_back(const Submission&) const { return false; }
  virtual void swept(Freed&) {}  // after each sweep
  // Ends all launches, or gives up on engines that do not come to an end. False: it is the sweeping
  // thread that stops itself, by an owner that it has freed, and which will go on to its end.
  bool stop();

  std::condition_variable changed_;

 private:
  void serve();
  bool sweep(Freed& freed);
  bool look(TaskSubmission& submission, uint32_t part);
  void pause(ExecutorLock& lock, Freed& freed, int64_t still_ns, int64_t wait_ns);

  uint32_t under_way_ = 0;
  uint32_t callers_ = 0;  // who wait
  std::thread thread_;
};

}  // namespace offcore::exec
