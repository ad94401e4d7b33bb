// What drives the launches of a backend: their order, the wait for one, and its verdict.
//
// A lane's launches take their turns, part by part: what is in front of its lane runs, and what
// has ended there makes way. One mutex guards the lanes. How a launch gets on and who looks at it
// is the backend's: by tasks that are swept (task_executor.h), by threads that share queues (host),
// or by streams that go on by themselves (cuda).
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "core/backend/exec/submission.h"

namespace offcore::exec {

class Executor : public std::enable_shared_from_this<Executor> {
 public:
  explicit Executor(std::string_view backend) : backend_(backend) {}
  virtual ~Executor() = default;

  // Begins it, or enqueues it in its lane. Throws cancelled after close().
  virtual void submit(const std::shared_ptr<Submission>& submission, Freed& freed) = 0;
  // Until it has ended. Throws timeout, peer, driver, or cancelled after close().
  void wait(Submission& submission, const Deadline& deadline);
  // Ends what is under way, or sees to it that nothing of it goes on.
  virtual void close() = 0;

 protected:
  using ExecutorLock = std::unique_lock<std::mutex>;
  using LaneKey = std::pair<uint32_t, uint32_t>;  // lane, part
  using LaneSubmissions = std::deque<std::shared_ptr<Submission>>;

  ExecutorLock enter();
  void check_open() const;  // throws cancelled after close()
  // Enqueues its parts in their lanes; whether it is the turn of some.
  bool enqueue(const std::shared_ptr<Submission>& submission, Freed& freed);
  // Takes the parts that have ended from the front of a lane; whether there were any.
  bool settle(const LaneKey& key, LaneSubmissions& lane, Freed& freed);
  virtual void begin(Submission&, uint32_t) {}  // it is the part's turn
  virtual void finish(Submission& submission, Freed&) { submission.end(); }  // all parts have ended
  // It has ended, and was waited for.
  virtual void retire(Submission& submission, Freed& freed) { submission.let_go(freed); }
  // Waits until it has ended, nothing goes on any more, or the deadline has passed.
  virtual void attend(Submission& submission, const Deadline& deadline) = 0;
  virtual std::string failure() const { return {}; }  // of the engines, for good; empty: none

  std::mutex mutex_;
  std::map<LaneKey, LaneSubmissions> lanes_;  // one that was used once stays
  std::atomic<bool> closed_{false};

 private:
  const std::string_view backend_;
};

// A launch as its caller sees it. Dropping it leaves the submission to go on by itself.
class SubmissionRun : public Run {
 public:
  SubmissionRun(std::shared_ptr<Executor> executor, std::shared_ptr<Submission> submission)
      : executor_(std::move(executor)), submission_(std::move(submission)) {}

  bool done() override { return submission_->poll(); }
  void wait(const Deadline& deadline) override { executor_->wait(*submission_, deadline); }
  Report report() const override;

 protected:
  const std::shared_ptr<Executor> executor_;
  const std::shared_ptr<Submission> submission_;
};

// A program made ready, and what of it is armed: submissions that lie with the engines, or ready
// for them, until their launch.
class LoadedProgram : public Loaded {
 public:
  LoadedProgram(std::shared_ptr<Executor> executor, std::shared_ptr<const CompiledProgram> compiled)
      : executor_(std::move(executor)), compiled_(std::move(compiled)) {}

  bool arm(const Launch& launch) final;
  std::unique_ptr<Run> launch(const Launch& launch) override;

 protected:
  std::shared_ptr<Submission> submit(const Launch& launch);
  void refuse_unfit(const Launch& launch) const;  // throws Refused for what check() finds
  virtual void check(const Launch& launch) const { compiled_->check(launch); }
  // What the backend makes of a launch.
  virtual std::shared_ptr<Submission> build(const Launch& launch) = 0;
  // The same ahead of its launch. Null: the engines cannot hold it.
  virtual std::shared_ptr<Submission> build_ahead(const Launch& launch) { return build(launch); }
  // What is armed is not launched: it was for other memory.
  virtual void recall() {}

  const std::shared_ptr<Executor> executor_;
  const std::shared_ptr<const CompiledProgram> compiled_;
  std::deque<std::shared_ptr<Submission>> armed_;  // in order
  std::weak_ptr<Submission> last_;                 // launched, of what was armed

 private:
  std::shared_ptr<Submission> take_armed(const Launch& launch, Freed& freed);

  std::mutex mutex_;  // of all that is armed, and of building
};

}  // namespace offcore::exec
