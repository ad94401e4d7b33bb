#include "core/comm/batch_executor.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/base/error.h"
#include "core/comm/lane_lock.h"

namespace offcore {
namespace {

struct BatchExecutors {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<BatchExecutor>> open;
};

PerProcess<BatchExecutors> executors;

std::string key_of(const std::string& backend, const Machine& machine, Rank ranks,
                   const BackendOptions& options) {
  return cat(backend, ' ', machine.name, ' ', digest(machine), ' ', ranks, ' ', options.key());
}

bool is_copy_within(const Program& program) {
  for (Rank rank = 0; rank < program.ranks; ++rank) {
    if (copies_within(program, rank)) return true;
  }
  return false;
}

bool has_flags(const Program& program) {
  return std::any_of(program.queues.begin(), program.queues.end(),
                     [](const Queue& queue) { return queue.index == kCallerQueue; });
}

}  // namespace

std::shared_ptr<BatchExecutor> BatchExecutor::of(const std::string& backend, const Machine& machine,
                                                 Rank ranks, BackendOptions options) {
  BatchExecutors& all = executors.get();
  const std::string key = key_of(backend, machine, ranks, options);
  const std::scoped_lock lock(all.mutex);
  if (const auto found = all.open.find(key); found != all.open.end()) return found->second;
  return all.open.emplace(key, open(backend, machine, ranks, std::move(options))).first->second;
}

std::shared_ptr<BatchExecutor> BatchExecutor::open(const std::string& backend,
                                                   const Machine& machine, Rank ranks,
                                                   BackendOptions options) {
  std::vector<Rank> local(ranks);
  for (Rank rank = 0; rank < ranks; ++rank) local[rank] = rank;
  return std::shared_ptr<BatchExecutor>(new BatchExecutor(
      open_backend(backend, machine, ranks, std::move(local), std::move(options)), ranks));
}

void BatchExecutor::close_all() {
  BatchExecutors& all = executors.get();
  std::map<std::string, std::shared_ptr<BatchExecutor>> open;
  {
    const std::scoped_lock lock(all.mutex);
    open.swap(all.open);
  }
  for (const auto& [key, executor] : open) executor->close();
}

BatchExecutor::BatchExecutor(std::unique_ptr<Backend> backend, Rank ranks)
    : ranks_(ranks), backend_(std::move(backend)) {}

void BatchExecutor::close() {
  const std::scoped_lock lock(mutex_);
  backend_.reset();
  lanes_.clear();
}

uint32_t BatchExecutor::lane_of(const std::vector<uintptr_t>& streams) {
  const auto found = std::find_if(lanes_.begin(), lanes_.end(),
                                  [&](const BatchLane& lane) { return lane.streams == streams; });
  if (found != lanes_.end()) return static_cast<uint32_t>(found - lanes_.begin());
  if (lanes_.size() == kLanesMax) {  // further streams share lanes: their batches are in order too
    return static_cast<uint32_t>(streams.empty() ? 0 : (streams[0] >> 6) % kLanesMax);
  }
  lanes_.push_back({.streams = streams, .flags = {}, .wakeups = {}, .scratch = {}});
  return static_cast<uint32_t>(lanes_.size() - 1);
}

// A graph has its own: its replays may run beside other batches of the lane.
Share BatchExecutor::scratch_of(BatchLane& lane, Rank rank, uint64_t bytes, bool captured) {
  if (captured) return backend_->allocate(rank, bytes);
  lane.scratch.resize(ranks_);
  Share& scratch = lane.scratch[rank];
  if (scratch.bytes < bytes) scratch = backend_->allocate(rank, bytes);
  return scratch;
}

Launch BatchExecutor::bind(const Program& program, const BatchBases& bases, BatchCall& call,
                           uint32_t index, const Deadline& deadline) {
  BatchLane& lane = lanes_[index];
  Launch launch{
      .binding = Binding(program.buffers.size(), ranks_), .lane = index, .streams = call.streams};
  std::vector<std::shared_ptr<void>> held{std::move(call.keep)};
  // A launch that fails half-way poisons its wakeups, and all that wait for words of its lane with
  // it: what has none fails alone.
  auto wakeups = std::make_shared<Wakeups>(ranks_);
  if (has_flags(program)) {
    if (lane.flags.words == 0) {
      lane.flags = Flags::create(*backend_, nullptr, ranks_, program.flag_words, deadline);
      lane.wakeups = wakeups;
    }
    wakeups = lane.wakeups;
    launch.epoch = std::exchange(lane.flags.epoch, lane.flags.epoch + program.flag_span);
    for (Rank rank = 0; rank < ranks_; ++rank) {
      launch.binding.base(kFlagBuffer, rank) = lane.flags.base(rank);
    }
    launch.binding.base(kFlagBuffer, kHostRank) = lane.flags.base(kHostRank);
    held.push_back(lane.flags.memory.owner);
  }
  for (Wakeup& wakeup : *wakeups) launch.wakeups.push_back(&wakeup);
  held.push_back(std::move(wakeups));
  for (size_t i = 1; i < program.buffers.size(); ++i) {
    const auto id = static_cast<BufferId>(i);
    const Buffer& buffer = program.buffers[i];
    if (buffer.kind == Buffer::Home::host) {
      launch.binding.base(id, kHostRank) = reinterpret_cast<std::byte*>(bases.host);
      continue;
    }
    for (Rank rank = 0; rank < ranks_; ++rank) {
      if (buffer.role != Role::scratch) {
        launch.binding.base(id, rank) = reinterpret_cast<std::byte*>(bases.device[rank]);
        continue;
      }
      const Share scratch = scratch_of(lane, rank, buffer.bytes, call.policy.captured);
      launch.binding.base(id, rank) = scratch.data;
      held.push_back(scratch.owner);
    }
  }
  launch.owner = std::make_shared<std::vector<std::shared_ptr<void>>>(std::move(held));
  return launch;
}

void BatchExecutor::check_open() const {
  if (backend_ == nullptr) fail(Code::cancelled, "the process's batches have been closed");
}

PlannedBatch BatchExecutor::plan(const BatchCall& call) {
  const int64_t start_ns = now_ns();
  std::unique_lock lock(mutex_);
  check_open();
  const Machine machine = backend_->machine();
  const bool by_cpus = backend_->host_visible();
  lock.unlock();
  if (by_cpus && !call.phantom) check_reach_of_cpus(call.entries, machine.name);
  PlannedBatch planned;
  std::vector<Slice> seams;
  const Moves moves = moves_of(call.entries, call.phantom, planned.bases, seams);
  planned.plan = plan_batch(moves, call.swaps, call.policy, machine, seams);
  planned.within = is_copy_within(*planned.plan.program);
  for (const Queue& queue : planned.plan.program->queues) {
    planned.commands += static_cast<uint64_t>(
        std::count_if(queue.commands.begin(), queue.commands.end(),
                      [](const Command& command) { return moves_data(command.op); }));
  }
  planned.plan_ns = now_ns() - start_ns;
  lock.lock();
  check_open();
  planned.loaded = backend_->load(planned.plan.program);
  return planned;
}

std::unique_ptr<BatchRun> BatchExecutor::launch(const PlannedBatch& planned, BatchCall call,
                                                const Deadline& deadline) {
  const int64_t start_ns = now_ns();
  auto result = std::make_unique<BatchRun>();
  result->executor = shared_from_this();
  result->plan = planned.plan;
  result->within = planned.within;
  const Program& program = *planned.plan.program;
  result->mode = program.mode;
  result->plan_ns = planned.plan_ns;
  const std::scoped_lock lock(mutex_);
  check_open();
  if (call.policy.captured) call.keep = nullptr;
  const uint32_t lane = lane_of(call.streams);
  const Launch launch = bind(program, planned.bases, call, lane, deadline);
  try {
    result->run = owned_here(planned.loaded->launch(launch));
  } catch (...) {
    if (has_flags(program)) lanes_[lane].flags = {};  // its words are as it has left them
    throw;
  }
  result->submit_ns = now_ns() - start_ns;
  return result;
}

std::unique_ptr<BatchRun> BatchExecutor::start(BatchCall call, const Deadline& deadline) {
  const int64_t start_ns = now_ns();
  {
    const std::scoped_lock lock(mutex_);
    check_open();
    call.policy.captured = backend_->capture_of(call.streams) != 0;
  }
  if (call.policy.captured && ranks_ > 1) {
    fail(Code::unsupported, "a batch of ", ranks_,
         " GPUs cannot be captured: capture one for each ",
         "GPU, or collectives of a communicator");
  }
  const PlannedBatch planned = plan(call);
  auto result = launch(planned, std::move(call), deadline);
  result->submit_ns = now_ns() - start_ns - planned.plan_ns;
  return result;
}

Share BatchExecutor::register_host(std::byte* data, uint64_t bytes, std::shared_ptr<void> keep) {
  const std::scoped_lock lock(mutex_);
  check_open();
  ForeignMemory* const memory = backend_->capabilities().foreign_memory;
  if (memory == nullptr) return {.bytes = bytes, .data = data, .owner = std::move(keep)};
  return memory->register_host(data, bytes, std::move(keep));
}

}  // namespace offcore
