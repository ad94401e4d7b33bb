#include "core/backend/sim/sim.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <optional>

#include "core/backend/sim/packets.h"
#include "core/backend/sim/simulation.h"
#include "core/base/error.h"

namespace offcore::sim {
namespace {

class SimRun : public Run {
 public:
  explicit SimRun(SimOutcome outcome) : outcome_(std::move(outcome)) {}

  // A launch in which nothing can happen any more goes on for ever; one of a dead rank has ended.
  bool done() override { return outcome_.failure != Code::timeout; }
  void wait(const Deadline&) override {
    if (outcome_.failure) throw Error(*outcome_.failure, outcome_.message);
  }
  Report report() const override { return outcome_.report; }

 private:
  SimOutcome outcome_;
};

// The state that a backend shares with its loaded programs.
struct SimShared {
  std::mutex mutex;
  SimState state;
};

class SimLoaded : public Loaded {
 public:
  SimLoaded(std::shared_ptr<SimShared> shared, std::shared_ptr<const Program> program)
      : shared_(std::move(shared)), program_(std::move(program)) {
    const SimState& state = shared_->state;
    if (state.options.packets) packets_.emplace(*program_, state.machine);
  }

  bool arm(const Launch& launch) override {
    if (program_->mode != Mode::armed) {
      fail(Code::invalid, "only a program of mode armed can be armed, not one of mode ",
           to_string(program_->mode));
    }
    const std::lock_guard lock(shared_->mutex);
    armed_.push_back({launch.lane, launch.epoch});
    return true;
  }

  std::unique_ptr<Run> launch(const Launch& launch) override {
    if (launch.binding.ranks() != program_->ranks) {
      fail(Code::invalid, "a binding of ", launch.binding.ranks(), " ranks for a program of ",
           program_->ranks);
    }
    const std::lock_guard lock(shared_->mutex);
    if (program_->mode == Mode::armed) start_armed(launch);
    if (!packets_) {
      return std::make_unique<SimRun>(Simulation(shared_->state, *program_, launch).run());
    }
    const Program fetched = packets_->fetched(launch.epoch);
    return std::make_unique<SimRun>(Simulation(shared_->state, fetched, launch).run());
  }

 private:
  struct Armed {
    uint32_t lane;
    uint32_t epoch;
  };

  void start_armed(const Launch& launch) {
    const auto armed = std::find_if(armed_.begin(), armed_.end(), [&](const Armed& candidate) {
      return candidate.lane == launch.lane;
    });
    if (armed == armed_.end() || armed->epoch != launch.epoch) {
      fail(Code::invalid, "a program of mode armed has to be armed with lane ", launch.lane,
           " and epoch ", launch.epoch, " before it is launched with them");
    }
    armed_.erase(armed);
  }

  std::shared_ptr<SimShared> shared_;
  std::shared_ptr<const Program> program_;
  std::optional<PacketPath> packets_;
  std::vector<Armed> armed_;  // in order
};

class SimBackend : public Backend {
 public:
  SimBackend(const Machine& machine, Rank ranks, SimOptions options)
      : shared_(std::make_shared<SimShared>()) {
    shared_->state.machine = machine;
    shared_->state.ranks = ranks;
    shared_->state.options = std::move(options);
  }

  const Machine& machine() const override { return shared_->state.machine; }

  Share allocate(Rank rank, uint64_t bytes) override {
    Share share{.rank = rank, .bytes = bytes, .fd = -1, .data = nullptr, .owner = nullptr};
    if (shared_->state.options.phantom || bytes == 0) return share;
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
    if (program->ranks != shared_->state.ranks) {
      fail(Code::invalid, "a program of ", program->ranks, " ranks on a simulator of ",
           shared_->state.ranks);
    }
    check_places(*program);
    return std::make_unique<SimLoaded>(shared_, std::move(program));
  }

  int64_t now_ns() const override {
    const std::lock_guard lock(shared_->mutex);
    return std::llround(shared_->state.clock_ns);
  }

 private:
  std::shared_ptr<SimShared> shared_;
};

}  // namespace

std::unique_ptr<Backend> make_sim(const Machine& machine, Rank ranks, SimOptions options) {
  check(machine);
  if (ranks < 1 || ranks > machine.ranks) {
    fail(Code::invalid, "machine ", machine.name, " has 1 to ", machine.ranks, " ranks, not ",
         ranks);
  }
  if (options.packets && machine.vendor != "amd") {
    fail(Code::unsupported, "machine ", machine.name, " has no SDMA engines: packets are AMD's");
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
