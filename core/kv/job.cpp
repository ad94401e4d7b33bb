#include "core/kv/job.h"

#include <algorithm>

#include "core/base/threads.h"

namespace offcore::kv {

Job::Job(std::shared_ptr<Board> board, Request request)
    : board_(std::move(board)), request_(std::move(request)), urgency_(request_.priority) {}

uint32_t Job::stage_of(uint32_t layer) const {
  if (layer >= layers_) {
    fail(Code::invalid, "there is no layer ", layer, ": the cache has ", layers_);
  }
  return layer / together_;
}

void Job::fail_timeout(const Deadline& deadline) const {
  fail(Code::timeout, "a ", to_string(request_.direction), " of ", request_.blocks.size(),
       " blocks did not end within ", shown_s(deadline.wait_ns()), " s: ", stages_done_, " of ",
       stages_.size(), " groups of layers have arrived, ",
       began_ns_ < 0 ? "nothing is enqueued yet" : "it is under way");
}

void Job::fail_layer(uint32_t layer) const {
  if (failure_) throw *failure_;
  fail(Code::cancelled, "the ", to_string(request_.direction), " was cancelled before layer ",
       layer, " was copied");
}

void Job::wait(const Deadline& deadline) {
  look_out([&] { return done(); }, std::min(board_->spin_ns, deadline.left_ns()));
  std::unique_lock lock(board_->mutex);
  while (!done()) {
    if (deadline.passed()) fail_timeout(deadline);
    sleep(board_->changed, lock, deadline);
  }
  if (failure_) throw *failure_;
}

void Job::wait_layer(uint32_t layer, const Deadline& deadline) {
  const uint32_t stage = stage_of(layer);
  std::unique_lock lock(board_->mutex);
  while (stages_done_ <= stage) {
    if (done()) fail_layer(layer);
    if (deadline.passed()) fail_timeout(deadline);
    sleep(board_->changed, lock, deadline);
  }
}

void Job::want(uint32_t layer) {
  const uint32_t stage = stage_of(layer);
  const std::scoped_lock lock(board_->mutex);
  if (urgent_ > stage) return;
  urgent_ = stage + 1;
  board_->news = true;
  board_->work.notify_one();
}

void Job::hold(uint32_t layer, uintptr_t stream, const Deadline& deadline) {
  const uint32_t stage = stage_of(layer);
  look_out([&] { return enqueued(layer); }, board_->brief_ns);  // it takes microseconds, as a rule
  std::unique_lock lock(board_->mutex);
  while (stages_[stage].empty()) {
    if (stages_done_ > stage) return;  // there was nothing to copy
    if (done()) fail_layer(layer);
    if (deadline.passed()) fail_timeout(deadline);
    sleep(board_->changed, lock, deadline);
  }
  const std::vector<std::shared_ptr<Run>> runs = stages_[stage];
  lock.unlock();
  for (const std::shared_ptr<Run>& run : runs) run->hold(stream);
}

void Job::cancel() {
  const std::scoped_lock lock(board_->mutex);
  cancelled_ = true;
  board_->news = true;
  board_->work.notify_one();
}

JobReport Job::report() const {
  if (!done()) fail(Code::invalid, "a report exists only once the job is done: wait() first");
  return report_;
}

}  // namespace offcore::kv
