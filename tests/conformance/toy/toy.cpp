// A backend as small as they get, on the executor that all share (core/backend/exec): memory of
// this process, and queues that run a command at a time whenever somebody looks. What it does not
// have to write is the proof: submissions, lanes, arming, poison, timeouts, the text of a position.
//
// Only tests know it: a library of its own, which they hand to the package (_core.add_backend).
#include <sys/mman.h>

#include <cstring>

#include "core/backend/exec/task_executor.h"
#include "core/backend/reduce.h"
#include "core/backend/registry.h"
#include "core/backend/wakeup.h"
#include "core/base/swap_bytes.h"

namespace offcore::toy {
namespace {

class ToyTask final : public exec::QueueTask {
 public:
  ToyTask(exec::Submission& submission, uint32_t queue)
      : QueueTask(queue),
        submission_(submission),
        commands_(submission.program->queues[queue].commands) {}

  bool ended() const override { return released_ || at_ == commands_.size(); }
  size_t reached() const override { return at_; }
  void release() override { released_ = true; }

  bool advance() override {
    const size_t began = at_;
    while (!ended() && run(commands_[at_])) ++at_;
    return at_ > began;
  }

 private:
  // False: it has to wait.
  bool run(const Command& command) {
    switch (command.op) {
      case Op::poll:
        return submission_.polled(command);
      case Op::signal:
        for (uint32_t row = 0; row < command.rows; ++row) {
          raise_word(submission_.word(dst(command, row)), submission_.launch.epoch + command.value);
        }
        return true;
      case Op::copy:
      case Op::swap:
        for (uint32_t row = 0; row < command.rows; ++row) move(command, row);
        return true;
      case Op::reduce:
        reduce_all(command);
        return true;
      case Op::timestamp:
        submission_.timestamps_ns[command.value] = now_ns() - submission_.launch_ns;
        return true;
      case Op::fence:  // commands run in order
        return true;
    }
    return true;
  }

  void move(const Command& command, uint32_t row) const {
    const Slice from = row_of(command.src, command.src_step, row, submission_.program->ranks);
    std::byte* to = byte_at(dst(command, row));
    if (command.op == Op::swap) {
      swap_bytes(to, byte_at(from), command.bytes);
    } else {
      std::memcpy(to, byte_at(from), command.bytes);
    }
  }

  void reduce_all(const Command& command) const {
    std::vector<const std::byte*> sources;
    for (uint32_t row = 0; row < command.rows; ++row) {
      sources.push_back(byte_at(source_of(command, row)));
    }
    reduce(*submission_.program->reduction, command, byte_at(command.dst), sources, command.bytes);
  }

  Slice dst(const Command& command, uint32_t row) const {
    return row_of(command.dst, command.dst_step, row, submission_.program->ranks);
  }

  std::byte* byte_at(const Slice& slice) const {
    return submission_.launch.binding.base(slice.buffer, slice.rank) + slice.offset;
  }

  exec::Submission& submission_;
  const std::vector<Command>& commands_;
  size_t at_ = 0;
  bool released_ = false;
};

class ToyLoaded final : public exec::LoadedProgram {
 public:
  using LoadedProgram::LoadedProgram;

 private:
  std::shared_ptr<exec::Submission> build(const Launch& launch) override {
    auto submission = std::make_shared<exec::TaskSubmission>(compiled_, launch);
    for (size_t part = 0; part < compiled_->locals.size(); ++part) {
      for (uint32_t queue : compiled_->locals[part].queues) {
        submission->tasks[part].push_back(std::make_unique<ToyTask>(*submission, queue));
      }
    }
    return submission;
  }
};

class ToyBackend final : public Backend {
 public:
  ToyBackend(const Machine& machine, Rank ranks, std::vector<Rank> local_ranks)
      : machine_(machine), local_ranks_(exec::sorted_ranks(std::move(local_ranks), ranks)) {}
  ~ToyBackend() override { executor_->close(); }

  const Machine& machine() const override { return machine_; }

  Share allocate(Rank rank, uint64_t bytes) override {
    Share share{.rank = rank, .bytes = bytes, .owner = nullptr};
    if (bytes == 0) return share;
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) fail(Code::memory, "there are no ", bytes, " bytes for rank ", rank);
    share.data = static_cast<std::byte*>(data);
    share.owner = std::shared_ptr<void>(data, [bytes](void* memory) { munmap(memory, bytes); });
    return share;
  }

  Share import(Rank, uint64_t, int) override {
    fail(Code::unsupported, "all ranks of the toy are in one process: nothing to import");
  }

  std::unique_ptr<Loaded> load(std::shared_ptr<const Program> program) override {
    return std::make_unique<ToyLoaded>(
        executor_, std::make_shared<const exec::CompiledProgram>(
                       std::move(program), static_cast<Rank>(local_ranks_.size()), local_ranks_));
  }

  int64_t now_ns() const override { return offcore::now_ns(); }

 private:
  const Machine machine_;
  const std::vector<Rank> local_ranks_;
  const std::shared_ptr<exec::TaskExecutor> executor_ = std::make_shared<exec::TaskExecutor>("toy");
};

std::unique_ptr<Backend> open_toy(const Machine& machine, Rank ranks, std::vector<Rank> local_ranks,
                                  BackendOptions) {
  if (local_ranks.size() != ranks)
    fail(Code::unsupported, "all ranks of the toy are in one process");
  return std::make_unique<ToyBackend>(machine, ranks, std::move(local_ranks));
}

}  // namespace
}  // namespace offcore::toy

extern "C" __attribute__((visibility("default"))) const offcore::BackendRow* offcore_backend() {
  static constexpr offcore::BackendRow row{"toy", nullptr, offcore::toy::open_toy};
  return &row;
}
