#include "core/kv/job.h"

#include <algorithm>

#include "core/base/threads.h"

namespace offcore::kv {

Job::Job(std::shared_ptr<JobQueue> queue, TransferRequest request)
    : queue_(std::move(queue)), request_(std::move(request)), urgency_(request_.priority) {}

uint32_t Job::layer_group_of(uint32_t layer) const {
  if (layer >= layers_) {
    fail(Code::invalid, "there is no layer ", layer, ": the cache has ", layers_);
  }
  return layer / together_;
}

void Job::fail_timeout(const Deadline& deadline) const {
  fail(Code::timeout, "a ", to_string(request_.direction), " of ", request_.blocks.size(),
       " blocks did not end within ", shown_s(deadline.wait_ns()), " s: ", layer_groups_done_,
       " of ", layer_groups_.size(), " groups of layers have arrived, ",
       began_ns_ < 0 ? "nothing is enqueued yet" : "it is under way");
}

void Job::fail_layer(uint32_t layer) const {
  if (failure_) throw *failure_;
  fail(Code::cancelled, "the ", to_string(request_.direction), " was cancelled before layer ",
       layer, " was copied");
}

void Job::wait(const Deadline& deadline) {
  spin_until([&] { return done(); }, std::min(queue_->spin_ns, deadline.left_ns()));
  std::unique_lock lock(queue_->mutex);
  while (!done()) {
    if (deadline.passed()) fail_timeout(deadline);
    sleep(queue_->changed, lock, deadline);
  }
  if (failure_) throw *failure_;
}

void Job::wait_layer(uint32_t layer, const Deadline& deadline) {
  const uint32_t layer_group = layer_group_of(layer);
  std::unique_lock lock(queue_->mutex);
  while (layer_groups_done_ <= layer_group) {
    if (done()) fail_layer(layer);
    if (deadline.passed()) fail_timeout(deadline);
    sleep(queue_->changed, lock, deadline);
  }
}

void Job::want(uint32_t layer) {
  const uint32_t layer_group = layer_group_of(layer);
  const std::scoped_lock lock(queue_->mutex);
  if (urgent_ > layer_group) return;
  urgent_ = layer_group + 1;
  queue_->news = true;
  queue_->work.notify_one();
}

void Job::enqueue_wait(uint32_t layer, Streams& streams, uintptr_t stream,
                       const Deadline& deadline) {
  const uint32_t layer_group = layer_group_of(layer);
  spin_until([&] { return enqueued(layer); },
             queue_->brief_ns);  // it takes microseconds, as a rule
  std::unique_lock lock(queue_->mutex);
  while (layer_groups_[layer_group].empty()) {
    if (layer_groups_done_ > layer_group) return;  // there was nothing to copy
    if (done()) fail_layer(layer);
    if (deadline.passed()) fail_timeout(deadline);
    sleep(queue_->changed, lock, deadline);
  }
  const std::vector<std::shared_ptr<Run>> runs = layer_groups_[layer_group];
  lock.unlock();
  for (const std::shared_ptr<Run>& run : runs) streams.enqueue_wait(*run, stream);
}

void Job::enqueue_gate(uint32_t layer, Streams& streams, uintptr_t stream) {
  const uint32_t layer_group = layer_group_of(layer);
  std::shared_ptr<Gate> gate;
  if (!enqueued(layer)) gate = streams.gate(static_cast<uint32_t>(request_.direction));
  {
    const std::scoped_lock lock(queue_->mutex);
    if (layer_groups_[layer_group].empty() && !done()) {
      std::shared_ptr<Gate>& place = gates_[layer_group];
      if (place == nullptr) place = std::move(gate);
      gate = place;
    } else {
      gate = nullptr;
    }
  }
  // A driver whose queue is full of what stands before other gates holds its caller: not under the
  // mutex.
  if (gate != nullptr) return gate->enqueue_wait(stream);
  enqueue_wait(layer, streams, stream, Deadline::after_ns(0));
}

void Job::cancel() {
  const std::scoped_lock lock(queue_->mutex);
  cancelled_ = true;
  queue_->news = true;
  queue_->work.notify_one();
}

JobReport Job::report() const {
  if (!done()) fail(Code::invalid, "a report exists only once the job is done: wait() first");
  return report_;
}

}  // namespace offcore::kv
