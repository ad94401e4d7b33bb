#include "core/backend/sdma/executor.h"

#include <sched.h>

#include <algorithm>

#include "core/backend/sdma/encode.h"
#include "core/base/error.h"
#include "core/base/threads.h"

namespace offcore::sdma {
namespace {

constexpr int64_t kEagerNs = 200'000;  // after something has moved
constexpr int64_t kPauseNs = 50'000;
constexpr int64_t kLookNs = 1'000'000;  // while callers look
constexpr uint32_t kOwnRingsMax = 48;   // of a GPU's, which has 8 for each of 16 engines
constexpr int64_t kStopNs = 2'000'000'000;

}  // namespace

SubmitPath& SdmaExecutor::path() {
  if (path_ == nullptr) fail(Code::cancelled, "the sdma backend is closed");
  return *path_;
}

void SdmaExecutor::enqueue(std::shared_ptr<SdmaSubmission> submission) {
  const ExecutorLock lock(mutex_);
  if (stopping_) fail(Code::cancelled, "the sdma backend is closed");
  if (!thread_.joinable()) {
    const SignalsBlocked blocked;
    thread_ = std::thread([this] { serve(); });
  }
  ++under_way_;
  submission->after_doomed = taken_back_;
  for (Rank rank = 0; rank < submission->parts.size(); ++rank) {
    lanes_[{submission->launch.lane, rank}].push_back(submission);
  }
  work_.notify_one();
}

void SdmaExecutor::send(SdmaSubmission& submission, const SdmaSubmission* before) {
  const ExecutorLock lock(mutex_);
  for (size_t i = 0; before != nullptr && !before->ended() && i < before->parts.size(); ++i) {
    for (const std::unique_ptr<QueueTask>& task : before->parts[i]) {
      if (!task->sent()) return;
    }
  }
  for (const auto& part : submission.parts) {
    for (const std::unique_ptr<QueueTask>& task : part) task->advance();
  }
}

uint32_t SdmaExecutor::take_rings(const Queues& queues) {
  const ExecutorLock lock(mutex_);
  std::map<Rank, uint32_t> wanted = own_rings_;
  for (const auto& [rank, index] : queues) {
    if (++wanted[rank] > kOwnRingsMax) return 0;
  }
  own_rings_ = std::move(wanted);
  return ++ring_groups_ | kOwnRings;
}

void SdmaExecutor::take_back(Revoked doomed) {
  const ExecutorLock lock(mutex_);
  doomed.number = ++taken_back_;
  doomed_.push_back(std::move(doomed));
  drop_doomed();
  work_.notify_one();
}

void SdmaExecutor::drop_doomed() {
  std::erase_if(doomed_, [&](Revoked& doomed) {
    if (doomed.before != nullptr && !doomed.before->ended()) return false;
    for (const auto& [rank, index] : doomed.queues) {
      --own_rings_[rank];
      if (path_ != nullptr) path_->drop_ring(doomed.group, rank, index);
    }
    finished_.insert(finished_.end(), doomed.submissions.begin(), doomed.submissions.end());
    return true;
  });
}

bool SdmaExecutor::behind_doomed(const SdmaSubmission& submission) const {
  return std::any_of(doomed_.begin(), doomed_.end(), [&](const Revoked& doomed) {
    return doomed.number <= submission.after_doomed && !doomed.submissions.empty() &&
           doomed.submissions.front()->launch.lane == submission.launch.lane;
  });
}

void SdmaExecutor::serve() {
  ExecutorLock lock(mutex_);
  int64_t moved_ns = now_ns();
  while (true) {
    if (under_way_ == 0 && finished_.empty()) {
      if (stopping_) return;
      work_.wait(lock);
      moved_ns = now_ns();
      continue;
    }
    if (callers_ > 0 && !stopping_) {
      work_.wait_for(lock, std::chrono::nanoseconds(kLookNs));
      continue;
    }
    if (sweep()) moved_ns = now_ns();
    std::vector<std::shared_ptr<SdmaSubmission>> finished;
    finished.swap(finished_);
    if (stopping_ && now_ns() - moved_ns > kStopNs) return;
    lock.unlock();
    finished.clear();
    if (now_ns() - moved_ns < kEagerNs) {
      sched_yield();
      lock.lock();
    } else {
      lock.lock();
      work_.wait_for(lock, std::chrono::nanoseconds(kPauseNs));
    }
  }
}

// Looks at the first launch of every lane, rank by rank.
bool SdmaExecutor::sweep() {
  bool moved = false;
  for (auto& [key, submissions] : lanes_) {
    while (!submissions.empty()) {
      const std::shared_ptr<SdmaSubmission> submission = submissions.front();
      if (behind_doomed(*submission)) break;
      look(*submission, key.second, moved);
      const auto& part = submission->parts[key.second];
      const bool ended =
          std::all_of(part.begin(), part.end(), [](const auto& task) { return task->ended(); });
      if (!ended) break;
      moved = true;
      submissions.pop_front();
      if (--submission->parts_left == 0) finish(submission);
    }
  }
  if (!doomed_.empty()) drop_doomed();
  return moved;
}

bool SdmaExecutor::poisoned(SdmaSubmission& submission) const {
  for (Wakeup* wakeup : submission.launch.wakeups) {
    const uint32_t by = wakeup->poison.load(std::memory_order_acquire);
    if (by != 0) submission.poisoned_by.store(by, std::memory_order_release);
  }
  if (const std::string told = path_->failure(); !told.empty() && !submission.error) {
    submission.error.emplace(Code::driver, told);
  }
  return submission.poisoned_by.load() != 0 || submission.error || stopping_;
}

void SdmaExecutor::look(SdmaSubmission& submission, Rank rank, bool& moved) {
  const bool dead = poisoned(submission);
  for (const std::unique_ptr<QueueTask>& task : submission.parts[rank]) {
    if (task->ended()) continue;
    try {
      if (dead) task->release();
      moved |= task->advance();
    } catch (const Error& error) {
      submission.error = error;
    }
  }
}

void SdmaExecutor::finish(const std::shared_ptr<SdmaSubmission>& submission) {
  for (size_t i = 0; i < submission->stamped_by.size(); ++i) {
    if (submission->stamped_by[i] == kHostRank || submission->stamps == nullptr) continue;
    const std::byte* place = submission->stamps + i * kTimestampAlign;
    uint64_t ticks = 0;
    std::copy_n(place, sizeof ticks, reinterpret_cast<std::byte*>(&ticks));
    if (ticks == 0) continue;  // never reached
    submission->timestamps_ns[i] =
        path_->since_ns(submission->stamped_by[i], ticks, submission->engine_time);
  }
  submission->end_ns = now_ns();
  submission->done.store(true, std::memory_order_release);
  finished_.push_back(submission);
  --under_way_;
  ended_.notify_all();
}

void SdmaExecutor::wait(SdmaSubmission& submission, const Deadline& deadline) {
  const std::string& op = submission.program->op;
  ExecutorLock lock(mutex_);
  ++callers_;  // who waits looks by itself, so that no thread has to be switched to
  int64_t moved_ns = now_ns();
  while (!submission.ended() && !stopping_ && !deadline.passed() && path_->failure().empty()) {
    if (sweep()) {
      moved_ns = now_ns();
    } else if (now_ns() - moved_ns < kEagerNs) {
      lock.unlock();
      sched_yield();
      lock.lock();
    } else {
      ended_.wait_for(lock, std::chrono::nanoseconds(std::min(deadline.left_ns(), kPauseNs)));
    }
  }
  --callers_;
  work_.notify_one();
  if (!submission.ended()) {
    if (stopping_) fail(Code::cancelled, op, " did not end before its backend was closed");
    if (submission.error) throw *submission.error;
    if (const std::string told = path_->failure(); !told.empty()) {
      fail(Code::driver, op, " cannot end: ", told);
    }
    fail(Code::timeout, op, " did not end within ", shown_s(deadline.wait_ns()),
         " s: ", submission.position());
  }
  // Freed by this thread: the service's might have to wait for an interpreter's lock.
  std::shared_ptr<void> owner = std::move(submission.launch.owner);
  std::vector<std::shared_ptr<void>> kept = std::move(submission.kept);
  lock.unlock();
  if (const uint32_t by = submission.poisoned_by.load(); by != 0) {
    fail(Code::peer, "rank ", by - 1, " died or aborted during ", op);
  }
  if (submission.error) throw *submission.error;
}

void SdmaExecutor::stop() {
  {
    const ExecutorLock lock(mutex_);
    stopping_ = true;
    work_.notify_all();
    ended_.notify_all();
  }
  if (thread_.joinable()) {
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();  // an owner that it released has let go of the backend
      return;
    }
    thread_.join();
  }
  // The runtime's queues end first: then nothing writes to what the submissions keep.
  path_.reset();
  lanes_.clear();
  doomed_.clear();
}

}  // namespace offcore::sdma
