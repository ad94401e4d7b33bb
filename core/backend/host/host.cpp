#include "core/backend/host/host.h"

#include <algorithm>
#include <deque>
#include <mutex>

#include "core/backend/host/scheduler.h"
#include "core/backend/host/submission.h"
#include "core/backend/shared_memory.h"
#include "core/backend/submission_run.h"
#include "core/base/error.h"

namespace offcore::host {
namespace {

// A queue that copies more is worth waking a thread for; less is done sooner by whoever is awake,
// whose core's cache holds it.
constexpr uint64_t kHeavyBytes = 768 << 10;

class HostLoaded final : public Loaded {
 public:
  HostLoaded(std::shared_ptr<Scheduler> scheduler, std::shared_ptr<const HostProgram> compiled)
      : scheduler_(std::move(scheduler)), compiled_(std::move(compiled)) {}

  // The engine queues of an armed program do nothing before the caller's start word, so they are
  // built here, and looked at from the launch on.
  bool arm(const Launch& launch) override {
    if (compiled_->program->mode != Mode::armed) {
      fail(Code::invalid, "only a program of mode armed can be armed, not one of mode ",
           to_string(compiled_->program->mode));
    }
    std::shared_ptr<HostSubmission> submission = build(launch);
    const std::lock_guard lock(mutex_);
    armed_.push_back(std::move(submission));
    return true;
  }

  std::unique_ptr<Run> launch(const Launch& launch) override {
    const int64_t launch_ns = now_ns();
    std::shared_ptr<HostSubmission> submission = take_armed(launch);
    if (submission == nullptr) submission = build(launch);
    submission->launch_ns = launch_ns;
    submission->control_ns = now_ns() - launch_ns;
    scheduler_->enqueue(submission);
    return std::make_unique<SubmissionRun<Scheduler, HostSubmission>>(scheduler_,
                                                                      std::move(submission));
  }

 private:
  std::shared_ptr<HostSubmission> take_armed(const Launch& launch) {
    const std::lock_guard lock(mutex_);
    if (armed_.empty()) return nullptr;
    const Launch& armed = armed_.front()->launch;
    if (armed.epoch != launch.epoch || armed.lane != launch.lane) {
      fail(Code::invalid, "armed for epoch ", armed.epoch, " of lane ", armed.lane,
           " but launched with epoch ", launch.epoch, " of lane ", launch.lane);
    }
    std::shared_ptr<HostSubmission> submission = std::move(armed_.front());
    armed_.pop_front();
    // Nobody has looked at it yet: with other buffers it is built again.
    return submission->launch.binding == launch.binding ? submission : nullptr;
  }

  std::shared_ptr<HostSubmission> build(const Launch& launch) const {
    const Program& program = *compiled_->program;
    if (launch.binding.ranks() != program.ranks || launch.wakeups.size() != program.ranks ||
        launch.binding.buffers() != program.buffers.size()) {
      fail(Code::invalid, program.op, " needs bases of ", program.buffers.size(), " buffers at ",
           program.ranks, " ranks, and a wakeup for each rank");
    }
    if (std::find(launch.wakeups.begin(), launch.wakeups.end(), nullptr) != launch.wakeups.end()) {
      fail(Code::invalid, program.op, " was launched without every rank's wakeup");
    }
    for (const auto& [buffer, rank] : compiled_->bases) {
      if (launch.binding.base(buffer, rank) != nullptr) continue;
      fail(Code::invalid, "buffer ", program.buffers[buffer].name, " of ",
           rank == kHostRank ? "the host" : cat("rank ", rank),
           " is not mapped here; the host backend moves real bytes only");
    }
    return std::make_shared<HostSubmission>(compiled_, launch);
  }

  std::shared_ptr<Scheduler> scheduler_;
  std::shared_ptr<const HostProgram> compiled_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<HostSubmission>> armed_;
};

std::shared_ptr<const HostProgram> make_cargo(std::shared_ptr<const Program> program,
                                              const std::vector<Rank>& local_ranks,
                                              uint32_t engines_rank) {
  HostProgram compiled;
  for (uint32_t index = 0; index < program->queues.size(); ++index) {
    const Queue& queue = program->queues[index];
    const auto local = std::lower_bound(local_ranks.begin(), local_ranks.end(), queue.rank);
    if (local == local_ranks.end() || *local != queue.rank) continue;
    uint64_t bytes = 0;
    for (const Command& command : queue.commands) {
      if (command.op == Op::timestamp) {
        compiled.timestamps = std::max(compiled.timestamps, command.value + 1u);
      }
      collect_bases(*program, command, compiled.bases);
      if (moves_data(command.op)) bytes += command.bytes * command.rows;
    }
    const auto part = static_cast<uint32_t>(local - local_ranks.begin());
    const uint32_t engine = queue.index == kCallerQueue ? 0 : queue.index % engines_rank;
    compiled.queues.push_back({.queue = index,
                               .part = part,
                               .engine = part * engines_rank + engine,
                               .moves = bytes > 0,
                               .heavy = bytes > kHeavyBytes});
  }
  compiled.program = std::move(program);
  compiled.local_ranks = local_ranks;
  return std::make_shared<const HostProgram>(std::move(compiled));
}

class HostBackend final : public Backend {
 public:
  HostBackend(const Machine& machine, Rank ranks, std::vector<Rank> local_ranks)
      : machine_(machine),
        ranks_(ranks),
        scheduler_(std::make_shared<Scheduler>(machine, ranks, std::move(local_ranks))) {}
  ~HostBackend() override { scheduler_->stop(); }

  const Machine& machine() const override { return machine_; }
  Share allocate(Rank rank, uint64_t bytes) override { return allocate_shared(rank, bytes); }
  Share import(Rank rank, uint64_t bytes, int fd) override {
    return import_shared(rank, bytes, fd);
  }
  std::unique_ptr<Loaded> load(std::shared_ptr<const Program> program) override {
    if (program->ranks != ranks_) {
      fail(Code::invalid, "a program for ", program->ranks, " ranks cannot run on a backend of ",
           ranks_);
    }
    std::shared_ptr<const HostProgram> compiled =
        make_cargo(std::move(program), scheduler_->local_ranks(), machine_.engines_peer);
    scheduler_->prepare(*compiled);
    return std::make_unique<HostLoaded>(scheduler_, std::move(compiled));
  }
  int64_t now_ns() const override { return offcore::now_ns(); }

 private:
  Machine machine_;
  Rank ranks_;
  std::shared_ptr<Scheduler> scheduler_;
};

}  // namespace

std::unique_ptr<Backend> make_host(const Machine& machine, Rank ranks,
                                   std::vector<Rank> local_ranks) {
  std::sort(local_ranks.begin(), local_ranks.end());
  const bool twice =
      std::adjacent_find(local_ranks.begin(), local_ranks.end()) != local_ranks.end();
  if (local_ranks.empty() || twice || local_ranks.back() >= ranks) {
    fail(Code::invalid, "local_ranks must be distinct and not empty, each below world_size ",
         ranks);
  }
  check(machine);
  return std::make_unique<HostBackend>(machine, ranks, std::move(local_ranks));
}

}  // namespace offcore::host
