// Time: a monotonic clock in nanoseconds, and the deadline that every wait carries.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>

#include "core/base/error.h"

namespace offcore {

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Between two looks of a thread that spins.
inline void pause_briefly(uint32_t times = 1) {
  for (uint32_t i = 0; i < times; ++i) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
}

// A wait in seconds as messages show it: in hundredths, rounded up, so that none is 0.
inline double shown_s(int64_t wait_ns) {
  return static_cast<double>((wait_ns + 9'999'999) / 10'000'000) / 100;
}

// Who waits, and may be told to stop before the deadline: Python's main thread, by Ctrl-C.
class Waiter {
 public:
  // Looks whether it has been told. On the waiting thread, with no mutex held: signal handlers run.
  virtual void listen() = 0;
  bool stopped() const { return stopped_; }

 protected:
  ~Waiter() = default;
  bool stopped_ = false;  // for the waiter it is as if its deadlines had passed
};

// How often a wait looks whether it is to stop.
inline constexpr int64_t kListenNs = 50'000'000;

// Ends a wait. Whoever sleeps until one sleeps for nap_ns() at most and then calls listen().
class Deadline {
 public:
  static Deadline after_ns(int64_t wait_ns, Waiter* waiter = nullptr) {
    const int64_t now = now_ns();
    return Deadline(wait_ns >= INT64_MAX - now ? INT64_MAX : now + wait_ns, wait_ns, waiter);
  }
  static Deadline never() { return after_ns(INT64_MAX); }
  // Throws invalid for what is no time to wait: less than none, or NaN.
  static Deadline after_s(double wait_s, Waiter* waiter = nullptr) {
    if (!(wait_s >= 0)) {
      fail(Code::invalid, "a timeout of ", wait_s, " s: it must be 0 s or more");
    }
    return after_ns(wait_s >= 9e9 ? INT64_MAX : static_cast<int64_t>(wait_s * 1e9), waiter);
  }
  // An earlier end for a part of the same wait: messages still tell the whole wait.
  Deadline slice(int64_t part_ns) const {
    return Deadline(std::min(at_ns_, after_ns(part_ns).at_ns_), wait_ns_, waiter_);
  }
  bool passed() const { return stopped() || now_ns() >= at_ns_; }
  int64_t left_ns() const {
    const int64_t left = stopped() ? 0 : at_ns_ - now_ns();
    return left > 0 ? left : 0;
  }
  int64_t nap_ns() const { return std::min(left_ns(), kListenNs); }
  void listen() const {
    if (waiter_ != nullptr) waiter_->listen();
  }
  bool stopped() const { return waiter_ != nullptr && waiter_->stopped(); }
  int64_t wait_ns() const { return wait_ns_; }  // the whole wait, from its beginning

 private:
  Deadline(int64_t at_ns, int64_t wait_ns, Waiter* waiter)
      : at_ns_(at_ns), wait_ns_(wait_ns), waiter_(waiter) {}
  int64_t at_ns_;
  int64_t wait_ns_;
  Waiter* waiter_;
};

}  // namespace offcore
