// Threads of the library's own.
#pragma once
#include <sched.h>
#include <signal.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "core/base/clock.h"

namespace offcore {

// The cores that threads of this process may run on, or as many as OFFCORE_HOST_CORES says. Throws
// invalid where that is no number.
uint32_t usable_cores();

// Between two looks at what others do, after waiting so long for it: yields for the first part of
// the wait, then sleeps, and in the end for longer.
void nap(int64_t waited_ns, int64_t spin_ns = 200'000);

// Looks for so long whether it is ready, and yields the core in between: what mostly comes sooner
// than a thread that sleeps is woken. False: it was not.
template <typename Ready>
bool spin_until(const Ready& ready, int64_t look_ns) {
  const int64_t began_ns = now_ns();
  while (!ready()) {
    if (now_ns() - began_ns >= look_ns) return false;
    sched_yield();
  }
  return true;
}

// Sleeps until told that something has changed, or for a nap of the deadline's.
inline void sleep(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                  const Deadline& deadline) {
  changed.wait_for(lock, std::chrono::nanoseconds(deadline.nap_ns()));
  lock.unlock();
  deadline.listen();
  lock.lock();
}

// Sleeps until it is ready, of which `changed` tells. False: the deadline has passed before.
template <typename Ready>
bool sleep_until(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                 const Deadline& deadline, const Ready& ready) {
  while (!ready()) {
    if (deadline.passed()) return false;
    sleep(changed, lock, deadline);
  }
  return true;
}

// Signals of the process are for its own threads (Ctrl-C for Python's main thread): threads that
// are started while this lives get none.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace offcore
