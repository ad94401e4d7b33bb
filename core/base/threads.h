// Threads of the library's own, and what has them.
#pragma once
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <utility>

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
bool look_out(const Ready& ready, int64_t look_ns) {
  const int64_t began_ns = now_ns();
  while (!ready()) {
    if (now_ns() - began_ns >= look_ns) return false;
    sched_yield();
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

// Owns what has threads and locks of its own. Neither survives a fork: a child never destroys it.
template <typename Type>
std::shared_ptr<Type> owned_by_process(std::unique_ptr<Type> object) {
  return {object.release(), [process = getpid()](Type* owned) {
            if (process == getpid()) delete owned;
          }};
}

}  // namespace offcore
