#include "core/mcast/operation.h"

#include <algorithm>

#include "core/base/threads.h"

namespace offcore::mcast {
namespace {

constexpr int64_t kLookNs = 50'000;  // of a caller, who would take long to wake

}  // namespace

bool Operation::ended_by(const Deadline& deadline) const {
  if (look_out([&] { return ended(); }, std::min(kLookNs, deadline.left_ns()))) return true;
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
