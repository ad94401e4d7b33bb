#include "core/backend/host/host.h"

#include <algorithm>

#include "core/backend/host/request_engine.h"
#include "core/backend/host/scheduler.h"
#include "core/backend/host/submission.h"
#include "core/backend/shared_memory.h"

namespace offcore::host {
namespace {

// A queue that copies more is worth waking a thread for; less is done sooner by whoever is awake,
// whose core's cache holds it.
constexpr uint64_t kHeavyBytes = 768 << 10;

class HostLoaded final : public exec::LoadedProgram {
 public:
  using LoadedProgram::LoadedProgram;

 private:
  // The engine queues of an armed program do nothing before the caller's start word, so they are
  // built ahead, and looked at from the launch on.
  std::shared_ptr<exec::Submission> build(const Launch& launch) override {
    return std::make_shared<HostSubmission>(std::static_pointer_cast<const HostProgram>(compiled_),
                                            launch);
  }
};

// Which threads the queues need.
void place_queues(HostProgram& compiled, uint32_t engines_rank) {
  for (uint32_t part = 0; part < compiled.locals.size(); ++part) {
    for (uint32_t index : compiled.locals[part].queues) {
      const Queue& queue = compiled.program->queues[index];
      uint64_t bytes = 0;
      for (const Command& command : queue.commands) {
        if (touches_data(command.op)) bytes += command.bytes * command.rows;
      }
      const uint32_t engine = queue.index == kCallerQueue ? 0 : queue.index % engines_rank;
      compiled.local_queues.push_back({.queue = index,
                                       .part = part,
                                       .engine = part * engines_rank + engine,
                                       .moves = bytes > 0,
                                       .heavy = bytes > kHeavyBytes});
    }
  }
}

class HostBackend final : public Backend, private RequestEngines {
 public:
  HostBackend(const Machine& machine, Rank ranks, std::vector<Rank> local_ranks)
      : machine_(machine),
        ranks_(ranks),
        scheduler_(std::make_shared<Scheduler>(machine, ranks, std::move(local_ranks))) {}
  ~HostBackend() override { scheduler_->close(); }

  const Machine& machine() const override { return machine_; }
  Share allocate(Rank rank, uint64_t bytes) override { return allocate_shared(rank, bytes); }
  Share import(Rank rank, uint64_t bytes, int fd) override {
    return import_shared(rank, bytes, fd);
  }
  std::unique_ptr<Loaded> load(std::shared_ptr<const Program> program) override {
    auto compiled =
        std::make_shared<HostProgram>(std::move(program), ranks_, scheduler_->local_ranks());
    place_queues(*compiled, machine_.engines_peer);
    scheduler_->prepare(*compiled);
    return std::make_unique<HostLoaded>(scheduler_, std::move(compiled));
  }
  int64_t now_ns() const override { return offcore::now_ns(); }
  Capabilities capabilities() override { return {.request_engines = this}; }

 private:
  std::unique_ptr<RequestEngine> open_requests(Rank) override {
    return std::make_unique<HostRequestEngine>();
  }

  Machine machine_;
  Rank ranks_;
  std::shared_ptr<Scheduler> scheduler_;
};

}  // namespace

std::unique_ptr<Backend> make_host(const Machine& machine, Rank ranks,
                                   std::vector<Rank> local_ranks) {
  local_ranks = exec::sorted_ranks(std::move(local_ranks), ranks);
  check(machine);
  return std::make_unique<HostBackend>(machine, ranks, std::move(local_ranks));
}

}  // namespace offcore::host
