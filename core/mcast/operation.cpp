#include "core/mcast/operation.h"

#include <sched.h>

#include <algorithm>

namespace offcore::mcast {
namespace {

constexpr int64_t kLookNs = 50'000;  // of a caller, who would take long to wake

}  // namespace

bool Operation::ended_by(const Deadline& deadline) const {
  const int64_t began_ns = now_ns();
  while (!done_ && now_ns() - began_ns < kLookNs && !deadline.passed()) sched_yield();
  std::unique_lock lock(mutex_);
  // Not wait_until: a deadline that never comes would overflow the clock's type.
  while (!done_ && !deadline.passed()) {
    const int64_t nap_ns = std::min<int64_t>(deadline.left_ns(), 3'600'000'000'000);
    ended_.wait_for(lock, std::chrono::nanoseconds(nap_ns));
  }
  return done_;
}

Report Operation::wait(const Deadline& deadline) const {
  if (!ended_by(deadline)) {
    fail(Code::timeout, "the operation has not ended within ", shown_s(deadline.wait_ns()),
         " s; it goes on: wait again, or close the communicator");
  }
  const std::lock_guard lock(mutex_);
  if (error_) throw Error(*error_);
  return report_;
}

void Operation::end(std::optional<Error> error, const Report& report) {
  {
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    report_ = report;
    request_.keep.reset();
    done_ = true;
  }
  ended_.notify_all();
}

}  // namespace offcore::mcast
