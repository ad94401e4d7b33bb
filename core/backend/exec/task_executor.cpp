#include "core/backend/exec/task_executor.h"

#include <sched.h>

#include <algorithm>

#include "core/base/threads.h"

namespace offcore::exec {
namespace {

constexpr int64_t kEagerNs = 200'000;  // after something has moved
constexpr int64_t kPauseNs = 50'000;
constexpr int64_t kLookNs = 1'000'000;  // while callers look
constexpr int64_t kStopNs = 2'000'000'000;

}  // namespace

bool TaskSubmission::part_ended(uint32_t part) {
  return std::all_of(tasks[part].begin(), tasks[part].end(),
                     [](const auto& task) { return task->ended(); });
}

size_t TaskSubmission::reached(uint32_t queue) const {
  for (const auto& part : tasks) {
    for (const std::unique_ptr<QueueTask>& task : part) {
      if (task->queue() == queue && !task->ended()) return task->reached();
    }
  }
  return SIZE_MAX;
}

void TaskExecutor::submit(const std::shared_ptr<Submission>& submission, Freed& freed) {
  const ExecutorLock lock = enter();
  check_open();
  if (!thread_.joinable()) {
    const SignalsBlocked blocked;
    thread_ = std::thread([this, self = shared_from_this()] { serve(); });
  }
  ++under_way_;
  enqueue(submission, freed);
  changed_.notify_one();
}

// Sweeps were in vain for `still_ns`: lets others have the core, or the mutex.
void TaskExecutor::pause(ExecutorLock& lock, Freed& freed, int64_t still_ns, int64_t wait_ns) {
  lock.unlock();
  freed.clear();
  if (still_ns < kEagerNs) sched_yield();
  lock.lock();
  if (still_ns >= kEagerNs) changed_.wait_for(lock, std::chrono::nanoseconds(wait_ns));
}

void TaskExecutor::serve() {
  Freed freed;
  ExecutorLock lock(mutex_);
  int64_t moved_ns = now_ns();
  while (true) {
    if (under_way_ == 0) {
      if (closed_) return;
      changed_.wait(lock);
      moved_ns = now_ns();
    } else if (callers_ > 0 && !closed_) {
      changed_.wait_for(lock, std::chrono::nanoseconds(kLookNs));
    } else {
      if (sweep(freed)) moved_ns = now_ns();
      if (closed_ && now_ns() - moved_ns > kStopNs) return;
      pause(lock, freed, now_ns() - moved_ns, kPauseNs);
    }
  }
}

// Looks at the first launch of every lane, part by part.
bool TaskExecutor::sweep(Freed& freed) {
  bool moved = false;
  for (auto& [key, lane] : lanes_) {
    while (!lane.empty() && !held_back(*lane.front())) {
      moved |= look(static_cast<TaskSubmission&>(*lane.front()), key.second);
      if (!settle(key, lane, freed)) break;
      moved = true;
    }
  }
  swept(freed);
  return moved;
}

bool TaskExecutor::look(TaskSubmission& submission, uint32_t part) {
  if (const uint32_t by = submission.poisoned(); by != 0) submission.dead = by;
  if (const std::string failed = failure(); !failed.empty() && !submission.error) {
    submission.error.emplace(Code::driver, failed);
  }
  const bool dead = submission.dead != 0 || submission.error || closed_;
  bool moved = false;
  for (const std::unique_ptr<QueueTask>& task : submission.tasks[part]) {
    if (task->ended()) continue;
    try {
      if (dead) task->release();
      moved |= task->advance();
    } catch (const Error& error) {
      submission.error = error;
    }
  }
  return moved;
}

void TaskExecutor::finish(Submission& submission, Freed& freed) {
  Executor::finish(submission, freed);
  --under_way_;
  changed_.notify_all();
}

void TaskExecutor::attend(Submission& submission, const Deadline& deadline) {
  Freed freed;
  ExecutorLock lock(mutex_);
  ++callers_;  // who waits looks by itself, so that no thread has to be switched to
  int64_t moved_ns = now_ns();
  while (!submission.ended() && !closed_ && !deadline.passed() && failure().empty()) {
    if (sweep(freed)) {
      moved_ns = now_ns();
    } else {
      pause(lock, freed, now_ns() - moved_ns, std::min(deadline.left_ns(), kPauseNs));
    }
  }
  --callers_;
  changed_.notify_all();
}

bool TaskExecutor::stop() {
  {
    const ExecutorLock lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }
  if (!thread_.joinable()) return true;
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
    return false;
  }
  thread_.join();
  return true;
}

}  // namespace offcore::exec
