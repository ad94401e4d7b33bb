// A launch under way as its caller sees it, where one object (a scheduler, an executor) drives all
// submissions of a backend. Dropping it leaves the submission to go on by itself.
#pragma once
#include <memory>
#include <utility>

#include "core/backend/backend.h"
#include "core/base/error.h"

namespace offcore {

template <typename Driver, typename Submission>
class SubmissionRun final : public Run {
 public:
  SubmissionRun(std::shared_ptr<Driver> driver, std::shared_ptr<Submission> submission)
      : driver_(std::move(driver)), submission_(std::move(submission)) {}

  bool done() override { return submission_->ended(); }
  void wait(const Deadline& deadline) override { driver_->wait(*submission_, deadline); }
  void enqueue_wait(uintptr_t stream) override {
    if constexpr (requires { driver_->enqueue_wait(*submission_, stream); }) {
      driver_->enqueue_wait(*submission_, stream);
    } else {
      Run::enqueue_wait(stream);
    }
  }
  Report report() const override {
    if (!submission_->ended()) {
      fail(Code::invalid, "a report exists only once the run is done: wait() first");
    }
    return submission_->report();
  }

 private:
  std::shared_ptr<Driver> driver_;
  std::shared_ptr<Submission> submission_;
};

}  // namespace offcore
