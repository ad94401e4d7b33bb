#include "core/kv/courier.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <thread>

namespace offcore::kv {
namespace {

// Of each group: the first of those whose caches share memory with its own, or with one that does.
std::vector<size_t> caches_of(const std::vector<Group>& groups) {
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

Courier::Courier(std::shared_ptr<Board> board, std::shared_ptr<Backend> backend,
                 std::vector<Group> groups, Crossing crossing, std::vector<Neighbour> neighbours,
                 Pace pace, std::shared_ptr<const void> keep, bool checked)
    : board_(std::move(board)),
      backend_(std::move(backend)),
      groups_(std::move(groups)),
      crossing_(std::move(crossing)),
      neighbours_(std::move(neighbours)),
      pace_(pace),
      keep_(std::move(keep)),
      checked_(checked),
      cache_of_(caches_of(groups_)),
      blocks_(groups_.size()),
      slots_(groups_.size()) {
  for (const Direction direction : {Direction::load, Direction::store}) {
    ways_[static_cast<size_t>(direction)].links =
        links_of(*backend_, crossing_.any(), neighbours_, direction);
  }
  for (size_t group = 0; group < groups_.size(); ++group) {
    const Group& own = groups_[group];
    const auto same = std::find_if(groups_.begin(), groups_.end(),
                                   [&](const Group& other) { return other.pool == own.pool; });
    pool_of_.push_back(static_cast<size_t>(same - groups_.begin()));
    blocks_[group].resize(cache_of_[group] == group ? own.layout->blocks() : 0);
  }
}

void Courier::run() {
  int64_t moved_ns = now_ns();
  while (rest()) {
    try {
      if (turn()) {
        moved_ns = now_ns();
      } else {
        nap(now_ns() - moved_ns, board_->brief_ns);  // a part is copied in less than that
      }
    } catch (const std::bad_alloc&) {  // it would end the process: tried again
      board_->news = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

// Until there is something to do. False: nothing is left, and nothing will come.
bool Courier::rest() {
  if (board_->helpers > 0) return true;
  {
    const std::scoped_lock turning(turning_);
    if (!jobs_.empty()) return true;
  }
  look_out([&] { return board_->news || board_->closing; }, board_->linger_ns);
  std::unique_lock lock(board_->mutex);
  board_->asleep = true;
  const auto needed = [&] { return board_->news || board_->under_way > 0; };
  board_->work.wait(lock, [&] { return needed() || board_->closing; });
  board_->asleep = false;
  if (needed()) return true;
  board_->ended = true;
  board_->changed.notify_all();
  return false;
}

// Others let go soon. Who sleeps until then takes longer than that to wake.
std::unique_lock<std::mutex> Courier::take_turn() {
  std::unique_lock turning(turning_, std::defer_lock);
  if (!look_out([&] { return turning.try_lock(); }, board_->brief_ns)) turning.lock();
  return turning;
}

bool Courier::turn() {
  if (board_->helpers > 0) return false;
  const auto turning = take_turn();
  collect();
  bool moved = false;
  for (Way& way : ways_) {
    for (Link& link : way.links) moved |= reap(link);
  }
  for (Way& way : ways_) moved |= submit(way, pace_.ahead_commands, true);
  return moved;
}

bool Courier::help(bool waits) {
  const uint32_t plain_max = pace_.ahead_commands / (waits ? 1 : kPartsOfPace);
  bool submitted = false;
  try {
    const auto turning = take_turn();
    collect();
    for (Way& way : ways_) {
      for (Link& link : way.links) reap(link);
    }
    for (Way& way : ways_) submitted |= submit(way, plain_max, waits);
  } catch (const std::bad_alloc&) {  // the courier tries again
  }
  if (waits) return submitted;
  const std::scoped_lock lock(board_->mutex);  // there is something to see end
  board_->news = true;
  board_->work.notify_one();
  return submitted;
}

// Takes what callers have left.
void Courier::collect() {
  if (!board_->news) return;
  std::deque<std::shared_ptr<Job>> taken;
  bool cancel_all = false;
  {
    const std::scoped_lock lock(board_->mutex);
    board_->news = false;
    taken.swap(board_->inbox);
    cancel_all = board_->cancel_all;
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

void Courier::admit(const std::shared_ptr<Job>& job) {
  job->number_ = ++number_;
  mark(*job);
  for (const std::shared_ptr<Job>& other : jobs_) {
    if (meets(*job, *other)) job->waits_.push_back(other);
  }
  jobs_.push_back(job);
  Way& way = ways_[static_cast<size_t>(job->request_.direction)];
  way.jobs.push_back(job);
  sort(way);
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
  sort(ways_[static_cast<size_t>(job.request_.direction)]);
  for (const std::shared_ptr<Job>& other : job.waits_) hurry(*other, urgency);
}

void Courier::sort(Way& way) {
  std::sort(way.jobs.begin(), way.jobs.end(), [](const auto& a, const auto& b) {
    return a->urgency_ != b->urgency_ ? a->urgency_ > b->urgency_ : a->number_ < b->number_;
  });
}

void Courier::drop_cancelled(bool all) {
  for (const Way& way : ways_) {
    const std::vector<std::shared_ptr<Job>> jobs = way.jobs;
    for (const std::shared_ptr<Job>& job : jobs) {
      if (!all && !job->cancelled_) continue;
      job->report_.cancelled = true;
      stop(job, std::nullopt);
    }
  }
}

// Lets go of what has ended.
bool Courier::reap(Link& link) {
  uint64_t flights = 0;
  uint64_t bytes = 0;
  for (Lane& lane : link.lanes) {
    const uint64_t before = lane.bytes;
    flights += reap(link, lane);
    bytes += before - lane.bytes;
  }
  if (bytes > 0) link.measured(bytes);
  return flights > 0;
}

uint64_t Courier::reap(Link& link, Lane& lane) {
  uint64_t ended = 0;
  while (!lane.flights.empty()) {
    const Flight& first = lane.flights.front();
    std::optional<Error> failure;
    try {
      if (!first.run->done()) break;
      first.run->wait(Deadline::after_ns(0));  // returns what the launch keeps
      first.job->report_.calls += first.run->report().calls;
    } catch (const Error& error) {
      failure = error;
      link.lost = link.staged();
    }
    const Flight flight = link.take(lane);
    ++ended;
    Job& job = *flight.job;
    --job.parts_ahead_;
    if (failure) {
      stop(flight.job, std::move(failure));
      continue;
    }
    if (flight.bytes > 0) {
      --job.stages_ahead_[flight.stage];
      end_stages(job);
    }
    if (job.cursor_->ended() && job.parts_ahead_ == 0) finish(flight.job);
  }
  return ended;
}

// Those that are enqueued wholly, and of which nothing is on its way any more.
void Courier::end_stages(Job& job) {
  const std::scoped_lock lock(board_->mutex);
  while (job.stages_done_ < job.enqueued_ && job.stages_ahead_[job.stages_done_] == 0) {
    ++job.stages_done_;
    board_->changed.notify_all();
  }
}

std::shared_ptr<Job> Courier::pick(Way& way) {
  for (size_t i = 0; i < way.jobs.size(); ++i) {
    const std::shared_ptr<Job> job = way.jobs[i];
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
    const bool in_order = other->request_.direction == job.request_.direction &&
                          neighbours_.empty() && !may_cross(job) && !may_cross(*other);
    return other->done() || (in_order && other->cursor_->ended());
  });
  if (!job.waits_.empty()) return false;
  if (job.request_.after != nullptr && job.request_.after->passed()) job.request_.after = nullptr;
  return job.request_.after == nullptr;
}

// Nothing more of the job is enqueued. It ends with its last part that is.
void Courier::stop(const std::shared_ptr<Job>& job, std::optional<Error> failure) {
  std::erase(ways_[static_cast<size_t>(job->request_.direction)].jobs, job);
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
  job->last_.clear();
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
