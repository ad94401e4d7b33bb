#include "core/backend/host/station.h"

#include <sched.h>

#include <algorithm>
#include <system_error>

#include "core/backend/wakeup.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/threads.h"

namespace offcore {
namespace {

constexpr int64_t kSpinNs = 100'000;  // a caller's, before it sleeps; doubled after a short sleep
constexpr int64_t kSpinMaxNs = 400'000;
constexpr int64_t kShortSleepNs = 1'000'000;
constexpr int64_t kCrowdedSpinNs = 4'000;
constexpr int64_t kStandbyNs = 100'000;  // doubled while callers leave nothing to an engine
constexpr int64_t kStandbyMaxNs = 800'000;
constexpr int64_t kStandbyLooks = 20;     // after a caller was last seen
constexpr uint32_t kLockTries = 100;      // the mutex is held for less than a thread's switch takes
constexpr uint32_t kCallerPauses = 2;     // between two looks of a thread that spins
constexpr int64_t kWatchNs = 20'000'000;  // bounds: a killed peer may never wake us
constexpr int64_t kMixedNs = 1'000'000;   // where flights have different wakeups
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

Station::Station(const Machine& machine, Rank ranks, std::vector<Rank> local_ranks)
    : local_ranks_(std::move(local_ranks)),
      crowded_(ranks > usable_cores()),
      share_(std::max<uint32_t>(1, usable_cores() * local_ranks_.size() / ranks)),
      engines_(local_ranks_.size() * machine.engines_peer),
      spin_ns_(kSpinNs),
      standby_ns_(kStandbyNs) {}

void Station::prepare(const Cargo& cargo) {
  std::vector<uint32_t> wanted = {0};
  for (const LocalQueue& local : cargo.queues) {
    if (local.heavy) wanted.push_back(local.engine);
  }
  const SignalsBlocked blocked;
  const Lock lock(mutex_);
  if (stopping_) fail(Code::cancelled, "the host backend is closed");
  for (uint32_t index : wanted) {
    Engine& engine = engines_[index];
    if (engine.thread.joinable()) continue;
    try {
      engine.thread = std::thread([self = shared_from_this(), index] { self->serve(index); });
      ++awake_;
    } catch (const std::system_error& error) {
      fail(Code::driver, "cannot start a thread for an engine: ", error.what());
    }
  }
}

// Waiting for the mutex by sleeping would cost more than what it guards.
Station::Lock Station::enter() {
  Lock lock(mutex_, std::try_to_lock);
  for (uint32_t i = 0; i < kLockTries && !lock.owns_lock(); ++i) {
    pause_briefly();
    lock.try_lock();
  }
  if (!lock.owns_lock()) lock.lock();
  return lock;
}

void Station::enqueue(std::shared_ptr<Flight> flight) {
  Ended ended;
  const int64_t came_ns = now_ns();
  const int64_t away_ns = came_ns - seen_ns_.exchange(came_ns, std::memory_order_relaxed);
  if (!crowded_ && away_ns > kSpinNs) part_from_peers(flight->launch, local_ranks_.front());
  const Lock lock = enter();
  if (stopping_) fail(Code::cancelled, "the host backend is closed");
  bool turned = false;
  ++awake_;
  for (uint32_t part = 0; part < local_ranks_.size(); ++part) {
    const LaneKey key{flight->launch.lane, part};
    LaneFlights& flights = lanes_[key];
    flights.push_back(flight);
    if (flights.size() > 1) continue;
    turned = true;
    activate(*flight, part);
    turn(key, flights, ended);
  }
  // The engine that stands by will see it: a caller that waits at once need not call anybody.
  if (turned && awake_ < share_ && !standby_ && ready(true)) call_engine();
  --awake_;
  if (turned) leave();
  // `lock` goes before `ended`: see Ended.
}

// It is the part's turn in its lane.
void Station::activate(Flight& flight, uint32_t part) {
  for (const std::unique_ptr<Context>& context : flight.contexts) {
    if (context->local_.part == part) active_.push_back(context.get());
  }
}

// Retires the lane's flights whose part is complete, and gives the next its turn.
void Station::turn(LaneKey key, LaneFlights& flights, Ended& ended) {
  while (!flights.empty() && flights.front()->left[key.second] == 0) {
    std::shared_ptr<Flight> flight = std::move(flights.front());
    flights.pop_front();
    if (--flight->parts_left == 0) {
      flight->end_ns = now_ns();
      flight->done.store(true, std::memory_order_release);
      if (callers_asleep_ > 0) dozers_.notify_all();
      if (watched_ != nullptr && watcher_own_ == flight.get()) wake(*watched_);
    }
    ended.push_back(std::move(flight));
    if (!flights.empty()) activate(*flights.front(), key.second);
  }
}

void Station::finish(Context& context, Ended& ended) {
  active_.erase(std::find(active_.begin(), active_.end(), &context));
  Flight& flight = context.flight_;
  for (const Context::Timestamp& timestamp : context.timestamps_) {
    flight.timestamps_ns[timestamp.number] = timestamp.time_ns;
  }
  const LaneKey key{flight.launch.lane, context.local_.part};
  if (--flight.left[context.local_.part] == 0) turn(key, lanes_[key], ended);
}

bool Station::waiting() const {
  return std::any_of(active_.begin(), active_.end(),
                     [](const Context* context) { return !context->running_; });
}

bool Station::ready(bool heavy) const {
  return std::any_of(active_.begin(), active_.end(), [heavy](const Context* context) {
    return context->local_.heavy >= heavy && !context->running_ && context->ready();
  });
}

// Wakes an engine, if one is left: rather the one that stands by.
void Station::call_engine() {
  Engine* called = nullptr;
  for (Engine& engine : engines_) {
    if (!engine.thread.joinable() || engine.state == Engine::State::awake) continue;
    if (called == nullptr || engine.state == Engine::State::standby) called = &engine;
  }
  if (called == nullptr) return;
  if (called->state == Engine::State::standby) standby_ = false;
  called->state = Engine::State::awake;
  ++awake_;
  called->call.notify_one();
}

// What a thread does when it goes back to its own business: sees to it that somebody attends.
void Station::leave() {
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
Context* Station::pick(const Flight* own) {
  const auto rank = [own](const Context& context) {
    return (context.local_.moves ? 0 : 4) + (context.local_.heavy ? 0 : 2) +
           (&context.flight_ == own ? 1 : 0);
  };
  Context* found = nullptr;
  bool heavy_left = false;
  uint32_t left_to_callers = own == nullptr ? callers_idle_ : 0;
  for (Context* context : active_) {
    if (context->running_ || !context->ready()) continue;
    if (left_to_callers > 0) {
      --left_to_callers;
      continue;
    }
    Context* left = context;
    if (found == nullptr || rank(*context) > rank(*found)) std::swap(left, found);
    heavy_left |= left != nullptr && left->local_.heavy;
  }
  if (heavy_left && awake_ < share_) call_engine();
  return found;
}

void Station::advance(Lock& lock, Context& context) {
  const std::shared_ptr<Flight> flight = context.flight_.shared_from_this();
  context.running_ = true;
  lock.unlock();
  const Context::Stop stop = context.run();
  Ended ended;
  lock = enter();
  context.running_ = false;
  if (stopping_) return;
  if (stop == Context::Stop::ended || stop == Context::Stop::poisoned) finish(context, ended);
  if (ended.empty()) return;
  lock.unlock();
  ended.clear();
  lock.lock();
}

// Sleeps on the local ranks' wakeup unless there is something to do.
void Station::watch(Lock& lock, const Flight* own, int64_t wait_ns) {
  const Launch& launch = (own != nullptr ? *own : active_.front()->flight_).launch;
  const bool mixed = std::any_of(active_.begin(), active_.end(), [&](const Context* context) {
    return context->flight_.launch.wakeups != launch.wakeups;
  });
  if (mixed) wait_ns = std::min(wait_ns, kMixedNs);  // one futex cannot tell of all
  std::shared_ptr<void> owner = launch.owner;        // the wakeup outlives its flight
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
void Station::rest(Lock& lock, Engine& engine) {
  const int64_t looked_ns = now_ns();
  const bool alone = awake_ == 1 && looked_ns - seen_ns_ >= standby_ns_;
  if (alone && watched_ == nullptr && !standby_ && waiting()) {
    return watch(lock, nullptr, kWatchNs);
  }
  --awake_;
  if (standby_ || looked_ns - seen_ns_ >= kStandbyLooks * standby_ns_) {
    engine.state = Engine::State::asleep;
    engine.call.wait(lock, [&] { return engine.state == Engine::State::awake || stopping_; });
    return;
  }
  standby_ = true;
  engine.state = Engine::State::standby;
  engine.call.wait_for(lock, std::chrono::nanoseconds(standby_ns_));
  if (engine.state == Engine::State::awake) return;  // called
  // A timer and a switch on a caller's core cost more than a small copy: few where callers attend.
  if (callers_ > 0 || seen_ns_ > looked_ns) {
    standby_ns_ = std::min(2 * standby_ns_, kStandbyMaxNs);
  } else if (!active_.empty()) {
    standby_ns_ = kStandbyNs;
  }
  standby_ = false;
  engine.state = Engine::State::awake;
  ++awake_;
}

void Station::serve(uint32_t index) {
  Lock lock(mutex_);
  while (!stopping_) {
    if (Context* context = awake_ > share_ ? nullptr : pick(nullptr)) {
      advance(lock, *context);
    } else {
      rest(lock, engines_[index]);
    }
  }
}

// A caller sleeps while somebody else watches.
void Station::doze(Lock& lock, int64_t wait_ns) {
  --awake_;
  ++callers_asleep_;
  dozers_.wait_for(lock, std::chrono::nanoseconds(wait_ns));
  --callers_asleep_;
  ++awake_;
}

// A caller's. Some machines take longer to wake a thread than it spins before: ranks that sleep
// since their peers were woken late would go on so for good.
void Station::sleep(Lock& lock, Flight& own, const Deadline& deadline) {
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

void Station::help(Lock& lock, Flight& own, const Deadline& deadline) {
  int64_t idle_since_ns = -1;
  while (!own.done && !stopping_ && !deadline.passed()) {
    if (Context* context = pick(&own)) {
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

void Station::wait(Flight& flight, const Deadline& deadline) {
  if (!flight.ended()) {
    Lock lock = enter();
    ++awake_;
    ++callers_;
    ++callers_idle_;
    help(lock, flight, deadline);
    --callers_idle_;
    --callers_;
    --awake_;
    seen_ns_ = now_ns();
    if (!stopping_) leave();
  }
  const std::string& op = flight.cargo->program->op;
  if (flight.ended()) {
    // Freed by this thread: an engine's might have to wait for an interpreter's lock.
    std::shared_ptr<void> owner;
    const Lock lock = enter();
    owner.swap(flight.launch.owner);
    // `lock` goes before `owner`.
  }
  if (!flight.ended()) {
    if (stopping_) fail(Code::cancelled, op, " did not end before its backend was closed");
    fail(Code::timeout, op, " did not end within ", shown_s(deadline.wait_ns()),
         " s: ", flight.position());
  }
  if (const uint32_t by = flight.poisoned_by.load(std::memory_order_acquire); by != 0) {
    fail(Code::peer, "rank ", by - 1, " died or aborted during ", op, ": ", flight.position());
  }
}

void Station::stop() {
  {
    const Lock lock(mutex_);
    stopping_ = true;
    for (Engine& engine : engines_) engine.call.notify_one();
    dozers_.notify_all();
    if (watched_ != nullptr) wake(*watched_);
  }
  for (Engine& engine : engines_) {
    if (!engine.thread.joinable()) continue;
    if (engine.thread.get_id() == std::this_thread::get_id()) {
      engine.thread.detach();  // an owner that it released has let go of the backend
    } else {
      engine.thread.join();
    }
  }
  std::map<LaneKey, std::deque<std::shared_ptr<Flight>>> lanes;
  const Lock lock(mutex_);
  lanes.swap(lanes_);
  active_.clear();
}

}  // namespace offcore
