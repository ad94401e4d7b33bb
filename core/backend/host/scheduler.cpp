#include "core/backend/host/scheduler.h"

#include <sched.h>

#include <algorithm>
#include <system_error>

#include "core/backend/wakeup.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/threads.h"

namespace offcore::host {
namespace {

constexpr int64_t kSpinNs = 100'000;  // a caller's, before it sleeps; doubled after a short sleep
constexpr int64_t kSpinMaxNs = 400'000;
constexpr int64_t kShortSleepNs = 1'000'000;
constexpr int64_t kCrowdedSpinNs = 4'000;
constexpr int64_t kStandbyNs = 100'000;  // doubled while callers leave nothing to an engine
constexpr int64_t kStandbyMaxNs = 800'000;
constexpr int64_t kStandbyLooks = 20;     // after a caller was last seen
constexpr uint32_t kCallerPauses = 2;     // between two looks of a thread that spins
constexpr int64_t kWatchNs = 20'000'000;  // bounds: a killed peer may never wake us
constexpr int64_t kMixedNs = 1'000'000;   // where submissions have different wakeups
constexpr int64_t kDozeNs = 5'000'000;

// Takes the thread off its core for once, to another that it may run on and none of `taken` is.
void leave_core(cpu_set_t taken) {
  cpu_set_t all;
  if (sched_getaffinity(0, sizeof all, &all) != 0) return;
  CPU_AND(&taken, &taken, &all);
  cpu_set_t others;
  CPU_XOR(&others, &all, &taken);
  if (CPU_COUNT(&others) == 0) return;
  if (sched_setaffinity(0, sizeof others, &others) == 0) sched_setaffinity(0, sizeof all, &all);
}

// Callers that wait for each other on one core hardly sleep, so the kernel leaves them there for
// milliseconds, and another core idle. Each says where it is, and leaves a core where one of a
// lower rank was last.
void part_from_peers(const Launch& launch, Rank rank) {
  const int here = sched_getcpu();
  if (here < 0 || here >= CPU_SETSIZE) return;
  const auto said = static_cast<uint32_t>(here) + 1;
  std::atomic<uint32_t>& own = launch.wakeups[rank]->core;
  if (own.load(std::memory_order_relaxed) != said) own.store(said, std::memory_order_relaxed);
  bool shared = false;
  cpu_set_t taken;
  CPU_ZERO(&taken);
  for (Rank peer = 0; peer < launch.wakeups.size(); ++peer) {
    const uint32_t core = launch.wakeups[peer]->core.load(std::memory_order_relaxed);
    if (core == 0 || core > CPU_SETSIZE) continue;
    CPU_SET(core - 1, &taken);
    shared |= peer < rank && core == said;
  }
  if (shared) leave_core(taken);
}

}  // namespace

Scheduler::Scheduler(const Machine& machine, Rank ranks, std::vector<Rank> local_ranks)
    : Executor("host"),
      local_ranks_(std::move(local_ranks)),
      crowded_(ranks > usable_cores()),
      share_(std::max<uint32_t>(1, usable_cores() * local_ranks_.size() / ranks)),
      engines_(local_ranks_.size() * machine.engines_peer),
      spin_ns_(kSpinNs),
      standby_ns_(kStandbyNs) {}

void Scheduler::prepare(const HostProgram& compiled) {
  std::vector<uint32_t> wanted = {0};
  for (const LocalQueue& local : compiled.local_queues) {
    if (local.heavy) wanted.push_back(local.engine);
  }
  const SignalsBlocked blocked;
  const ExecutorLock lock(mutex_);
  check_open();
  for (uint32_t index : wanted) {
    EngineThread& engine = engines_[index];
    if (engine.thread.joinable()) continue;
    try {
      engine.thread = std::thread([this, self = shared_from_this(), index] { serve(index); });
      ++awake_;
    } catch (const std::system_error& error) {
      fail(Code::driver, "cannot start a thread for an engine: ", error.what());
    }
  }
}

void Scheduler::submit(const std::shared_ptr<exec::Submission>& submission, exec::Freed& freed) {
  const int64_t came_ns = now_ns();
  const int64_t away_ns = came_ns - seen_ns_.exchange(came_ns, std::memory_order_relaxed);
  if (!crowded_ && away_ns > kSpinNs) part_from_peers(submission->launch, local_ranks_.front());
  const ExecutorLock lock = enter();
  check_open();
  ++awake_;
  const bool turned = enqueue(submission, freed);
  // The engine that stands by will see it: a caller that waits at once need not call anybody.
  if (turned && awake_ < share_ && !standby_ && ready(true)) call_engine();
  --awake_;
  if (turned) leave();
}

void Scheduler::begin(exec::Submission& submission, uint32_t part) {
  for (const std::unique_ptr<QueueState>& context :
       static_cast<HostSubmission&>(submission).contexts) {
    if (context->local_.part == part) active_.push_back(context.get());
  }
}

void Scheduler::finish(exec::Submission& submission, exec::Freed& freed) {
  Executor::finish(submission, freed);
  if (callers_asleep_ > 0) dozers_.notify_all();
  if (watched_ != nullptr && watcher_own_ == &submission) wake(*watched_);
}

void Scheduler::end_queue(QueueState& context, exec::Freed& freed) {
  active_.erase(std::find(active_.begin(), active_.end(), &context));
  HostSubmission& submission = context.submission_;
  const LaneKey key{submission.launch.lane, context.local_.part};
  if (--submission.left[context.local_.part] == 0) settle(key, lanes_[key], freed);
}

bool Scheduler::waiting() const {
  return std::any_of(active_.begin(), active_.end(),
                     [](const QueueState* context) { return !context->running_; });
}

bool Scheduler::ready(bool heavy) const {
  return std::any_of(active_.begin(), active_.end(), [heavy](const QueueState* context) {
    return context->local_.heavy >= heavy && !context->running_ && context->ready();
  });
}

// Wakes an engine, if one is left: rather the one that stands by.
void Scheduler::call_engine() {
  EngineThread* called = nullptr;
  for (EngineThread& engine : engines_) {
    if (!engine.thread.joinable() || engine.state == EngineThread::ThreadState::awake) continue;
    if (called == nullptr || engine.state == EngineThread::ThreadState::standby) called = &engine;
  }
  if (called == nullptr) return;
  if (called->state == EngineThread::ThreadState::standby) standby_ = false;
  called->state = EngineThread::ThreadState::awake;
  ++awake_;
  called->call.notify_one();
}

// What a thread does when it goes back to its own business: sees to it that somebody attends.
void Scheduler::leave() {
  if (awake_ > 0 || standby_ || !waiting()) return;
  if (watched_ != nullptr) {
    if (ready(false)) wake(*watched_);
  } else if (callers_asleep_ > 0) {
    dozers_.notify_one();
  } else {
    call_engine();
  }
}

// A ready context: those that only signal first, since peers wait for that to copy, then light
// ones, then the caller's own; none for an engine where idle callers take them all. Calls an engine
// for a heavy one left over, if its core is free.
QueueState* Scheduler::pick(const HostSubmission* own) {
  const auto rank = [own](const QueueState& context) {
    return (context.local_.moves ? 0 : 4) + (context.local_.heavy ? 0 : 2) +
           (&context.submission_ == own ? 1 : 0);
  };
  QueueState* found = nullptr;
  bool heavy_left = false;
  uint32_t left_to_callers = own == nullptr ? callers_idle_ : 0;
  for (QueueState* context : active_) {
    if (context->running_ || !context->ready()) continue;
    if (left_to_callers > 0) {
      --left_to_callers;
      continue;
    }
    QueueState* left = context;
    if (found == nullptr || rank(*context) > rank(*found)) std::swap(left, found);
    heavy_left |= left != nullptr && left->local_.heavy;
  }
  if (heavy_left && awake_ < share_) call_engine();
  return found;
}

void Scheduler::advance(ExecutorLock& lock, QueueState& context) {
  const std::shared_ptr<exec::Submission> submission = context.submission_.shared_from_this();
  context.running_ = true;
  lock.unlock();
  const QueueState::Stop stop = context.run();
  exec::Freed freed;
  lock = enter();
  context.running_ = false;
  if (closed_) return;
  if (stop == QueueState::Stop::ended || stop == QueueState::Stop::poisoned)
    end_queue(context, freed);
  if (freed.empty()) return;
  lock.unlock();
  freed.clear();
  lock.lock();
}

// Sleeps on the local ranks' wakeup unless there is something to do.
void Scheduler::watch(ExecutorLock& lock, const HostSubmission* own, int64_t wait_ns) {
  const Launch& launch = (own != nullptr ? *own : active_.front()->submission_).launch;
  const bool mixed = std::any_of(active_.begin(), active_.end(), [&](const QueueState* context) {
    return context->submission_.launch.wakeups != launch.wakeups;
  });
  if (mixed) wait_ns = std::min(wait_ns, kMixedNs);  // one futex cannot tell of all
  std::shared_ptr<void> owner = launch.owner;        // the wakeup outlives its submission
  watched_ = launch.wakeups[local_ranks_.front()];
  watcher_own_ = own;
  {
    Sleeper sleeper(*watched_);
    if (pick(own) == nullptr) {
      --awake_;
      lock.unlock();
      sleeper.sleep(wait_ns);
      lock.lock();
      ++awake_;
    }
  }
  watched_ = nullptr;
  lock.unlock();  // an owner is not freed under the mutex
  owner.reset();
  lock.lock();
}

// An engine that found nothing to run: watches, stands by, or sleeps until it is called.
void Scheduler::rest(ExecutorLock& lock, EngineThread& engine) {
  const int64_t looked_ns = now_ns();
  const bool alone = awake_ == 1 && looked_ns - seen_ns_ >= standby_ns_;
  if (alone && watched_ == nullptr && !standby_ && waiting()) {
    return watch(lock, nullptr, kWatchNs);
  }
  --awake_;
  if (standby_ || looked_ns - seen_ns_ >= kStandbyLooks * standby_ns_) {
    engine.state = EngineThread::ThreadState::asleep;
    engine.call.wait(lock,
                     [&] { return engine.state == EngineThread::ThreadState::awake || closed_; });
    return;
  }
  standby_ = true;
  engine.state = EngineThread::ThreadState::standby;
  engine.call.wait_for(lock, std::chrono::nanoseconds(standby_ns_));
  if (engine.state == EngineThread::ThreadState::awake) return;  // called
  // A timer and a switch on a caller's core cost more than a small copy: few where callers attend.
  if (callers_ > 0 || seen_ns_ > looked_ns) {
    standby_ns_ = std::min(2 * standby_ns_, kStandbyMaxNs);
  } else if (!active_.empty()) {
    standby_ns_ = kStandbyNs;
  }
  standby_ = false;
  engine.state = EngineThread::ThreadState::awake;
  ++awake_;
}

void Scheduler::serve(uint32_t index) {
  ExecutorLock lock(mutex_);
  while (!closed_) {
    if (QueueState* context = awake_ > share_ ? nullptr : pick(nullptr)) {
      advance(lock, *context);
    } else {
      rest(lock, engines_[index]);
    }
  }
}

// A caller sleeps while somebody else watches.
void Scheduler::doze(ExecutorLock& lock, int64_t wait_ns) {
  --awake_;
  ++callers_asleep_;
  dozers_.wait_for(lock, std::chrono::nanoseconds(wait_ns));
  --callers_asleep_;
  ++awake_;
}

// A caller's. Some machines take longer to wake a thread than it spins before: ranks that sleep
// since their peers were woken late would go on so for good.
void Scheduler::sleep(ExecutorLock& lock, HostSubmission& own, const Deadline& deadline) {
  const int64_t began_ns = now_ns();
  --callers_idle_;
  if (watched_ == nullptr) {
    watch(lock, &own, std::min(kWatchNs, deadline.left_ns()));
  } else {
    doze(lock, std::min(kDozeNs, deadline.left_ns()));
  }
  ++callers_idle_;
  const bool was_short = now_ns() - began_ns < kShortSleepNs;
  spin_ns_ = was_short ? std::min(2 * spin_ns_, kSpinMaxNs) : kSpinNs;
}

void Scheduler::help(ExecutorLock& lock, HostSubmission& own, const Deadline& deadline) {
  int64_t idle_since_ns = -1;
  while (!own.ended() && !closed_ && !deadline.passed()) {
    if (QueueState* context = pick(&own)) {
      idle_since_ns = -1;
      --callers_idle_;
      advance(lock, *context);
      ++callers_idle_;
      continue;
    }
    const bool begins = idle_since_ns < 0;
    if (begins) idle_since_ns = now_ns();
    if (now_ns() - idle_since_ns < (crowded_ ? kCrowdedSpinNs : spin_ns_)) {
      lock.unlock();
      if (crowded_) {
        sched_yield();
      } else if (begins) {
        part_from_peers(own.launch, local_ranks_.front());
      } else {
        pause_briefly(kCallerPauses);
      }
      lock = enter();
      continue;
    }
    sleep(lock, own, deadline);
  }
}

void Scheduler::attend(exec::Submission& submission, const Deadline& deadline) {
  ExecutorLock lock = enter();
  ++awake_;
  ++callers_;
  ++callers_idle_;
  help(lock, static_cast<HostSubmission&>(submission), deadline);
  --callers_idle_;
  --callers_;
  --awake_;
  seen_ns_ = now_ns();
  if (!closed_) leave();
}

void Scheduler::close() {
  {
    const ExecutorLock lock(mutex_);
    closed_ = true;
    for (EngineThread& engine : engines_) engine.call.notify_one();
    dozers_.notify_all();
    if (watched_ != nullptr) wake(*watched_);
  }
  for (EngineThread& engine : engines_) {
    if (!engine.thread.joinable()) continue;
    if (engine.thread.get_id() == std::this_thread::get_id()) {
      engine.thread.detach();  // an owner that it released has let go of the backend
    } else {
      engine.thread.join();
    }
  }
  std::map<LaneKey, LaneSubmissions> lanes;
  const ExecutorLock lock(mutex_);
  lanes.swap(lanes_);
  active_.clear();
}

}  // namespace offcore::host
