#include "core/backend/exec/executor.h"

#include "core/base/clock.h"

namespace offcore::exec {
namespace {

constexpr uint32_t kLockTries = 100;  // the mutex is held for less than a thread's switch takes

}  // namespace

// Waiting for the mutex by sleeping would cost more than what it guards.
Executor::ExecutorLock Executor::enter() {
  ExecutorLock lock(mutex_, std::try_to_lock);
  for (uint32_t i = 0; i < kLockTries && !lock.owns_lock(); ++i) {
    pause_briefly();
    lock.try_lock();
  }
  if (!lock.owns_lock()) lock.lock();
  return lock;
}

void Executor::check_open() const {
  if (closed_) fail(Code::cancelled, "the ", backend_, " backend is closed");
}

bool Executor::enqueue(const std::shared_ptr<Submission>& submission, Freed& freed) {
  bool turned = false;
  const uint32_t parts = submission->parts_left;
  submission->control_ns = now_ns() - submission->launch_ns;
  for (uint32_t part = 0; part < parts; ++part) {
    const LaneKey key{submission->launch.lane, part};
    LaneSubmissions& lane = lanes_[key];
    lane.push_back(submission);
    if (lane.size() > 1) continue;
    turned = true;
    begin(*submission, part);
    settle(key, lane, freed);
  }
  return turned;
}

bool Executor::settle(const LaneKey& key, LaneSubmissions& lane, Freed& freed) {
  bool settled = false;
  for (; !lane.empty() && lane.front()->part_ended(key.second); settled = true) {
    std::shared_ptr<Submission> submission = std::move(lane.front());
    lane.pop_front();
    if (--submission->parts_left == 0) finish(*submission, freed);
    freed.push_back(std::move(submission));
    if (!lane.empty()) begin(*lane.front(), key.second);
  }
  return settled;
}

void Executor::wait(Submission& submission, const Deadline& deadline) {
  if (!submission.ended()) attend(submission, deadline);
  const std::string& op = submission.program->op;
  Freed freed;  // by this thread: another one might have to wait for an interpreter's lock
  const ExecutorLock lock = enter();
  const bool ended = submission.ended();
  if (ended) retire(submission, freed);
  const uint32_t by = submission.dead.load(std::memory_order_acquire);
  if (ended && by == 0 && !submission.error) return;
  const std::string position = submission.position();
  if (ended && by != 0) {
    fail(Code::peer, "rank ", by - 1, " died or aborted during ", op, position.empty() ? "" : ": ",
         position);
  }
  if (!ended && closed_) fail(Code::cancelled, op, " did not end before its backend was closed");
  if (submission.error) throw *submission.error;
  if (const std::string failed = failure(); !failed.empty()) {
    fail(Code::driver, op, " cannot end: ", failed);
  }
  fail(Code::timeout, op, " did not end within ", shown_s(deadline.wait_ns()),
       " s: ", position.empty() ? submission.no_position() : position);
}

Report SubmissionRun::report() const {
  if (!submission_->poll()) {
    fail(Code::invalid, "a report exists only once the run is done: wait() first");
  }
  return submission_->report();
}

void LoadedProgram::refuse_unfit(const Launch& launch) const {
  try {
    check(launch);
  } catch (const Error& error) {
    throw Refused(error);
  }
}

bool LoadedProgram::arm(const Launch& launch) {
  if (compiled_->program->mode != Mode::armed) {
    fail(Code::invalid, "only a program of mode armed can be armed, not one of mode ",
         to_string(compiled_->program->mode));
  }
  refuse_unfit(launch);
  const std::scoped_lock lock(mutex_);
  std::shared_ptr<Submission> submission = build_ahead(launch);
  if (submission == nullptr) return false;
  armed_.push_back(std::move(submission));
  return true;
}

// What was armed for this launch; null where nothing was, or for other memory.
std::shared_ptr<Submission> LoadedProgram::take_armed(const Launch& launch, Freed& freed) {
  if (armed_.empty()) return nullptr;
  const std::shared_ptr<Submission> submission = armed_.front();
  const Launch& armed = submission->launch;
  if (armed.epoch != launch.epoch || armed.lane != launch.lane) {
    fail(Code::invalid, "armed for epoch ", armed.epoch, " of lane ", armed.lane,
         " but launched with epoch ", launch.epoch, " of lane ", launch.lane);
  }
  if (armed.binding != launch.binding) {
    recall();
    freed.insert(freed.end(), armed_.begin(), armed_.end());
    armed_.clear();
    return nullptr;
  }
  armed_.pop_front();
  freed.push_back(std::exchange(submission->launch.owner, launch.owner));
  submission->launch.streams = launch.streams;
  submission->launch.behind = launch.behind;
  last_ = submission;
  return submission;
}

std::shared_ptr<Submission> LoadedProgram::submit(const Launch& launch) {
  const int64_t launch_ns = now_ns();
  refuse_unfit(launch);
  Freed freed;
  const std::scoped_lock lock(mutex_);
  std::shared_ptr<Submission> submission = take_armed(launch, freed);
  if (submission == nullptr) submission = build(launch);
  submission->launch_ns = launch_ns;
  executor_->submit(submission, freed);
  return submission;
}

std::unique_ptr<Run> LoadedProgram::launch(const Launch& launch) {
  return std::make_unique<SubmissionRun>(executor_, submit(launch));
}

}  // namespace offcore::exec
