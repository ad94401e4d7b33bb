#include "core/backend/sdma/executor.h"

#include <algorithm>
#include <cstring>

#include "core/backend/sdma/encode.h"
#include "core/base/error.h"

namespace offcore::sdma {
namespace {

constexpr uint32_t kOwnRingsMax = 48;  // of a GPU's, which has 8 for each of 16 engines

}  // namespace

SubmitPath& SdmaExecutor::path() {
  if (path_ == nullptr) check_open();
  return *path_;
}

void SdmaExecutor::submit(const std::shared_ptr<exec::Submission>& submission, exec::Freed& freed) {
  {
    const ExecutorLock lock(mutex_);
    static_cast<SdmaSubmission&>(*submission).after_doomed = taken_back_;
  }
  TaskExecutor::submit(submission, freed);
}

void SdmaExecutor::send(SdmaSubmission& submission, const SdmaSubmission* before) {
  const ExecutorLock lock(mutex_);
  if (before != nullptr && !before->ended() &&
      !std::all_of(before->rings.begin(), before->rings.end(),
                   [](const RingTask* task) { return task->sent(); })) {
    return;
  }
  for (RingTask* task : submission.rings) task->advance();
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
  exec::Freed freed;
  const ExecutorLock lock(mutex_);
  doomed.number = ++taken_back_;
  doomed_.push_back(std::move(doomed));
  swept(freed);
  changed_.notify_one();
}

void SdmaExecutor::swept(exec::Freed& freed) {
  std::erase_if(doomed_, [&](Revoked& doomed) {
    if (doomed.before != nullptr && !doomed.before->ended()) return false;
    for (const auto& [rank, index] : doomed.queues) {
      --own_rings_[rank];
      if (path_ != nullptr) path_->drop_ring(doomed.group, rank, index);
    }
    freed.insert(freed.end(), doomed.submissions.begin(), doomed.submissions.end());
    freed.push_back(std::move(doomed.before));
    return true;
  });
}

bool SdmaExecutor::held_back(const exec::Submission& submission) const {
  const uint64_t after = static_cast<const SdmaSubmission&>(submission).after_doomed;
  return std::any_of(doomed_.begin(), doomed_.end(), [&](const Revoked& doomed) {
    return doomed.number <= after && !doomed.submissions.empty() &&
           doomed.submissions.front()->launch.lane == submission.launch.lane;
  });
}

void SdmaExecutor::finish(exec::Submission& submission, exec::Freed& freed) {
  auto& own = static_cast<SdmaSubmission&>(submission);
  const uint64_t engine_time = own.stamped_by.empty() ? 0 : path_->engine_time();
  const int64_t since_launch_ns = now_ns() - own.launch_ns;
  for (size_t i = 0; i < own.stamped_by.size(); ++i) {
    if (own.stamped_by[i] == kHostRank || own.stamps == nullptr) continue;
    uint64_t ticks = 0;
    std::memcpy(&ticks, own.stamps + i * kTimestampAlign, sizeof ticks);
    if (ticks == 0) continue;  // never reached
    own.timestamps_ns[i] = since_launch_ns + path_->since_ns(own.stamped_by[i], ticks, engine_time);
  }
  TaskExecutor::finish(submission, freed);
}

void SdmaExecutor::close() {
  if (!stop()) return;
  path_
      .reset();  // the runtime's queues end first: then nothing writes to what the submissions keep
  lanes_.clear();
  doomed_.clear();
}

}  // namespace offcore::sdma
