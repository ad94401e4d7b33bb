#include "core/backend/cuda/executor.h"

#include <algorithm>
#include <utility>

#include "core/backend/cuda/spare_engines.h"
#include "core/base/env.h"
#include "core/base/threads.h"

namespace offcore::cuda {
namespace {

constexpr uint64_t kSmallBytes = uint64_t{1} << 20;  // that a launch copies
constexpr uint32_t kReapEvery = 4;
constexpr uint32_t kLooks = 50;  // of a microsecond or less
constexpr int64_t kSpinNs = 200'000;
constexpr double kReleaseS = 10.0;
constexpr uint32_t kBeyond = 0x40000000;  // past every value that a wait of the lane waits for

// A GPU that does not let go of memory: it stays mapped for good.
void leak(std::shared_ptr<void> memory) { new std::shared_ptr<void>(std::move(memory)); }

bool has_batches(const CudaProgram& compiled, const LocalProgram& local, uint32_t call_min) {
  return std::any_of(local.engines.begin(), local.engines.end(), [&](uint32_t engine) {
    const std::span<const Command> commands = compiled.program->queues[engine].commands;
    const auto data = std::find_if(commands.begin(), commands.end(),
                                   [](const Command& command) { return moves_data(command.op); });
    return in_calls(commands.subspan(static_cast<size_t>(data - commands.begin())), call_min);
  });
}

}  // namespace

CudaExecutor::CudaExecutor(Rank ranks, std::vector<std::shared_ptr<LocalGpu>> devices,
                           EncodeOptions options)
    : Executor("cuda"),
      ranks_(ranks),
      devices_(std::move(devices)),
      options_(options),
      channels_(env("CUDA_DEVICE_MAX_CONNECTIONS")),
      mappings_(std::make_shared<MappingTable>()),
      words_(std::make_shared<SignalWords>(ranks, devices_)),
      captures_(devices_, options_, mappings_, words_) {}

void CudaExecutor::try_strided(PeerMapping& mapping, bool zero) {
  const std::scoped_lock lock(mutex_);
  std::optional<bool>& tried = tried_[mapping.stride() <= kPitchMax];
  if (!tried && zero) tried = mapping.try_strided(devices_);
  mapping.set_strided(tried.value_or(false));
  if (!mapping.strided()) strided_works_ = false;
}

void CudaExecutor::alias_copies(const PeerMapping& mapping) {
  const std::scoped_lock lock(mutex_);
  if (aliased_) return;  // captures read what is made here, without the mutex
  for (const auto& device : devices_) {
    auto foreign = mapping.part_elsewhere(device->ordinal());
    if (foreign == nullptr) continue;
    device->make_alias(std::move(foreign));
    if (options_.spare_engines) device->take_spare_engines();
  }
  aliased_ = true;
}

CudaExecutor::LaneStreams& CudaExecutor::lane(uint32_t index, uint32_t device) {
  LaneStreams& lane = streams_[{index, device}];
  if (!lane.caller) {
    lane.caller = std::make_unique<OrderedStream>(devices_[device], words_);
    lane.signal_table = std::make_unique<SignalTable>(devices_[device], words_);
  }
  return lane;
}

OrderedStream& CudaExecutor::ordered(OrderedStreams& streams, uint32_t device, size_t index) {
  while (streams.size() <= index) {
    streams.push_back(std::make_unique<OrderedStream>(devices_[device], words_));
  }
  return *streams[index];
}

void CudaExecutor::check_places(const CudaProgram& compiled, const Launch& launch) {
  const Program& program = *compiled.program;
  for (const auto& [buffer, rank] : compiled.bases) {
    const std::byte* base = launch.binding.base(buffer, rank);
    if (program.buffers[buffer].kind != Buffer::Home::local) continue;
    // What was a GPU's is not asked for again: its addresses never become the host's.
    std::atomic<const std::byte*>& known = known_[reinterpret_cast<uintptr_t>(base) / 512 % kKnown];
    if (known.load(std::memory_order_relaxed) == base || mappings_->find(base) != nullptr) continue;
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
    if (type == kDeviceMemory) known.store(base, std::memory_order_relaxed);
  }
}

StreamEncoder CudaExecutor::encoder(const CudaSubmission& submission, const RankSubmission& turn,
                                    CUstream stream, CUdeviceptr word) const {
  EncodeOptions options = options_;
  options.armed = armed_lines_ > 0;
  const SignalTable* signal_table = options.armed ? nullptr : turn.lane->signal_table.get();
  return StreamEncoder(*turn.device, stream, {word, words_->mapping(), signal_table},
                       *submission.program, submission.launch, *mappings_, options, nullptr,
                       turn.part->stats);
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
      .part = &submission.parts[static_cast<size_t>(&local - submission.compiled.gpus.data())],
      .own = nullptr,
      .joins = {}};
  const uintptr_t given =
      submission.launch.streams.empty() ? 0 : submission.launch.streams[local.device];
  // The per-thread default stream is another one in each thread, under one name: the lane's own
  // stream stands in for it. So it does for the legacy one where that costs less than to make one
  // by one the copies of which it takes no batches.
  const bool named =
      given == kPerThreadStream ||
      (given == kLegacyStream && has_batches(submission.compiled, local, options_.call_min));
  if (given != 0 && !named) turn.stream = reinterpret_cast<CUstream>(given);
  if (submission.launch.gives_way && given == 0 && own.last_stream == turn.stream) {
    turn.stream = ordered(own.engines, local.device, 0).stream();
  }
  if (own.last_done != nullptr && own.last_stream != turn.stream)
    own.last_done->enqueue_wait(turn.stream);
  if (submission.launch.after != nullptr) {
    static_cast<const CudaMark*>(submission.launch.after)->enqueue_wait(turn.stream);
  }
  own.signal_table->prepare(submission.launch.epoch + 1, submission.program->flag_span);
  if (named) turn.named = reinterpret_cast<CUstream>(given);
  if (const uintptr_t behind = named ? given : submission.launch.behind; behind != 0) {
    const CudaEvent fork = turn.device->event();
    fork.record(reinterpret_cast<CUstream>(behind));
    fork.enqueue_wait(turn.stream);
  }
  if (submission.compiled.timestamps > 0) {
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
    here.enqueue_wait(ordered(turn.lane->engines, local.device, i).stream());
  }
}

void CudaExecutor::join(RankSubmission& turn, CUstream stream) {
  turn.joins.push_back(turn.device->event());
  turn.joins.back().record(stream);
}

// Lends the queue streams for spare engines, forked where its own is, before anything is in that.
// They are to be joined.
std::vector<CUstream> CudaExecutor::lend(RankSubmission& turn, size_t index, StreamEncoder& encoder,
                                         CUstream forked) {
  const LocalProgram& local = *turn.local;
  const SpareEngines* spare = turn.device->spare_engines();
  if (local.spare_bytes == 0 || index != local.spared || spare == nullptr || armed_lines_ > 0) {
    return {};
  }
  const CudaEvent here = turn.device->event();
  here.record(forked);
  std::vector<CUstream> streams;
  for (size_t i = 0; i < 2 * spare->aliases().size(); ++i) {
    streams.push_back(ordered(turn.lane->spares, local.device, i).stream());
    here.enqueue_wait(streams.back());
  }
  encoder.lend(streams, local.spare_bytes);
  return streams;
}

// Engine queues that were not armed: one with the caller where that can be, the others forked.
void CudaExecutor::engines(CudaSubmission& submission, RankSubmission& turn) {
  const auto& queues = submission.program->queues;
  const LocalProgram& local = *turn.local;
  const size_t inside = local.joined && !local.engines.empty() ? 1 : 0;
  for (size_t i = inside; i < local.engines.size(); ++i) {
    OrderedStream& line = ordered(turn.lane->engines, local.device, i);
    StreamEncoder own = encoder(submission, turn, line.stream(), line.word());
    const std::vector<CUstream> spares = lend(turn, i, own, line.stream());
    own.whole(queues[local.engines[i]].commands);
    join(turn, line.stream());
    for (const CUstream spare : spares) join(turn, spare);
  }
  if (inside == 1) turn.own->add(queues[local.engines[0]].commands);
}

// A program in its serial order: each part into its queue's stream.
void CudaExecutor::serial(CudaSubmission& submission, std::vector<RankSubmission>& turns) {
  const CudaProgram& compiled = submission.compiled;
  std::map<uint32_t, std::unique_ptr<StreamEncoder>> encoders;  // by queue
  std::vector<std::pair<RankSubmission*, CUstream>> asides;     // of signals, and spare engines
  for (const auto& [gpu, step] : compiled.serial) {
    RankSubmission& turn = turns[gpu];
    const ContextGuard current = turn.device->enqueuing();
    const Queue& queue = submission.program->queues[step.queue];
    StreamEncoder* encoder = turn.own.get();
    if (queue.index != kCallerQueue && !compiled.one_stream) {
      std::unique_ptr<StreamEncoder>& own = encoders[step.queue];
      if (own == nullptr) {
        const auto& engines = turn.local->engines;
        const auto at = std::find(engines.begin(), engines.end(), step.queue) - engines.begin();
        const auto index = static_cast<size_t>(at);
        OrderedStream& line = ordered(turn.lane->engines, turn.local->device, index);
        own = std::make_unique<StreamEncoder>(
            this->encoder(submission, turn, line.stream(), line.word()));
        if (const size_t end = signals_aside(queue.commands); end > 0) {
          const CUstream signals = ordered(turn.lane->asides, turn.local->device, index).stream();
          own->send_aside(signals, queue.commands.data() + end);
          asides.emplace_back(&turn, signals);
        }
        for (const CUstream spare : lend(turn, index, *own, line.stream())) {
          asides.emplace_back(&turn, spare);
        }
      }
      encoder = own.get();
    }
    const std::span<const Command> commands = queue.commands;
    encoder->run(commands.subspan(step.first, step.last - step.first));
  }
  for (RankSubmission& turn : turns) {
    if (compiled.one_stream) continue;
    const ContextGuard current = turn.device->enqueuing();
    for (size_t i = 0; i < turn.local->engines.size(); ++i) {
      join(turn, ordered(turn.lane->engines, turn.local->device, i).stream());
    }
  }
  for (const auto& [turn, stream] : asides) {
    const ContextGuard current = turn->device->enqueuing();
    join(*turn, stream);
  }
}

void CudaExecutor::end(RankSubmission& turn) {
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
void CudaExecutor::enqueue_ranks(CudaSubmission& submission, std::vector<RankSubmission>& turns) {
  const bool armed = submission.streams != nullptr;
  const auto& queues = submission.program->queues;
  for (const LocalProgram& local : submission.compiled.gpus) {
    const ContextGuard current = devices_[local.device]->enqueuing();
    RankSubmission& turn = turns.emplace_back(begin(submission, local));
    if (!armed && !submission.compiled.one_stream) fork(turn);
    turn.own = std::make_unique<StreamEncoder>(
        encoder(submission, turn, turn.stream, turn.lane->caller->word()));
    if (local.joined && !local.engines.empty()) {
      turn.own->expect(queues[local.engines[0]].commands);
    }
    turn.own->lead(local.caller.first(local.leading));
  }
  if (submission.compiled.interleaved) {
    serial(submission, turns);
  }
  for (size_t i = 0; i < turns.size() && !submission.compiled.interleaved; ++i) {
    const ContextGuard current = turns[i].device->enqueuing();
    if (armed) {
      resume(submission, turns[i], i);
    } else {
      engines(submission, turns[i]);
    }
  }
  for (RankSubmission& turn : turns) {
    const ContextGuard current = turn.device->enqueuing();
    if (!submission.compiled.interleaved) {
      turn.own->add(turn.local->caller.subspan(turn.local->leading));
      turn.own->flush();
    }
    end(turn);
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
      const LaneStreams& lane = *turn.lane;
      for (const OrderedStreams* streams : {&lane.engines, &lane.spares, &lane.asides}) {
        for (const auto& one : *streams) join(turn, one->stream());
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

void CudaExecutor::submit(const std::shared_ptr<exec::Submission>& submission, exec::Freed& freed) {
  auto& own = static_cast<CudaSubmission&>(*submission);
  const ExecutorLock lock(mutex_);
  check_open();
  reap(own, freed);
  LaneSubmissions& lane = lanes_[{own.launch.lane, 0}];
  lane.push_back(submission);
  std::vector<RankSubmission> turns;
  try {
    enqueue_ranks(own, turns);
  } catch (const Error& error) {
    if (own.streams == nullptr && untouched(own)) {
      lane.pop_back();
      throw Refused(Error(error.code(), cat(error.message(), "; nothing of ", own.program->op,
                                            " was enqueued, and it can be called again")));
    }
    abandon(own, turns);
    throw;
  } catch (...) {
    abandon(own, turns);
    throw;
  }
  own.control_ns = now_ns() - own.launch_ns;
}

void CudaExecutor::finish(exec::Submission& submission, exec::Freed& freed) {
  submission.let_go(freed);  // its end was seen when it was polled
}

// Lets go of launches that have ended and that nobody waits for, of each lane the first ones, and
// ends those that are poisoned. A query of an event takes a sixth of a small launch's time, so
// small ones look every few launches, and at the event in the middle: a lane ends in order.
void CudaExecutor::reap(const CudaSubmission& next, exec::Freed& freed) {
  const bool small = next.compiled.bytes <= kSmallBytes;
  if (small && ++launches_ % kReapEvery != 0) return;
  for (auto& [key, lane] : lanes_) {
    const size_t middle = small ? lane.size() / 2 : 0;
    if (middle > 0 && !lane[middle]->poll()) continue;
    for (size_t i = 0; i < middle; ++i) lane[i]->end();
    settle(key, lane, freed);
  }
  release(freed);
}

void CudaExecutor::retire(exec::Submission& submission, exec::Freed& freed) {
  submission.let_go(freed);
  const LaneKey key{submission.launch.lane, 0};
  settle(key, lanes_[key], freed);
}

void CudaExecutor::release_poisoned() {
  exec::Freed freed;
  const ExecutorLock lock(mutex_);
  release(freed);
}

// Writes the words that poisoned launches wait for until these are through. Signals that run out
// meanwhile may lower a word again, so it is written again.
void CudaExecutor::release(exec::Freed& freed) {
  const auto submissions = in_flight([](CudaSubmission& own) { return own.poisoned() != 0; });
  if (submissions.empty()) return;
  const Deadline deadline = Deadline::after_s(kReleaseS);
  for (const auto& submission : submissions) submission->dead = submission->poisoned();
  for (uint32_t round = 0;; ++round) {
    bool through = true;
    for (const auto& submission : submissions) {
      if (submission->poll()) continue;
      through = false;
      for (const LocalProgram& local : submission->compiled.gpus) {
        const ContextGuard current = devices_[local.device]->current();
        devices_[local.device]->gpu().write_words(submission->awaited(local.device, *mappings_),
                                                  submission->launch.epoch + kBeyond);
      }
    }
    if (through) break;
    if (deadline.passed()) {
      for (const auto& submission : submissions) leak(submission);
      fail(Code::driver, "an aborted operation on a GPU did not end within ",
           shown_s(deadline.wait_ns()), " s; its memory stays mapped: end this process");
    }
    nap(round * kSpinNs);
  }
  for (const auto& submission : submissions) retire(*submission, freed);
}

void CudaExecutor::attend(exec::Submission& submission, const Deadline& deadline) {
  const int64_t began_ns = now_ns();
  const ContextGuard current = devices_.front()->current();  // once, for all looks at it
  // A small operation ends while its host looks, which it does without a pause at first.
  for (uint32_t looks = 0; looks < kLooks && !submission.poll(); ++looks) pause_briefly();
  while (!submission.poll()) {
    release_poisoned();  // it, and what it waits behind
    if (submission.ended() || deadline.passed()) return;
    nap(now_ns() - began_ns);
  }
}

void CudaExecutor::enqueue_wait(const CudaSubmission& submission, uintptr_t stream) const {
  if (submission.ended()) return;
  for (size_t i = 0; i < submission.parts.size(); ++i) {
    const ContextGuard current = devices_[submission.compiled.gpus[i].device]->enqueuing();
    submission.parts[i].done->enqueue_wait(reinterpret_cast<CUstream>(stream));
  }
}

bool CudaExecutor::end_within(const Submissions& submissions, double wait_s) const {
  const Deadline deadline = Deadline::after_s(wait_s);
  for (const auto& submission : submissions) {
    while (!submission->poll() && submission->poisoned() == 0) {
      if (deadline.passed()) return false;
      nap(kSpinNs);
    }
  }
  return true;
}

void CudaExecutor::end_all(const Submissions& submissions) {
  end_within(submissions, kGraceS);
  for (const auto& submission : submissions) submission->poison(devices_.front()->rank());
  release_poisoned();
}

void CudaExecutor::close() {
  captures_.close();
  const auto all = [](const CudaSubmission&) { return true; };
  exec::Freed freed;
  ExecutorLock lock(mutex_);
  closed_ = true;
  const Submissions submissions = in_flight(all);
  lock.unlock();
  end_all(submissions);
  lock.lock();
  for (const auto& submission : in_flight(all)) submission->let_go(freed);
  lanes_.clear();
  streams_.clear();
}

}  // namespace offcore::cuda
