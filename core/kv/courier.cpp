#include "core/kv/courier.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <thread>

#include "core/kv/submit.h"

namespace offcore::kv {
namespace {

constexpr int64_t kLingerNs = 200'000;  // after the last job, before the thread sleeps
constexpr int64_t kSpinNs = 200'000;
constexpr uint32_t kPartsOfPace = 4;
constexpr size_t kFlightsMin = 2;  // so that one is enqueued while another is copied

// Between two looks at the engines, after so long without a change.
void nap(int64_t idle_ns) {
  if (idle_ns < kSpinNs) {
    sched_yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(idle_ns < 20 * kSpinNs ? 20 : 200));
  }
}

}  // namespace

Courier::Courier(std::shared_ptr<Board> board, std::shared_ptr<Backend> backend,
                 std::vector<Group> groups, Pace pace, std::shared_ptr<const void> keep,
                 bool checked)
    : board_(std::move(board)),
      backend_(std::move(backend)),
      groups_(std::move(groups)),
      pace_(pace),
      keep_(std::move(keep)),
      checked_(checked),
      blocks_(groups_.size()),
      slots_(groups_.size()) {
  for (size_t group = 0; group < groups_.size(); ++group) {
    const auto first = [&](auto same) {
      size_t found = 0;
      while (found < group && !same(groups_[found])) ++found;
      return found;
    };
    const Group& own = groups_[group];
    cache_of_.push_back(
        first([&](const Group& other) { return other.layout->meets(*own.layout); }));
    pool_of_.push_back(first([&](const Group& other) { return other.pool == own.pool; }));
    if (groups_[cache_of_[group]].layout->blocks() != own.layout->blocks()) {
      fail(Code::invalid, "groups ", cache_of_[group], " and ", group,
           " share memory, but have other numbers of blocks");
    }
    blocks_[group].resize(cache_of_[group] == group ? own.layout->blocks() : 0);
  }
}

void Courier::run() {
  int64_t moved_ns = now_ns();
  while (collect()) {
    bool moved = false;
    for (Lane& lane : lanes_) moved |= reap(lane);
    for (Lane& lane : lanes_) moved |= submit(lane);
    if (moved) {
      moved_ns = now_ns();
    } else {
      nap(now_ns() - moved_ns);
    }
  }
}

// Takes what callers have left. False: nothing is left, and nothing will come.
bool Courier::collect() {
  if (jobs_.empty()) {
    const int64_t began_ns = now_ns();
    while (!board_->news && now_ns() - began_ns < kLingerNs) sched_yield();
  } else if (!board_->news) {
    return true;
  }
  std::deque<std::shared_ptr<Job>> taken;
  bool cancel_all = false;
  {
    std::unique_lock lock(board_->mutex);
    if (jobs_.empty()) {
      board_->work.wait(lock, [&] { return !board_->inbox.empty() || board_->closing; });
      if (board_->inbox.empty()) {
        board_->ended = true;
        board_->changed.notify_all();
        return false;
      }
    }
    board_->news = false;
    taken.swap(board_->inbox);
    cancel_all = board_->cancel_all;
  }
  for (const std::shared_ptr<Job>& job : taken) admit(job);
  drop_cancelled(cancel_all);
  return true;
}

void Courier::admit(const std::shared_ptr<Job>& job) {
  job->number_ = ++number_;
  mark(*job);
  for (const std::shared_ptr<Job>& other : jobs_) {
    if (meets(*job, *other)) job->waits_.push_back(other);
  }
  jobs_.push_back(job);
  Lane& lane = lanes_[static_cast<size_t>(job->request_.direction)];
  lane.jobs.push_back(job);
  sort(lane);
  for (const std::shared_ptr<Job>& other : job->waits_) hurry(*other, job->urgency_);
  if (!job->cursor_->ended()) return;
  {  // there is nothing to copy
    const std::scoped_lock lock(board_->mutex);
    job->stages_done_ = static_cast<uint32_t>(job->stages_.size());
  }
  job->report_.layers = job->layers_;
  stop(job, std::nullopt);
}

void Courier::mark(const Job& job) {
  const Request& request = job.request_;
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
bool Courier::meets(const Job& job, const Job& other) {
  const auto touch = [&](const Marks& marks, const std::vector<int64_t>& named, bool writes) {
    return std::any_of(named.begin(), named.end(), [&](int64_t number) {
      if (static_cast<size_t>(number) >= marks.size()) return false;
      const uint64_t mark = marks[static_cast<size_t>(number)];
      return mark / 2 == job.number_ && (writes || mark % 2 == 1);
    });
  };
  const Request& own = job.request_;
  const Request& request = other.request_;
  const bool load = request.direction == Direction::load;
  return (cache_of_[own.group] == cache_of_[request.group] &&
          touch(blocks_[cache_of_[own.group]], request.blocks, load)) ||
         (pool_of_[own.group] == pool_of_[request.group] &&
          touch(slots_[pool_of_[own.group]], request.slots, !load));
}

void Courier::hurry(Job& job, int32_t urgency) {
  if (job.urgency_ >= urgency) return;
  job.urgency_ = urgency;
  sort(lanes_[static_cast<size_t>(job.request_.direction)]);
  for (const std::shared_ptr<Job>& other : job.waits_) hurry(*other, urgency);
}

void Courier::sort(Lane& lane) {
  std::sort(lane.jobs.begin(), lane.jobs.end(), [](const auto& a, const auto& b) {
    return a->urgency_ != b->urgency_ ? a->urgency_ > b->urgency_ : a->number_ < b->number_;
  });
}

void Courier::drop_cancelled(bool all) {
  for (const Lane& lane : lanes_) {
    const std::vector<std::shared_ptr<Job>> jobs = lane.jobs;
    for (const std::shared_ptr<Job>& job : jobs) {
      if (!all && !job->cancelled_) continue;
      job->report_.cancelled = true;
      stop(job, std::nullopt);
    }
  }
}

// Lets go of what has ended.
bool Courier::reap(Lane& lane) {
  bool moved = false;
  while (!lane.flights.empty()) {
    Flight& first = lane.flights.front();
    std::optional<Error> failure;
    try {
      if (!first.run->done()) break;
      first.run->wait(Deadline::after_ns(0));  // returns what the launch keeps
      first.job->report_.calls += first.run->report().calls;
    } catch (const Error& error) {
      failure = error;
    }
    const Flight flight = std::move(first);
    lane.flights.pop_front();
    lane.bytes -= flight.bytes;
    lane.commands -= flight.commands;
    moved = true;
    Job& job = *flight.job;
    --job.parts_ahead_;
    if (failure) {
      stop(flight.job, std::move(failure));
      continue;
    }
    if (flight.ends_stage) {
      const std::scoped_lock lock(board_->mutex);
      ++job.stages_done_;
      board_->changed.notify_all();
    }
    if (job.cursor_->ended() && job.parts_ahead_ == 0) finish(flight.job);
  }
  return moved;
}

bool Courier::submit(Lane& lane) {
  const std::shared_ptr<Job> job = pick(lane);
  if (job == nullptr) return false;
  const bool urgent = job->cursor_->stage() < job->urgent_;
  const bool room = lane.bytes < pace_.ahead_bytes && lane.commands < pace_.ahead_commands;
  if (!room && !urgent && lane.flights.size() >= kFlightsMin) return false;
  try {
    enqueue(lane, job);
  } catch (const Error& error) {
    refuse(lane, job, error);
  } catch (const std::bad_alloc&) {
    refuse(lane, job, Error(Code::memory, "no memory is left to enqueue a job's copies"));
  }
  return true;
}

// Some of a part may be enqueued, and is copied all the same: an empty one behind it tells when the
// job's blocks and slots are out of use.
void Courier::refuse(Lane& lane, const std::shared_ptr<Job>& job, const Error& failure) {
  const Request& request = job->request_;
  try {
    Flight flight{.job = job};
    flight.run = kv::submit(*backend_, request.direction, *groups_[request.group].layout, Part(),
                            keep_, false);
    lane.flights.push_back(std::move(flight));
    ++job->parts_ahead_;
  } catch (const std::exception&) {  // the GPU has failed, or no memory is left: nothing would tell
  }
  stop(job, failure);
}

std::shared_ptr<Job> Courier::pick(Lane& lane) {
  for (size_t i = 0; i < lane.jobs.size(); ++i) {
    const std::shared_ptr<Job> job = lane.jobs[i];
    try {
      if (may_begin(*job)) return job;
    } catch (const Error& error) {  // the GPU that its mark is on has failed
      stop(job, error);
      --i;
    }
  }
  return nullptr;
}

bool Courier::may_begin(Job& job) const {
  std::erase_if(job.waits_, [&](const std::shared_ptr<Job>& other) {
    const bool in_order = other->request_.direction == job.request_.direction;
    return other->done() || (in_order && other->cursor_->ended());
  });
  if (!job.waits_.empty()) return false;
  if (job.request_.after != nullptr && job.request_.after->passed()) job.request_.after = nullptr;
  return job.request_.after == nullptr;
}

void Courier::enqueue(Lane& lane, const std::shared_ptr<Job>& job) {
  const Request& request = job->request_;
  const uint32_t stage = job->cursor_->stage();
  Part part = job->cursor_->next(std::max<uint64_t>(1, pace_.ahead_bytes / kPartsOfPace),
                                 std::max<uint32_t>(1, pace_.ahead_commands / kPartsOfPace));
  Flight flight{
      .job = job, .bytes = part.bytes, .commands = part.copies, .ends_stage = part.ends_stage};
  JobReport& report = job->report_;
  const uint64_t pages = part.pages;
  const uint64_t strided = part.strided;
  if (job->began_ns_ < 0) {
    job->began_ns_ = backend_->now_ns();
    report.queued_ns = job->began_ns_ - job->called_ns_;
  }
  const int64_t began_ns = now_ns();
  flight.run = kv::submit(*backend_, request.direction, *groups_[request.group].layout,
                          std::move(part), keep_, checked_);
  report.enqueue_ns += now_ns() - began_ns;
  report.pages += pages;
  report.strided += strided;
  report.commands += flight.commands;
  report.bytes += flight.bytes;
  report.blocks = job->cursor_->copied();
  if (flight.ends_stage) {
    const std::scoped_lock lock(board_->mutex);
    job->stages_[stage] = flight.run;
    report.layers = std::min(job->layers_, (stage + 1) * job->together_);
    board_->changed.notify_all();
  }
  ++job->parts_ahead_;
  lane.bytes += flight.bytes;
  lane.commands += flight.commands;
  lane.flights.push_back(std::move(flight));
  if (job->cursor_->ended()) std::erase(lane.jobs, job);
}

// Nothing more of the job is enqueued. It ends with its last part that is.
void Courier::stop(const std::shared_ptr<Job>& job, std::optional<Error> failure) {
  std::erase(lanes_[static_cast<size_t>(job->request_.direction)].jobs, job);
  job->cursor_->stop();
  if (failure && !job->failure_) {
    const std::scoped_lock lock(board_->mutex);
    job->failure_ = std::move(failure);
  }
  if (job->parts_ahead_ == 0) finish(job);
}

void Courier::finish(const std::shared_ptr<Job>& job) {
  if (job->done()) return;
  const Request& request = job->request_;
  groups_[request.group].pool->unpin(request.slots);
  job->waits_.clear();
  job->request_.after = nullptr;
  const int64_t began_ns = job->began_ns_;
  if (began_ns >= 0) job->report_.copy_ns = backend_->now_ns() - began_ns;
  std::erase(jobs_, job);
  const std::scoped_lock lock(board_->mutex);
  --board_->under_way;
  job->ended_.store(true, std::memory_order_release);
  board_->changed.notify_all();
}

}  // namespace offcore::kv
