// A launch under way: its queues as contexts that run, block in a poll, and resume.
//
// A context belongs to the thread that runs it; between runs it belongs to the scheduler's mutex.
// Only `reached()` and the poison may be looked at by others at any time.
#pragma once
#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "core/backend/exec/submission.h"

namespace offcore::host {

struct HostSubmission;

// A queue that runs here.
struct LocalQueue {
  uint32_t queue = 0;   // index into program.queues
  uint32_t part = 0;    // index into the local ranks
  uint32_t engine = 0;  // of the scheduler: a thread to start
  bool moves = false;   // copies or swaps, and does not only signal and poll
  bool heavy = false;   // worth waking an engine's thread for
};

// One queue of one launch.
class QueueState {
 public:
  QueueState(HostSubmission& submission, const LocalQueue& local);

  enum class Stop : uint8_t {
    blocked,   // in a poll
    paused,    // in a copy, for its thread to look around
    ended,     // no command is left
    poisoned,  // its run is dead; it never touches memory again
  };
  Stop run();
  bool ready() const;  // a run would get further

  uint32_t queue() const { return local_.queue; }
  uint32_t reached() const { return command_.load(std::memory_order_relaxed); }
  std::span<const CommandTime> times() const { return times_; }

 private:
  friend class Scheduler;

  bool poisoned() const;
  bool move(const Command& command);
  bool reduce(const Command& command);
  void signal(const Command& command) const;

  HostSubmission& submission_;
  std::span<const Command> commands_;
  LocalQueue local_;
  Rank rank_;
  std::atomic<uint32_t> command_{0};
  uint32_t row_ = 0;                       // of the copy under way
  uint64_t offset_ = 0;                    // in its row
  uint64_t run_bytes_ = 0;                 // moved since the last pause
  int64_t start_ns_ = -1;                  // of the command under way; -1: not begun
  std::vector<const std::byte*> sources_;  // of the reduction under way
  std::vector<CommandTime> times_;
  bool running_ = false;
};

// What a program needs wherever it is launched.
struct HostProgram : exec::CompiledProgram {
  using exec::CompiledProgram::CompiledProgram;
  std::vector<LocalQueue> local_queues;  // by part
};

struct HostSubmission final : exec::Submission {
  HostSubmission(std::shared_ptr<const HostProgram> compiled_, const Launch& launch_);

  bool part_ended(uint32_t part) override { return left[part] == 0; }
  size_t reached(uint32_t queue) const override;
  Report report() const override;

  const HostProgram& compiled;
  std::vector<std::unique_ptr<QueueState>> contexts;
  std::vector<uint32_t> left;  // unfinished contexts of each local rank
};

}  // namespace offcore::host
