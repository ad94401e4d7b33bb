// Drives the launches of a backend: whoever waits looks at every queue whose turn it is, and where
// nobody waits one thread does.
//
// A lane's launches take their turns at each rank. They look without a pause while something
// moves, every kPauseNs otherwise, and sleeps while nothing is under way. A launch whose rank is
// poisoned has its engines' polls released, and ends once the engines have gone through.
#pragma once
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/backend/sdma/submission.h"

namespace offcore::sdma {

class SdmaExecutor : public std::enable_shared_from_this<SdmaExecutor> {
 public:
  explicit SdmaExecutor(std::unique_ptr<SubmitPath> path) : path_(std::move(path)) {}

  SubmitPath& path();                     // throws cancelled after stop()
  std::mutex& mutex() { return mutex_; }  // guards the path's rings and batches
  // Throws cancelled after stop().
  void enqueue(std::shared_ptr<SdmaSubmission> submission);
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
    std::vector<std::shared_ptr<SdmaSubmission>> submissions;
    std::shared_ptr<SdmaSubmission> before;
    uint64_t number = 0;  // given when taken back
  };
  void take_back(Revoked doomed);

  // Throws timeout, peer, driver, or cancelled after stop().
  void wait(SdmaSubmission& submission, const Deadline& deadline);
  // Ends all launches, or gives up on engines that do not come to an end.
  void stop();

 private:
  using ExecutorLock = std::unique_lock<std::mutex>;
  using LaneQueueKey = std::pair<uint32_t, Rank>;  // lane, rank
  static constexpr uint32_t kOwnRings = 1u << 31;  // other groups are lanes

  void serve();
  bool sweep();
  void drop_doomed();
  bool behind_doomed(const SdmaSubmission& submission) const;
  void look(SdmaSubmission& submission, Rank rank, bool& moved);
  bool poisoned(SdmaSubmission& submission) const;
  void finish(const std::shared_ptr<SdmaSubmission>& submission);

  std::unique_ptr<SubmitPath> path_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable ended_;
  std::map<LaneQueueKey, std::deque<std::shared_ptr<SdmaSubmission>>> lanes_;
  std::vector<std::shared_ptr<SdmaSubmission>> finished_;  // freed outside of the mutex
  uint32_t under_way_ = 0;
  uint32_t callers_ = 0;  // who wait
  std::vector<Revoked> doomed_;
  uint64_t taken_back_ = 0;             // so far
  std::map<Rank, uint32_t> own_rings_;  // how many, by rank
  uint32_t ring_groups_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace offcore::sdma
