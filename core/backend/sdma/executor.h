// Drives the launches of a backend: tasks that are swept, and the rings of prelaunched programs.
//
// What was armed and is taken back ends with its rings: later launches of its lane are held back
// until those are dropped.
#pragma once
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/backend/sdma/submission.h"

namespace offcore::sdma {

class SdmaExecutor final : public exec::TaskExecutor {
 public:
  explicit SdmaExecutor(std::unique_ptr<SubmitPath> path)
      : TaskExecutor("sdma"), path_(std::move(path)) {}

  SubmitPath& path();                     // throws cancelled after close()
  std::mutex& mutex() { return mutex_; }  // guards the path's rings and batches
  void submit(const std::shared_ptr<exec::Submission>& submission, exec::Freed& freed) override;
  void close() override;
  // Rings of a prelaunched program's own: others of its lane would wait behind its first poll. A
  // GPU has few: 0 where they do not suffice for these queues (each a rank and an index).
  using Queues = std::vector<std::pair<Rank, uint16_t>>;
  uint32_t take_rings(const Queues& queues);
  // Sends an armed submission's packets to its own rings, ahead of its turn, unless those of the
  // one before are not all there yet.
  void send(SdmaSubmission& submission, const SdmaSubmission* before);
  // Ends such rings, with the armed submissions in them, once `before` has ended. The first poll of
  // what is armed has not passed, so nothing of it has run; and nothing will: whatever is enqueued
  // in the lane from now on, and might signal what that poll waits for, begins afterwards.
  struct Revoked {
    uint32_t group = 0;
    Queues queues;
    std::vector<std::shared_ptr<exec::Submission>> submissions;
    std::shared_ptr<exec::Submission> before;
    uint64_t number = 0;  // given when taken back
  };
  void take_back(Revoked doomed);

 private:
  static constexpr uint32_t kOwnRings = 1u << 31;  // other groups are lanes

  bool held_back(const exec::Submission& submission) const override;
  void swept(exec::Freed& freed) override;
  void finish(exec::Submission& submission, exec::Freed& freed) override;
  std::string failure() const override { return path_->failure(); }

  std::unique_ptr<SubmitPath> path_;
  std::vector<Revoked> doomed_;
  uint64_t taken_back_ = 0;             // so far
  std::map<Rank, uint32_t> own_rings_;  // how many, by rank
  uint32_t ring_groups_ = 0;
};

}  // namespace offcore::sdma
