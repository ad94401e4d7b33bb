// A launch under way, whatever runs it: its program as this process's ranks see it, the record of
// its times and its end, who has poisoned it, and the text of where its queues stand.
//
// A submission ends part by part, each local rank's queues being a part unless the backend has one
// for all. `done` is set once, last of all; then its owner may be freed, and its wakeups with that.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/backend/backend.h"

namespace offcore::exec {

// What ended while a mutex was held; freed after it is released, for owners run foreign code.
using Freed = std::vector<std::shared_ptr<void>>;

// Throws invalid where they are no ranks of so many, or none.
std::vector<Rank> sorted_ranks(std::vector<Rank> local_ranks, Rank ranks);

// The queues of one local rank, as indices into program.queues, and its caller's commands.
struct RankQueues {
  Rank rank = 0;
  std::vector<uint32_t> queues;  // all of them, the caller's last
  std::vector<uint32_t> engines;
  std::span<const Command> caller;
};

// A program as the local ranks run it.
struct CompiledProgram {
  // Throws invalid for a program of other than `ranks` ranks, and for commands that name what it
  // does not have; unsupported for pages that cores are to copy but where they `pack`, and for
  // others but where `engines` of a driver's do.
  CompiledProgram(std::shared_ptr<const Program> program_, Rank ranks,
                  std::span<const Rank> local_ranks, bool pack = false, bool engines = false);
  void check(const Launch& launch) const;  // throws invalid where something is not bound

  std::shared_ptr<const Program> program;
  std::vector<RankQueues> locals;  // as local_ranks
  Bases bases;                     // what their queues address
  uint32_t timestamps = 0;
  bool swaps = false;
  bool reduces;      // it names a reduction, also where no local rank has anything to reduce
  bool interleaved;  // its queues' commands are enqueued in their serial order
};

// "queue 0.1 at command 2 (poll flag[0]:3 >= 1); ...", of the queues that are not beyond their last
// command: `reached` says, by queue, which one they are at. Empty: there are none.
std::string print_position(const Program& program, std::span<const size_t> reached);

class Submission : public std::enable_shared_from_this<Submission> {
 public:
  // `parts`: what ends by itself.
  Submission(std::shared_ptr<const CompiledProgram> compiled, const Launch& launch_, size_t parts);
  virtual ~Submission() = default;

  bool ended() const { return done_.load(std::memory_order_acquire); }
  virtual bool poll() { return ended(); }  // looks first, where nobody else does
  virtual bool part_ended(uint32_t part) = 0;
  void end();

  // rank + 1 of who poisoned a local rank before the end; 0: nobody.
  uint32_t poisoned();
  void poison(Rank by);
  bool polled(const Command& poll) const;  // whether its words are there, as this process sees them
  std::string position() const;            // of its queues; empty: all have ended
  // What there is to say of a launch that has not ended although all queues have.
  virtual std::string_view no_position() const { return "all queues ended"; }
  virtual Report report() const;  // once ended
  void let_go(Freed& freed);      // of what it kept: once ended
  std::atomic_ref<uint32_t> word(const Slice& slice) const;

  std::shared_ptr<const Program> program;  // as it is laid out for this launch
  Launch launch;
  int64_t launch_ns = 0;
  int64_t control_ns = 0;
  int64_t end_ns = 0;
  std::vector<int64_t> timestamps_ns;
  std::vector<std::shared_ptr<void>> kept;  // beside the launch's owner
  std::atomic<uint32_t> dead{0};            // rank + 1 of who poisoned it, once that was seen
  std::optional<Error> error;               // what it failed with
  uint32_t parts_left;

 protected:
  // The command that a local queue is at; beyond the last one where it has ended.
  virtual size_t reached(uint32_t queue) const = 0;
  virtual uint32_t read_word(const Slice& place) const {
    return word(place).load(std::memory_order_acquire);
  }

  std::mutex mutex_;  // of the end, where others look at what the owner keeps

 private:
  const std::shared_ptr<const CompiledProgram> compiled_;
  std::atomic<bool> done_{false};
};

}  // namespace offcore::exec
