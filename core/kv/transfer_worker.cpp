#include "core/kv/transfer_worker.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <thread>

namespace offcore::kv {
namespace {

// In which a caller who waits for its job comes back, and submits it: it has just been busy, and a
// page takes the thread, which has not, up to twice as long.
constexpr int64_t kLeftToCallerNs = 10'000;
constexpr uint32_t kWakingParts = 16;  // of the pace, while the thread wakes

// Of each group: the first of those whose caches share memory with its own, or with one that does.
std::vector<size_t> caches_of(const std::vector<CacheGroup>& groups) {
  std::vector<size_t> caches;
  for (size_t group = 0; group < groups.size(); ++group) {
    caches.push_back(group);
    for (size_t other = 0; other < group; ++other) {
      if (!groups[other].layout->meets(*groups[group].layout)) continue;
      const auto [kept, joined] = std::minmax(caches[other], caches[group]);
      std::replace(caches.begin(), caches.end(), size_t{joined}, size_t{kept});
    }
  }
  return caches;
}

}  // namespace

TransferWorker::TransferWorker(std::shared_ptr<JobQueue> queue, std::shared_ptr<Backend> backend,
                               std::vector<CacheGroup> groups, EngineSplit crossing,
                               Packing packing, std::vector<Neighbour> neighbours, Pace pace,
                               std::shared_ptr<const void> keep, bool checked)
    : queue_(std::move(queue)),
      backend_(std::move(backend)),
      groups_(std::move(groups)),
      crossing_(std::move(crossing)),
      packing_(std::move(packing)),
      neighbours_(std::move(neighbours)),
      pace_(pace),
      keep_(std::move(keep)),
      checked_(checked),
      cache_of_(caches_of(groups_)),
      blocks_(groups_.size()),
      slots_(groups_.size()) {
  for (const Direction direction : {Direction::load, Direction::store}) {
    directions_[static_cast<size_t>(direction)].links =
        links_of(*backend_, crossing_.any(), packing_, neighbours_, direction);
  }
  for (size_t group = 0; group < groups_.size(); ++group) {
    const CacheGroup& own = groups_[group];
    const auto same = std::find_if(groups_.begin(), groups_.end(),
                                   [&](const CacheGroup& other) { return other.pool == own.pool; });
    pool_of_.push_back(static_cast<size_t>(same - groups_.begin()));
    blocks_[group].resize(cache_of_[group] == group ? own.layout->blocks() : 0);
  }
}

void TransferWorker::run() {
  int64_t moved_ns = now_ns();
  while (rest()) {
    try {
      if (turn()) {
        moved_ns = now_ns();
      } else {
        nap(now_ns() - moved_ns, queue_->brief_ns);  // a part is copied in less than that
      }
    } catch (const std::bad_alloc&) {  // it would end the process: tried again
      queue_->news = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

// Until there is something to do. False: nothing is left, and nothing will come.
bool TransferWorker::rest() {
  if (queue_->helpers == 0) {
    const std::scoped_lock turning(turning_);
    if (!jobs_.empty()) return true;
  } else {  // whose core's other half may be this thread's
    std::unique_lock lock(queue_->mutex);
    queue_->work.wait_for(lock, std::chrono::milliseconds(1),
                          [&] { return queue_->helpers == 0 || queue_->closing; });
    return true;
  }
  if (spin_until([&] { return queue_->news || queue_->closing; }, queue_->linger_ns)) {
    spin_until([&] { return queue_->helpers > 0 || queue_->closing; }, kLeftToCallerNs);
  }
  std::unique_lock lock(queue_->mutex);
  queue_->asleep = true;
  const auto needed = [&] { return queue_->news || queue_->under_way > 0; };
  queue_->work.wait(lock, [&] { return needed() || queue_->closing; });
  queue_->asleep = false;
  if (needed()) return true;
  queue_->ended = true;
  queue_->changed.notify_all();
  return false;
}

// Others let go soon. Who sleeps until then takes longer than that to wake.
std::unique_lock<std::mutex> TransferWorker::take_turn() {
  std::unique_lock turning(turning_, std::defer_lock);
  if (!spin_until([&] { return turning.try_lock(); }, queue_->brief_ns)) turning.lock();
  return turning;
}

bool TransferWorker::turn() {
  if (queue_->helpers > 0) return false;
  const auto turning = take_turn();
  collect();
  bool moved = false;
  for (DirectionQueue& direction : directions_) {
    for (Link& link : direction.links) moved |= reap(link);
  }
  for (DirectionQueue& direction : directions_)
    moved |= submit(direction, pace_.ahead_commands, true);
  return moved;
}

bool TransferWorker::help(bool waits) {
  const uint32_t plain_max = pace_.ahead_commands / (waits ? 1 : kWakingParts);
  bool submitted = false;
  try {
    const auto turning = take_turn();
    collect();
    for (DirectionQueue& direction : directions_) {
      for (Link& link : direction.links) reap(link);
    }
    for (DirectionQueue& direction : directions_) submitted |= submit(direction, plain_max, waits);
  } catch (const std::bad_alloc&) {  // the worker tries again
  }
  if (waits) return submitted;
  const std::scoped_lock lock(queue_->mutex);  // there is something to see end
  queue_->news = true;
  queue_->work.notify_one();
  return submitted;
}

// Takes what callers have left.
void TransferWorker::collect() {
  if (!queue_->news) return;
  std::deque<std::shared_ptr<Job>> taken;
  bool cancel_all = false;
  {
    const std::scoped_lock lock(queue_->mutex);
    queue_->news = false;
    taken.swap(queue_->inbox);
    cancel_all = queue_->cancel_all;
  }
  for (const std::shared_ptr<Job>& job : taken) {
    try {
      admit(job);
    } catch (const std::bad_alloc&) {
      stop(job, Error(Code::memory, "no memory left"));  // so short that it needs none
    }
  }
  drop_cancelled(cancel_all);
}

void TransferWorker::admit(const std::shared_ptr<Job>& job) {
  job->number_ = ++number_;
  job->packed_ = is_to_be_packed(*job);
  if (groups_[job->request_.group].pool->orders()) {
    mark(*job);
    for (const std::shared_ptr<Job>& other : jobs_) {
      if (meets(*job, *other)) job->waits_.push_back(other);
    }
  }
  jobs_.push_back(job);
  DirectionQueue& direction = directions_[static_cast<size_t>(job->request_.direction)];
  direction.jobs.push_back(job);
  sort(direction);
  for (const std::shared_ptr<Job>& other : job->waits_) inherit_priority(*other, job->urgency_);
  if (!job->builder_->ended()) return;
  {  // there is nothing to copy
    const std::scoped_lock lock(queue_->mutex);
    job->layer_groups_done_ = static_cast<uint32_t>(job->layer_groups_.size());
  }
  job->report_.layers = job->layers_;
  stop(job, std::nullopt);
}

void TransferWorker::mark(const Job& job) {
  const TransferRequest& request = job.request_;
  const bool load = request.direction == Direction::load;
  Marks& blocks = blocks_[cache_of_[request.group]];
  Marks& slots = slots_[pool_of_[request.group]];
  for (int64_t block : request.blocks) blocks[static_cast<size_t>(block)] = 2 * job.number_ + load;
  for (int64_t slot : request.slots) {
    if (slots.size() <= static_cast<size_t>(slot)) slots.resize(static_cast<size_t>(slot) * 2 + 64);
    slots[static_cast<size_t>(slot)] = 2 * job.number_ + !load;
  }
}

// Whether the job that was marked last may not be copied at the same time as another.
bool TransferWorker::meets(const Job& job, const Job& other) {
  const auto touch = [&](const Marks& marks, const std::vector<int64_t>& named, bool writes) {
    return std::any_of(named.begin(), named.end(), [&](int64_t number) {
      if (static_cast<size_t>(number) >= marks.size()) return false;
      const uint64_t mark = marks[static_cast<size_t>(number)];
      return mark / 2 == job.number_ && (writes || mark % 2 == 1);
    });
  };
  const TransferRequest& own = job.request_;
  const TransferRequest& request = other.request_;
  const bool load = request.direction == Direction::load;
  return (cache_of_[own.group] == cache_of_[request.group] &&
          touch(blocks_[cache_of_[own.group]], request.blocks, load)) ||
         (pool_of_[own.group] == pool_of_[request.group] &&
          touch(slots_[pool_of_[own.group]], request.slots, !load));
}

void TransferWorker::inherit_priority(Job& job, int32_t urgency) {
  if (job.urgency_ >= urgency) return;
  job.urgency_ = urgency;
  sort(directions_[static_cast<size_t>(job.request_.direction)]);
  for (const std::shared_ptr<Job>& other : job.waits_) inherit_priority(*other, urgency);
}

void TransferWorker::sort(DirectionQueue& direction) {
  std::sort(direction.jobs.begin(), direction.jobs.end(), [](const auto& a, const auto& b) {
    return a->urgency_ != b->urgency_ ? a->urgency_ > b->urgency_ : a->number_ < b->number_;
  });
}

void TransferWorker::drop_cancelled(bool all) {
  for (const DirectionQueue& direction : directions_) {
    const std::vector<std::shared_ptr<Job>> jobs = direction.jobs;
    for (const std::shared_ptr<Job>& job : jobs) {
      if (!all && !job->cancelled_) continue;
      job->report_.cancelled = true;
      stop(job, std::nullopt);
    }
  }
}

// Lets go of what has ended.
bool TransferWorker::reap(Link& link) {
  uint64_t submissions = 0;
  uint64_t bytes = 0;
  for (LinkLane& lane : link.lanes) {
    const uint64_t before = lane.bytes;
    submissions += reap(link, lane);
    bytes += before - lane.bytes;
  }
  if (bytes > 0) link.measured(bytes);
  return submissions > 0;
}

uint64_t TransferWorker::reap(Link& link, LinkLane& lane) {
  uint64_t ended = 0;
  while (!lane.submissions.empty()) {
    const EnqueuedPart& first = lane.submissions.front();
    std::optional<Error> failure;
    try {
      if (!first.run->done()) break;
      first.run->wait(Deadline::after_ns(0));  // returns what the launch keeps
      const Report report = first.run->report();
      JobReport& told = first.job->report_;
      told.calls += report.calls;
      for (uint32_t sm = 0; first.times_ns != nullptr && sm < report.sms; ++sm) {
        told.sm_ns += first.times_ns[sm];
      }
    } catch (const Error& error) {
      failure = error;
      link.lost = link.staged();
    }
    const EnqueuedPart submission = link.take(lane);
    ++ended;
    Job& job = *submission.job;
    --job.parts_ahead_;
    if (failure) {
      stop(submission.job, std::move(failure));
      continue;
    }
    if (submission.bytes > 0) {
      --job.layer_groups_ahead_[submission.layer_group];
      end_layer_groups(job);
    }
    if (job.builder_->ended() && job.parts_ahead_ == 0) finish(submission.job);
  }
  return ended;
}

// Those that are enqueued wholly, and of which nothing is on its way any more.
void TransferWorker::end_layer_groups(Job& job) {
  const std::scoped_lock lock(queue_->mutex);
  while (job.layer_groups_done_ < job.enqueued_ &&
         job.layer_groups_ahead_[job.layer_groups_done_] == 0) {
    ++job.layer_groups_done_;
    queue_->changed.notify_all();
  }
}

// The first that may begin. Jobs by layer, of one urgency, go on together: what reads the first
// layers of all of them does not wait for the last layers of any.
std::shared_ptr<Job> TransferWorker::pick(DirectionQueue& direction) {
  std::shared_ptr<Job> best;
  for (size_t i = 0; i < direction.jobs.size(); ++i) {
    const std::shared_ptr<Job> job = direction.jobs[i];
    if (best != nullptr && (best->urgency_ > job->urgency_ || !goes_before(*job, *best))) continue;
    try {
      if (may_begin(*job)) best = job;
    } catch (const Error& error) {  // the GPU that its mark is on has failed
      stop(job, error);
      --i;
    }
    if (best != nullptr && best->together_ == best->layers_) break;
  }
  return best;
}

// Of two jobs, the second of which came first: layers that a stream waits for, then lower ones.
bool TransferWorker::goes_before(const Job& job, const Job& earlier) {
  const auto rank = [](const Job& one) {
    const uint32_t next = one.builder_->layer_group();
    return std::pair(next >= one.urgent_, uint64_t{next} * one.together_);
  };
  return job.together_ < job.layers_ && rank(job) < rank(earlier);
}

bool TransferWorker::may_begin(Job& job) const {
  std::erase_if(job.waits_, [&](const std::shared_ptr<Job>& other) {
    const bool follows =
        other->request_.direction == job.request_.direction && in_order(job) && in_order(*other);
    return other->done() || (follows && other->builder_->ended());
  });
  if (!job.waits_.empty()) return false;
  if (job.request_.after != nullptr && job.request_.after->passed()) job.request_.after = nullptr;
  return job.request_.after == nullptr || job.request_.held;
}

// Nothing more of the job is enqueued. It ends with its last part that is.
void TransferWorker::stop(const std::shared_ptr<Job>& job, std::optional<Error> failure) {
  std::erase(directions_[static_cast<size_t>(job->request_.direction)].jobs, job);
  job->builder_->stop();
  if (failure && !job->failure_) {
    const std::scoped_lock lock(queue_->mutex);
    job->failure_ = std::move(failure);
  }
  if (job->parts_ahead_ == 0) finish(job);
}

void TransferWorker::finish(const std::shared_ptr<Job>& job) {
  if (job->done()) return;
  const TransferRequest& request = job->request_;
  const CacheGroup& group = groups_[request.group];
  group.pool->unpin(request.slots, group.places());
  job->waits_.clear();
  job->last_.clear();
  job->request_.after = nullptr;
  const int64_t began_ns = job->began_ns_;
  if (began_ns >= 0) job->report_.copy_ns = backend_->now_ns() - began_ns;
  std::erase(jobs_, job);
  std::vector<std::shared_ptr<Gate>> gates;
  {
    const std::scoped_lock lock(queue_->mutex);
    --queue_->under_way;
    job->ended_.store(true, std::memory_order_release);
    gates.swap(job->gates_);
    queue_->changed.notify_all();
  }
  // A caller may be about to put a stream before one.
  for (const std::shared_ptr<Gate>& gate : gates) {
    if (gate != nullptr) gate->open();
  }
}

}  // namespace offcore::kv
