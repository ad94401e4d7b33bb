#include "core/backend/cuda/executor.h"

#include <algorithm>
#include <utility>

#include "core/backend/wakeup.h"
#include "core/base/env.h"
#include "core/base/threads.h"

namespace offcore::cuda {
namespace {

constexpr uint32_t kLooks = 50;  // of a microsecond or less
constexpr int64_t kSpinNs = 200'000;
constexpr double kReleaseS = 10.0;
constexpr uint32_t kBeyond = 0x40000000;  // past every value that a wait of the lane waits for

// A GPU that does not let go of memory: it stays mapped for good.
void leak(std::shared_ptr<void> memory) { new std::shared_ptr<void>(std::move(memory)); }

bool has_batches(const CudaProgram& compiled, const LocalProgram& local) {
  return std::any_of(local.engines.begin(), local.engines.end(), [&](uint32_t engine) {
    const std::span<const Command> commands = compiled.program->queues[engine].commands;
    const auto data = std::find_if(commands.begin(), commands.end(),
                                   [](const Command& command) { return moves_data(command.op); });
    return worth_batches(commands.subspan(static_cast<size_t>(data - commands.begin())));
  });
}

}  // namespace

CudaExecutor::CudaExecutor(Rank ranks, std::vector<std::shared_ptr<LocalGpu>> devices,
                           EncodeOptions options)
    : ranks_(ranks),
      devices_(std::move(devices)),
      options_(options),
      channels_(env("CUDA_DEVICE_MAX_CONNECTIONS")),
      mappings_(std::make_shared<MappingTable>()),
      words_(std::make_shared<SignalWords>(ranks, devices_)),
      captures_(devices_, options_, mappings_, words_) {}

void CudaExecutor::try_strided(PeerMapping& mapping) {
  const std::scoped_lock lock(mutex_);
  std::optional<bool>& tried = tried_[mapping.stride() <= kPitchMax];
  if (!tried) tried = mapping.try_strided(devices_);
  mapping.set_strided(*tried);
  if (!*tried) strided_works_ = false;
}

void CudaExecutor::alias_copies(const PeerMapping& mapping) {
  const std::scoped_lock lock(mutex_);
  for (const auto& device : devices_) {
    if (device->engine_alias() != nullptr) continue;
    if (auto foreign = mapping.part_elsewhere(device->ordinal()))
      device->make_alias(std::move(foreign));
  }
}

CudaExecutor::LaneStreams& CudaExecutor::lane(uint32_t index, uint32_t device) {
  LaneStreams& lane = lanes_[{index, device}];
  if (!lane.caller) {
    lane.caller = std::make_unique<OrderedStream>(devices_[device], words_);
    lane.signal_table = std::make_unique<SignalTable>(devices_[device], words_);
  }
  return lane;
}

OrderedStream& CudaExecutor::engine(LaneStreams& lane, uint32_t device, size_t index) {
  while (lane.engines.size() <= index) {
    lane.engines.push_back(std::make_unique<OrderedStream>(devices_[device], words_));
  }
  return *lane.engines[index];
}

void CudaExecutor::check_launch(const CudaProgram& compiled, const Launch& launch) const {
  try {
    check_places(compiled, launch);
  } catch (const Error& error) {
    throw Refused(error);
  }
}

void CudaExecutor::check_places(const CudaProgram& compiled, const Launch& launch) const {
  const Program& program = *compiled.program;
  if (launch.binding.ranks() != program.ranks || launch.wakeups.size() != program.ranks ||
      launch.binding.buffers() != program.buffers.size() ||
      std::find(launch.wakeups.begin(), launch.wakeups.end(), nullptr) != launch.wakeups.end() ||
      (!launch.streams.empty() && launch.streams.size() != devices_.size())) {
    fail(Code::invalid, program.op, " needs bases of ", program.buffers.size(), " buffers at ",
         program.ranks, " ranks, a wakeup for each rank, and no streams or one for each of the ",
         devices_.size(), " local ranks");
  }
  for (const auto& [buffer, rank] : compiled.bases) {
    const std::byte* base = launch.binding.base(buffer, rank);
    if (base == nullptr) {
      fail(Code::invalid, "buffer ", program.buffers[buffer].name, " of ",
           rank == kHostRank ? "the host" : cat("rank ", rank), " is not mapped here");
    }
    if (program.buffers[buffer].kind != Buffer::Home::local || mappings_->find(base) != nullptr) {
      continue;
    }
    const ContextGuard current = devices_.front()->current();
    int type = 0;
    const CUresult result = Driver::get().cuPointerGetAttribute(
        &type, kPointerMemoryType, reinterpret_cast<CUdeviceptr>(base));
    if (result != kInvalidValue) check(result, "cuPointerGetAttribute");
    if (result == kInvalidValue || type == 0) {
      fail(Code::invalid, "buffer ", program.buffers[buffer].name, " of rank ", rank,
           " is ordinary host memory, which GPUs' copy engines cannot reach; pass a tensor on the "
           "GPU, a window, or host memory of Communicator.host_array()");
    }
  }
}

StreamEncoder CudaExecutor::encoder(const CudaSubmission& submission, const RankSubmission& turn,
                                    CUstream stream, CUdeviceptr word) const {
  EncodeOptions options = options_;
  options.armed = armed_lines_ > 0;
  const SignalTable* signal_table = options.armed ? nullptr : turn.lane->signal_table.get();
  return StreamEncoder(*turn.device, stream, {word, words_->mapping(), signal_table},
                       *submission.compiled->program, submission.launch, *mappings_, options,
                       nullptr, turn.part->stats);
}

// Chooses the stream, puts the lane in order, and encodes what the caller does before it waits.
CudaExecutor::RankSubmission CudaExecutor::begin(CudaSubmission& submission,
                                                 const LocalProgram& local) {
  LaneStreams& own = lane(submission.launch.lane, local.device);
  RankSubmission turn{
      .local = &local,
      .device = devices_[local.device].get(),
      .lane = &own,
      .stream = own.caller->stream(),
      .named = nullptr,
      .part = &submission.parts[static_cast<size_t>(&local - submission.compiled->locals.data())],
      .own = nullptr,
      .joins = {}};
  const uintptr_t given =
      submission.launch.streams.empty() ? 0 : submission.launch.streams[local.device];
  // The per-thread default stream is another one in each thread, under one name: the lane's own
  // stream stands in for it. So it does for the legacy one where that costs less than to make one
  // by one the copies of which it takes no batches.
  const bool named = given == kPerThreadStream ||
                     (given == kLegacyStream && has_batches(*submission.compiled, local));
  if (given != 0 && !named) turn.stream = reinterpret_cast<CUstream>(given);
  if (own.last_done != nullptr && own.last_stream != turn.stream)
    own.last_done->enqueue_wait(turn.stream);
  own.signal_table->prepare(submission.launch.epoch + 1, submission.compiled->program->flag_span);
  if (named) {
    turn.named = reinterpret_cast<CUstream>(given);
    const CudaEvent fork = turn.device->event();
    fork.record(turn.named);
    fork.enqueue_wait(turn.stream);
  }
  if (submission.compiled->timed) {
    turn.part->start.emplace(turn.device->event(true));
    turn.part->start->record(turn.stream);
    turn.part->start_ns = now_ns() - submission.launch_ns;
  }
  return turn;
}

// Further engine queues start where the caller's stream stands now.
void CudaExecutor::fork(RankSubmission& turn) {
  const LocalProgram& local = *turn.local;
  const size_t inside = local.joined ? 1 : 0;
  if (local.engines.size() <= inside) return;
  const CudaEvent here = turn.device->event();
  here.record(turn.stream);
  for (size_t i = inside; i < local.engines.size(); ++i) {
    here.enqueue_wait(engine(*turn.lane, local.device, i).stream());
  }
}

// Engine queues that were not armed: one with the caller where that can be, the others forked.
void CudaExecutor::engines(CudaSubmission& submission, RankSubmission& turn) {
  const auto& queues = submission.compiled->program->queues;
  const LocalProgram& local = *turn.local;
  const size_t inside = local.joined && !local.engines.empty() ? 1 : 0;
  for (size_t i = inside; i < local.engines.size(); ++i) {
    OrderedStream& line = engine(*turn.lane, local.device, i);
    encoder(submission, turn, line.stream(), line.word()).whole(queues[local.engines[i]].commands);
    turn.joins.push_back(turn.device->event());
    turn.joins.back().record(line.stream());
  }
  if (inside == 1) turn.own->add(queues[local.engines[0]].commands);
}

void CudaExecutor::end(CudaSubmission& submission, RankSubmission& turn) {
  const LocalProgram& local = *turn.local;
  if (local.caller) {
    const std::span<const Command> commands =
        submission.compiled->program->queues[*local.caller].commands;
    turn.own->add(commands.subspan(local.leading));
  }
  turn.own->flush();
  for (const CudaEvent& join : turn.joins) join.enqueue_wait(turn.stream);
  auto done = std::make_shared<CudaEvent>(turn.device->event());
  done->record(turn.stream);
  if (turn.named != nullptr) done->enqueue_wait(turn.named);
  turn.lane->last_stream = turn.stream;
  turn.lane->last_done = done;
  turn.lane->signal_table->used_until(done);
  turn.part->done = std::move(done);
}

// Rank by rank, but never all of one rank first: a queue too long for its stream would wait for
// ranks that have not begun.
void CudaExecutor::enqueue(CudaSubmission& submission, std::vector<RankSubmission>& turns,
                           const ArmedStreams& armed_streams, const ArmedSubmission* armed) {
  const auto& queues = submission.compiled->program->queues;
  for (const LocalProgram& local : submission.compiled->locals) {
    const ContextGuard current = devices_[local.device]->current();
    RankSubmission& turn = turns.emplace_back(begin(submission, local));
    if (armed == nullptr) fork(turn);
    turn.own = std::make_unique<StreamEncoder>(
        encoder(submission, turn, turn.stream, turn.lane->caller->word()));
    if (local.joined && !local.engines.empty()) {
      turn.own->expect(queues[local.engines[0]].commands);
    }
    if (!local.caller) continue;
    const std::span<const Command> commands = queues[*local.caller].commands;
    turn.own->lead(commands.first(local.leading));
  }
  for (size_t i = 0; i < turns.size(); ++i) {
    const ContextGuard current = turns[i].device->current();
    if (armed != nullptr) {
      resume(submission, turns[i], armed_streams, *armed, i);
    } else {
      engines(submission, turns[i]);
    }
  }
  for (RankSubmission& turn : turns) {
    const ContextGuard current = turn.device->current();
    end(submission, turn);
  }
}

// Whether nothing of a launch is enqueued, and the GPUs still work.
bool CudaExecutor::untouched(const CudaSubmission& submission) const {
  if (std::any_of(submission.parts.begin(), submission.parts.end(),
                  [](const CudaSubmission::RankPart& part) { return part.stats.submitted; })) {
    return false;
  }
  return std::all_of(devices_.begin(), devices_.end(),
                     [](const auto& device) { return device->gpu().works(); });
}

// Half of a launch is enqueued: nobody may take what it leaves for a result. It is poisoned, and
// released like any other once its streams' ends are known.
void CudaExecutor::abandon(CudaSubmission& submission, std::vector<RankSubmission>& turns) {
  submission.poison(devices_.front()->rank());
  try {
    for (RankSubmission& turn : turns) {
      const ContextGuard current = turn.device->current();
      for (const auto& line : turn.lane->engines) {
        turn.joins.push_back(turn.device->event());
        turn.joins.back().record(line->stream());
      }
      for (const CudaEvent& join : turn.joins) join.enqueue_wait(turn.stream);
      auto done = std::make_shared<CudaEvent>(turn.device->event());
      done->record(turn.stream);
      turn.part->done = std::move(done);
    }
  } catch (const Error&) {
    leak(std::move(submission.launch.owner));  // the driver is beyond telling
  }
}

std::shared_ptr<CudaSubmission> CudaExecutor::launch(std::shared_ptr<const CudaProgram> compiled,
                                                     const Launch& launch,
                                                     ArmedStreams& armed_streams) {
  const int64_t launch_ns = now_ns();
  const ContextGuard current = devices_.front()->current();  // once, for all that is called below
  check_launch(*compiled, launch);
  if (!armed_streams.armed.empty() &&
      !(armed_streams.armed.front().launch.binding == launch.binding)) {
    recall(compiled, armed_streams);
  }
  std::vector<std::shared_ptr<void>> owners;  // freed without the mutex
  const std::scoped_lock lock(mutex_);
  if (closed_) fail(Code::cancelled, "the cuda backend is closed");
  owners = reap();
  const auto submission = std::make_shared<CudaSubmission>(compiled, launch);
  submission->launch_ns = launch_ns;
  std::optional<ArmedSubmission> armed;
  if (!armed_streams.armed.empty()) {
    const Launch& ahead = armed_streams.armed.front().launch;
    if (ahead.epoch != launch.epoch || ahead.lane != launch.lane) {
      fail(Code::invalid, "armed for epoch ", ahead.epoch, " of lane ", ahead.lane,
           " but launched with epoch ", launch.epoch, " of lane ", launch.lane);
    }
    armed.emplace(std::move(armed_streams.armed.front()));
    armed_streams.armed.pop_front();
  }
  in_flight_.push_back(submission);
  std::vector<RankSubmission> turns;
  try {
    enqueue(*submission, turns, armed_streams, armed ? &*armed : nullptr);
  } catch (const Error& error) {
    if (!armed && untouched(*submission)) {
      in_flight_.pop_back();
      throw Refused(Error(error.code(), cat(error.message(), "; nothing of ", compiled->program->op,
                                            " was enqueued, and it can be called again")));
    }
    abandon(*submission, turns);
    throw;
  } catch (...) {
    abandon(*submission, turns);
    throw;
  }
  submission->control_ns = now_ns() - launch_ns;
  return submission;
}

std::shared_ptr<CudaSubmission> CudaExecutor::record(std::shared_ptr<const CudaProgram> compiled,
                                                     const Launch& launch) {
  check_launch(*compiled, launch);
  return captures_.record(std::move(compiled), launch);
}

// Lets go of launches that have ended and that nobody waits for: of each lane the first ones. What
// they kept is for the caller to free without the mutex.
std::vector<std::shared_ptr<void>> CudaExecutor::reap() {
  std::vector<std::shared_ptr<void>> owners;
  std::vector<uint32_t> busy;  // lanes
  std::erase_if(in_flight_, [&](const auto& submission) {
    if (std::find(busy.begin(), busy.end(), submission->launch.lane) != busy.end()) return false;
    if (!submission->ended()) {
      busy.push_back(submission->launch.lane);
      return false;
    }
    owners.push_back(std::move(submission->launch.owner));
    return true;
  });
  if (const auto dead = poisoned(); !dead.empty()) release(dead);
  return owners;
}

// Lets go of a launch that has been waited for, and of those before it that nobody waited for.
void CudaExecutor::retire(CudaSubmission& submission) {
  std::vector<std::shared_ptr<void>> owners;  // freed without the mutex
  const std::scoped_lock lock(mutex_);
  std::erase_if(in_flight_, [&](const auto& candidate) { return candidate.get() == &submission; });
  owners.push_back(std::move(submission.launch.owner));
  while (!in_flight_.empty() && in_flight_.front()->ended()) {
    owners.push_back(std::move(in_flight_.front()->launch.owner));
    in_flight_.pop_front();
  }
}

std::vector<std::shared_ptr<CudaSubmission>> CudaExecutor::poisoned() const {
  std::vector<std::shared_ptr<CudaSubmission>> submissions;
  std::copy_if(in_flight_.begin(), in_flight_.end(), std::back_inserter(submissions),
               [](const auto& submission) { return submission->poisoned() != 0; });
  return submissions;
}

void CudaExecutor::release_poisoned() {
  const std::scoped_lock lock(mutex_);
  release(poisoned());
}

// Writes the awaited words until all these launches are through. Signals that run out meanwhile
// may lower a word again, so it is written again.
void CudaExecutor::release(const std::vector<std::shared_ptr<CudaSubmission>>& submissions) {
  const Deadline deadline = Deadline::after_s(kReleaseS);
  for (const auto& submission : submissions) submission->dead = submission->poisoned();
  for (uint32_t round = 0;; ++round) {
    bool through = true;
    for (const auto& submission : submissions) {
      if (submission->ended()) continue;
      through = false;
      for (size_t i = 0; i < submission->compiled->locals.size(); ++i) {
        const LocalGpu& device = *devices_[submission->compiled->locals[i].device];
        const ContextGuard current = device.current();
        device.gpu().write_words(submission->awaited(static_cast<uint32_t>(i), *mappings_),
                                 submission->launch.epoch + kBeyond);
      }
    }
    if (through) break;
    if (deadline.passed()) {
      for (const auto& submission : submissions) leak(submission);
      fail(Code::driver, "a GPU does not let go of an aborted operation within ",
           shown_s(deadline.wait_ns()), " s; its memory stays mapped: end this process");
    }
    nap(round * kSpinNs);
  }
  for (const auto& submission : submissions) {
    std::erase(in_flight_, submission);
    submission->launch.owner.reset();
  }
}

void CudaExecutor::wait(CudaSubmission& submission, const Deadline& deadline) {
  const std::string& op = submission.compiled->program->op;
  const int64_t began_ns = now_ns();
  const auto fail_poisoned = [&](uint32_t by) {
    fail(Code::peer, "rank ", by - 1, " died or aborted during ", op);
  };
  const ContextGuard current = devices_.front()->current();  // once, for all looks at it
  // A small operation ends while its host looks, which it does without a pause at first.
  for (uint32_t looks = 0; looks < kLooks && !submission.ended(); ++looks) pause_briefly();
  while (!submission.ended()) {
    if (const uint32_t by = submission.poisoned(); by != 0) {
      release_poisoned();
      fail_poisoned(by);
    }
    if (deadline.passed()) {
      fail(Code::timeout, op, " did not end within ", shown_s(deadline.wait_ns()),
           " s: ", submission.position(devices_));
    }
    nap(now_ns() - began_ns);
  }
  retire(submission);
  if (const uint32_t by = submission.dead.load(); by != 0) fail_poisoned(by);
}

void CudaExecutor::enqueue_wait(const CudaSubmission& submission, uintptr_t stream) const {
  for (size_t i = 0; i < submission.parts.size(); ++i) {
    const ContextGuard current = devices_[submission.compiled->locals[i].device]->current();
    submission.parts[i].done->enqueue_wait(reinterpret_cast<CUstream>(stream));
  }
}

void CudaExecutor::close() {
  captures_.close();
  const Deadline grace = Deadline::after_s(kGraceS);
  std::vector<std::shared_ptr<CudaSubmission>> submissions;
  {
    const std::scoped_lock lock(mutex_);
    closed_ = true;
    submissions.assign(in_flight_.begin(), in_flight_.end());
  }
  for (const auto& submission : submissions) {
    while (!submission->ended() && submission->poisoned() == 0 && !grace.passed()) nap(kSpinNs);
    if (!submission->ended()) submission->poison(devices_.front()->rank());
  }
  release_poisoned();
  const std::scoped_lock lock(mutex_);
  for (const auto& submission : in_flight_) submission->launch.owner.reset();
  in_flight_.clear();
  lanes_.clear();
}

}  // namespace offcore::cuda
