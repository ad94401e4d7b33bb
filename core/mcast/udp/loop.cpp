#include "core/mcast/udp/loop.h"

#include <sched.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <ctime>
#include <exception>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/threads.h"

namespace offcore::mcast {
namespace {

constexpr int64_t kSleepMaxNs = 1'000'000'000;
constexpr size_t kEventsMax = 64;
constexpr uint64_t kBell = UINT64_MAX;

// To the nanosecond where the kernel can and may (sandboxes refuse calls that they do not know);
// else to the millisecond after.
int wait_events(int epoll, epoll_event* events, int count, int64_t wait_ns) {
#ifdef SYS_epoll_pwait2
  static std::atomic<bool> fine{true};
  if (fine) {
    const timespec wait{.tv_sec = wait_ns / 1'000'000'000, .tv_nsec = wait_ns % 1'000'000'000};
    const long ready = syscall(SYS_epoll_pwait2, epoll, events, count, &wait, nullptr, 0);
    if (ready >= 0 || errno == EINTR) return static_cast<int>(ready);
    fine = false;
  }
#endif
  return epoll_wait(epoll, events, count, static_cast<int>((wait_ns + 999'999) / 1'000'000));
}

}  // namespace

Loop::Loop(int64_t spin_ns)
    : spin_ns_(spin_ns),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kBell}};
  if (!epoll_ || !bell_ || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, bell_.get(), &event) != 0) {
    fail_errno(Code::driver, "cannot open an epoll descriptor");
  }
  const SignalsBlocked blocked;
  thread_ = std::thread([this] { run(); });
}

Loop::~Loop() {
  ending_ = true;
  notify();
  thread_.join();
}

void Loop::notify() {
  news_ = true;
  if (!asleep_.exchange(false)) return;
  const uint64_t one = 1;
  // It can only fail where the bell rings already.
  [[maybe_unused]] const ssize_t written = write(bell_.get(), &one, sizeof(one));
}

void Loop::post(Call call) {
  {
    const std::scoped_lock lock(mutex_);
    posted_.push_back(std::move(call));
  }
  notify();
}

void Loop::call(const Call& call) {
  if (here()) return call();
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::exception_ptr failure;
  post([&] {
    try {
      call();
    } catch (...) {
      failure = std::current_exception();
    }
    const std::scoped_lock lock(mutex);
    done = true;
    changed.notify_one();
  });
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return done; });
  if (failure) std::rethrow_exception(failure);
}

void Loop::watch(int fd, uint32_t events, Call ready) {
  Watched& watched = watched_[fd];
  watched = {.events = events,
             .id = ++ids_ & 0x7fffffff,
             .ready = std::make_shared<Call>(std::move(ready))};
  epoll_event event{.events = events,
                    .data = {.u64 = watched.id << 32 | static_cast<uint32_t>(fd)}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    watched_.erase(fd);
    fail_errno(Code::driver, "cannot watch a socket");
  }
}

void Loop::rewatch(int fd, uint32_t events) {
  const auto found = watched_.find(fd);
  if (found == watched_.end() || found->second.events == events) return;
  found->second.events = events;
  epoll_event event{.events = events,
                    .data = {.u64 = found->second.id << 32 | static_cast<uint32_t>(fd)}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Loop::unwatch(int fd) {
  if (watched_.erase(fd) != 0) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

void Loop::set_timer(const void* who, int64_t at_ns, Call call) {
  Reminder& reminder = reminders_[who];
  if (reminder.at_ns != at_ns) {
    const auto [first, last] = times_.equal_range(reminder.at_ns);
    const auto old =
        std::find_if(first, last, [&](const auto& entry) { return entry.second == who; });
    if (old != last) times_.erase(old);
    if (at_ns != INT64_MAX) times_.emplace(at_ns, who);
    reminder.at_ns = at_ns;
  }
  reminder.call = std::move(call);
  if (at_ns == INT64_MAX) reminders_.erase(who);
}

void Loop::run() {
  while (true) {
    const bool worked = run_posted();
    if (ending_ && !worked) {
      const std::scoped_lock lock(mutex_);
      if (posted_.empty()) return;
    }
    wait();
    // After the sockets: what has come may make it needless.
    run_reminders();
  }
}

bool Loop::run_posted() {
  news_ = false;
  std::vector<Call> calls;
  {
    const std::scoped_lock lock(mutex_);
    calls.swap(posted_);
  }
  for (const Call& call : calls) call();
  return !calls.empty();
}

// Those that are due now: one that sets itself anew at once must not keep sockets waiting.
void Loop::run_reminders() {
  const int64_t now = now_ns();
  for (size_t left = times_.size(); left > 0 && next_ns() <= now; --left) {
    const auto first = times_.begin();
    const auto found = reminders_.find(first->second);
    const Call call = std::move(found->second.call);
    reminders_.erase(found);
    times_.erase(first);
    call();
  }
}

void Loop::wait() {
  std::array<epoll_event, kEventsMax> events;
  const int64_t began_ns = now_ns();
  int ready = 0;
  while (true) {
    const int64_t now = now_ns();
    const bool spin = now - began_ns < spin_ns_;
    asleep_ = !spin;
    const bool busy = spin || news_ || ending_;
    const int64_t wait_ns = busy ? 0 : std::clamp<int64_t>(next_ns() - now, 0, kSleepMaxNs);
    ready = wait_events(epoll_.get(), events.data(), kEventsMax, wait_ns);
    asleep_ = false;
    if (!spin || ready != 0 || news_ || ending_ || next_ns() <= now) break;
    sched_yield();  // what it waits for may come from who waits for this core
  }
  for (int i = 0; i < ready; ++i) {
    const uint64_t data = events[static_cast<size_t>(i)].data.u64;
    if (data == kBell) {
      uint64_t rings = 0;
      [[maybe_unused]] const ssize_t read_bytes = read(bell_.get(), &rings, sizeof(rings));
      continue;
    }
    const auto found = watched_.find(static_cast<int>(data & UINT32_MAX));
    if (found == watched_.end() || found->second.id != data >> 32) continue;  // gone meanwhile
    const std::shared_ptr<Call> call = found->second.ready;
    (*call)();
  }
}

}  // namespace offcore::mcast
