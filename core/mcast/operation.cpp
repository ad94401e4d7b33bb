#include "core/mcast/operation.h"

#include <algorithm>

#include "core/base/threads.h"

namespace offcore::mcast {
namespace {

constexpr int64_t kLookNs = 50'000;  // of a caller, who would take long to wake

}  // namespace

OperationReport Operation::wait(const Deadline& deadline) const {
  spin_until([&] { return ended(); }, std::min(kLookNs, deadline.left_ns()));
  std::unique_lock lock(mutex_);
  if (!sleep_until(ended_, lock, deadline, [&] { return ended(); })) {
    fail(Code::timeout, "the operation has not ended within ", shown_s(deadline.wait_ns()),
         " s; it goes on: wait again, or close the communicator");
  }
  if (error_) throw Error(*error_);
  return report_;
}

void Operation::end(std::optional<Error> error, const OperationReport& report) {
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
