#include "core/backend/sim/sim.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/backend/exec/executor.h"
#include "core/backend/sim/simulation.h"
#include "core/base/error.h"

namespace offcore::sim {
namespace {

class SimSubmission final : public exec::Submission {
 public:
  SimSubmission(std::shared_ptr<const exec::CompiledProgram> of, const Launch& launch_)
      : Submission(std::move(of), launch_, 1) {}
  bool part_ended(uint32_t) override { return ended(); }
  Report report() const override { return outcome.report; }

  SimOutcome outcome;

 protected:
  size_t reached(uint32_t) const override { return SIZE_MAX; }  // its error names the queues
};

// The state that a backend shares with its loaded programs.
class SimExecutor final : public exec::Executor {
 public:
  SimExecutor(const Machine& machine, Rank ranks, SimOptions options) : Executor("sim") {
    state_.machine = machine;
    state_.ranks = ranks;
    state_.options = std::move(options);
    if (state_.options.fetch_path) fetch_path_ = state_.options.fetch_path(machine);
  }
  const SimOptions::FetchPath& fetch_path() const { return fetch_path_; }
  const SimState& state() const { return state_; }
  int64_t now_ns() {
    const ExecutorLock lock(mutex_);
    return std::llround(state_.clock_ns);
  }
  void pass(double ns) {
    const ExecutorLock lock(mutex_);
    state_.clock_ns += ns;
  }
  uint64_t draw() {
    const ExecutorLock lock(mutex_);
    return state_.draw();
  }
  void submit(const std::shared_ptr<exec::Submission>& submission, exec::Freed& freed) override {
    auto& own = static_cast<SimSubmission&>(*submission);
    const ExecutorLock lock(mutex_);
    own.outcome = Simulation(state_, *own.program, own.launch).run();
    if (own.outcome.failure) own.error.emplace(*own.outcome.failure, own.outcome.message);
    // A launch in which nothing can happen any more goes on for ever; one of a dead rank has ended.
    if (own.outcome.failure != Code::timeout) own.end();
    own.let_go(freed);
  }
  void close() override {}

 private:
  void attend(exec::Submission&, const Deadline&) override {}

  SimState state_;
  SimOptions::FetchPath fetch_path_;
};

class SimLoaded final : public exec::LoadedProgram {
 public:
  SimLoaded(const std::shared_ptr<SimExecutor>& executor,
            std::shared_ptr<const exec::CompiledProgram> compiled)
      : LoadedProgram(executor, std::move(compiled)) {
    if (executor->fetch_path()) fetched_ = executor->fetch_path()(*compiled_->program);
  }

 private:
  void check(const Launch& launch) const override {  // that phantom memory is not there is fine
    if (launch.binding.ranks() == compiled_->program->ranks) return;
    fail(Code::invalid, "a binding of ", launch.binding.ranks(), " ranks for a program of ",
         compiled_->program->ranks);
  }
  std::shared_ptr<exec::Submission> build(const Launch& launch) override {
    auto submission = std::make_shared<SimSubmission>(compiled_, launch);
    if (fetched_) submission->program = std::make_shared<const Program>(fetched_(launch.epoch));
    return submission;
  }

  SimOptions::Fetched fetched_;
};

class SimBackend : public Backend, public VirtualTime {
 public:
  SimBackend(const Machine& machine, Rank ranks, SimOptions options)
      : executor_(std::make_shared<SimExecutor>(machine, ranks, std::move(options))) {}

  const Machine& machine() const override { return executor_->state().machine; }

  Share allocate(Rank rank, uint64_t bytes) override {
    Share share{.rank = rank, .bytes = bytes, .fd = -1, .data = nullptr, .owner = nullptr};
    if (executor_->state().options.phantom || bytes == 0) return share;
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      fail_errno(Code::memory, cat("cannot allocate ", bytes, " bytes for simulated rank ", rank));
    }
    share.data = static_cast<std::byte*>(data);
    share.owner = std::shared_ptr<void>(data, [bytes](void* memory) { munmap(memory, bytes); });
    return share;
  }

  Share import(Rank, uint64_t, int) override {
    fail(Code::unsupported, "the simulator runs all ranks in one process: nothing to import");
  }

  std::unique_ptr<Loaded> load(std::shared_ptr<const Program> program) override {
    check_places(*program);
    std::vector<Rank> all(executor_->state().ranks);
    std::iota(all.begin(), all.end(), Rank{0});
    return std::make_unique<SimLoaded>(
        executor_, std::make_shared<const exec::CompiledProgram>(std::move(program),
                                                                 executor_->state().ranks, all));
  }

  int64_t now_ns() const override { return executor_->now_ns(); }
  Capabilities capabilities() override { return {.virtual_time = this}; }

  void pass(double ns) override { executor_->pass(ns); }
  uint64_t draw() override { return executor_->draw(); }
  bool plants_faults() const override { return !executor_->state().options.faults.empty(); }

 private:
  std::shared_ptr<SimExecutor> executor_;
};

}  // namespace

std::unique_ptr<Backend> make_sim(const Machine& machine, Rank ranks, SimOptions options) {
  check(machine);
  if (ranks < 1 || ranks > machine.ranks) {
    fail(Code::invalid, "machine ", machine.name, " has 1 to ", machine.ranks, " ranks, not ",
         ranks);
  }
  for (const Fault& fault : options.faults) {
    if (fault.rank >= ranks) fail(Code::invalid, "fault ", to_string(fault), ": no such rank");
    if (!(fault.factor > 0) || !std::isfinite(fault.factor) || fault.ns < 0) {
      fail(Code::invalid, "fault ", to_string(fault), ": factor must be above 0, ns not below");
    }
  }
  return std::make_unique<SimBackend>(machine, ranks, std::move(options));
}

}  // namespace offcore::sim
