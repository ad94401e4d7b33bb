// A call without the interpreter's lock, and how Ctrl-C ends its waits.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include <exception>
#include <optional>

#include "core/base/clock.h"
#include "module.h"

extern "C" int PyGILState_Check();  // in every Python, if not in the headers of its stable ABI

namespace offcore {

// Lets go of the interpreter's lock while it lives. A wait whose deadline comes from within() ends
// as by a timeout once a signal handler raises; what that raised then comes instead of the timeout.
class LockReleased final : Waiter {
 public:
  LockReleased() : thread_(PyEval_SaveThread()) {}
  ~LockReleased() noexcept(false) {
    take_back();
    if (!raised_) return;
    if (std::uncaught_exceptions() == 0) throw nb::python_error(std::move(*raised_));
    raised_->restore();  // base.cpp: no other error takes its place
  }
  LockReleased(const LockReleased&) = delete;
  LockReleased& operator=(const LockReleased&) = delete;

  Deadline within(double timeout_s) {
    heard_ns_ = now_ns();
    return Deadline::after_s(timeout_s, this);
  }

 private:
  // Python runs handlers in its main thread. Others need not ask, and daemons must not: their
  // interpreter may have ended.
  void listen() override {
    const int64_t now = now_ns();
    if (stopped_ || now - heard_ns_ < kListenNs) return;
    heard_ns_ = now;
    if (syscall(SYS_gettid) != getpid()) return;  // gettid() is not in all C libraries
    take_back();
    if (PyErr_CheckSignals() != 0) {
      raised_.emplace();
      stopped_ = true;
    }
    thread_ = PyEval_SaveThread();
  }

  // Once the interpreter has ended no thread gets its lock. Before 3.14 Python ends it then,
  // by unwinding through C++, which would abort: so it stays here until the process ends.
  void take_back() noexcept {
    try {
      PyEval_RestoreThread(thread_);
    } catch (...) {
      for (;;) pause();
    }
  }

  PyThreadState* thread_;
  int64_t heard_ns_ = 0;
  std::optional<nb::python_error> raised_;
};

using Unlocked = nb::call_guard<LockReleased>;

// Other threads go on while a destructor waits (core/base/fork.h). It may be called by any thread,
// of Python or not, and once the interpreter ends its lock is kept.
inline void end_unlocked(void (*destroy)(void*), void* object) {
  if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) return destroy(object);
  const LockReleased released;
  destroy(object);
}

}  // namespace offcore
