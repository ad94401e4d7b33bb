#include "core/backend/sdma/sdma.h"

#include <algorithm>
#include <deque>
#include <map>

#include "core/backend/sdma/encode.h"
#include "core/backend/sdma/executor.h"
#include "core/backend/submission_run.h"
#include "core/base/error.h"
#include "core/base/fork.h"

namespace offcore {
namespace {

using namespace sdma;

constexpr std::string_view kUntried = "packets and rings tested, never yet run on AMD hardware";
constexpr uint64_t kScratchBytes = 64 << 10;  // of a queue whose swaps are not aligned

// Swaps by three copies through scratch memory of the queue's own.
Program without_swaps(const Program& program) {
  Program result = program;
  const auto scratch = static_cast<BufferId>(result.buffers.size());
  uint16_t queues = 0;
  for (Queue& queue : result.queues) {
    if (queue.index == kCallerQueue) continue;
    queues = std::max<uint16_t>(queues, queue.index + 1);
    std::vector<Command> commands;
    for (const Command& command : queue.commands) {
      if (command.op != Op::swap) {
        commands.push_back(command);
        continue;
      }
      const Command fence{.op = Op::fence};
      const Slice own{kScratchBytes * queue.index, queue.rank, scratch};
      commands.push_back(fence);
      for (uint32_t row = 0; row < command.rows; ++row) {
        for (uint64_t done = 0; done < command.bytes; done += kScratchBytes) {
          Slice a = row_of(command.dst, command.dst_step, row, program.ranks);
          Slice b = row_of(command.src, command.src_step, row, program.ranks);
          a.offset += done;
          b.offset += done;
          const uint64_t bytes = std::min(kScratchBytes, command.bytes - done);
          for (const auto& [dst, src] : {std::pair{own, a}, {a, b}, {b, own}}) {
            commands.push_back({.dst = dst, .src = src, .bytes = bytes, .op = Op::copy});
            commands.push_back(fence);
          }
        }
      }
    }
    queue.commands = std::move(commands);
  }
  result.buffers.push_back(
      {.name = "swap_scratch", .kind = Buffer::Home::local, .bytes = kScratchBytes * queues});
  return result;
}

// What of a buffer the program touches: what of the caller's memory has to be pinned.
struct TouchedRange {
  uint64_t begin = UINT64_MAX;
  uint64_t end = 0;
};
using Extents = std::map<std::pair<BufferId, Rank>, TouchedRange>;

Extents extents_of(const Program& program) {
  Extents extents;
  const auto add = [&](const Slice& slice, uint64_t bytes) {
    TouchedRange& extent = extents[{slice.buffer, slice.rank}];
    const uint64_t at = slice.buffer == kFlagBuffer ? slice.offset * kWordBytes : slice.offset;
    extent.begin = std::min(extent.begin, at);
    extent.end = std::max(extent.end, at + bytes);
  };
  for (const Queue& queue : program.queues) {
    for (const Command& command : queue.commands) {
      if (command.op == Op::timestamp || command.op == Op::fence) continue;
      const bool data = moves_data(command.op);
      for (uint32_t row = 0; row < command.rows; ++row) {
        add(row_of(command.dst, command.dst_step, row, program.ranks), data ? command.bytes : 4);
        if (data) add(row_of(command.src, command.src_step, row, program.ranks), command.bytes);
      }
    }
  }
  return extents;
}

// Whether some of the queue's copies are to or from the host's memory, as it is bound.
bool moves_host_memory(const SdmaSubmission& submission, const Queue& queue) {
  const auto host = [&](const Slice& slice) { return submission.place_of(slice) == kHostRank; };
  return std::any_of(queue.commands.begin(), queue.commands.end(), [&](const Command& command) {
    return moves_data(command.op) && (host(command.dst) || host(command.src));
  });
}

class SdmaLoaded final : public Loaded {
 public:
  SdmaLoaded(std::shared_ptr<SdmaExecutor> executor, std::shared_ptr<const Program> program,
             uint64_t copy_bytes_max)
      : executor_(std::move(executor)),
        program_(std::move(program)),
        copy_bytes_max_(copy_bytes_max),
        extents_(extents_of(*program_)) {
    for (const Queue& queue : program_->queues) {
      engine_queues_ += queue.index != kCallerQueue;
      for (const Command& command : queue.commands) {
        has_swaps_ |= command.op == Op::swap;
        if (command.op != Op::timestamp) continue;
        if (stamped_by_.size() <= command.value) stamped_by_.resize(command.value + 1, kHostRank);
        if (queue.index != kCallerQueue) stamped_by_[command.value] = queue.rank;
      }
    }
  }

  ~SdmaLoaded() override { take_back(); }

  // The packets go to the rings, where their first poll holds them until the launch.
  bool arm(const Launch& launch) override {
    const std::lock_guard alone(mutex_);
    if (program_->mode != Mode::armed) {
      fail(Code::invalid, "only a program of mode armed can be armed, not one of mode ",
           to_string(program_->mode));
    }
    if (!executor_->path().has_rings()) return false;
    if (own_rings_ == 0) own_rings_ = executor_->take_rings(own_queues());
    if (own_rings_ == 0) return false;
    std::shared_ptr<SdmaSubmission> submission = build(launch, own_rings_);
    executor_->send(*submission, (armed_.empty() ? last_.lock() : armed_.back()).get());
    armed_.push_back(std::move(submission));
    return true;
  }

  std::unique_ptr<Run> launch(const Launch& launch) override {
    const std::lock_guard alone(mutex_);
    const int64_t launch_ns = now_ns();
    std::shared_ptr<SdmaSubmission> submission = take_armed(launch);
    if (submission == nullptr) {
      submission = build(launch, launch.lane);
    } else {
      last_ = submission;
    }
    {
      const std::lock_guard lock(executor_->mutex());
      submission->launch.owner = launch.owner;
      submission->launch_ns = launch_ns;
      add_host_tasks(*submission, false);
      submission->engine_time = executor_->path().engine_time();
      submission->control_ns = now_ns() - launch_ns;
    }
    executor_->enqueue(submission);
    return std::make_unique<SubmissionRun<SdmaExecutor, SdmaSubmission>>(executor_,
                                                                         std::move(submission));
  }

 private:
  // All but the callers' queues.
  std::shared_ptr<SdmaSubmission> build(const Launch& launch, uint32_t ring_group) {
    check(launch);
    auto submission = std::make_shared<SdmaSubmission>(program_, launch);
    bind(*submission);
    if (has_swaps_ && !swaps_fit(*submission)) replace_swaps(*submission);
    submission->parts.resize(program_->ranks);
    submission->parts_left = program_->ranks;
    submission->timestamps_ns.assign(stamped_by_.size(), -1);
    submission->ring_group = ring_group;
    submission->way = executor_->path().name();
    const std::lock_guard lock(executor_->mutex());  // of the path
    if (executor_->path().has_rings()) {
      add_ring_tasks(*submission);
    } else {
      add_host_tasks(*submission, true);
    }
    return submission;
  }

  // What was armed for this launch; null where nothing was, or for other memory.
  std::shared_ptr<SdmaSubmission> take_armed(const Launch& launch) {
    if (armed_.empty()) return nullptr;
    std::shared_ptr<SdmaSubmission> submission = armed_.front();
    const Launch& armed = submission->launch;
    if (armed.epoch != launch.epoch || armed.lane != launch.lane) {
      fail(Code::invalid, "armed for epoch ", armed.epoch, " of lane ", armed.lane,
           " but launched with epoch ", launch.epoch, " of lane ", launch.lane);
    }
    if (armed.binding == launch.binding) {
      armed_.pop_front();
      return submission;
    }
    take_back();
    return nullptr;
  }

  SdmaExecutor::Queues own_queues() const {
    SdmaExecutor::Queues queues;
    for (const Queue& queue : program_->queues) {
      if (queue.index != kCallerQueue) queues.emplace_back(queue.rank, queue.index);
    }
    return queues;
  }

  void take_back() {
    if (own_rings_ == 0) return;
    executor_->take_back({.group = std::exchange(own_rings_, 0),
                          .queues = own_queues(),
                          .submissions = {armed_.begin(), armed_.end()},
                          .before = last_.lock()});
    armed_.clear();
  }

  void check(const Launch& launch) const {
    const Program& program = *program_;
    if (launch.binding.ranks() != program.ranks || launch.wakeups.size() != program.ranks ||
        launch.binding.buffers() != program.buffers.size()) {
      fail(Code::invalid, program.op, " needs bases of ", program.buffers.size(), " buffers at ",
           program.ranks, " ranks, and a wakeup for each rank");
    }
    if (std::find(launch.wakeups.begin(), launch.wakeups.end(), nullptr) != launch.wakeups.end()) {
      fail(Code::invalid, program.op, " was launched without every rank's wakeup");
    }
    if (launch.epoch + program.flag_span < launch.epoch) {
      fail(Code::unsupported, "the lane's flag values would wrap, and these engines compare them ",
           "plain: make a new communicator");
    }
  }

  // The addresses of all that the program touches; the caller's own memory is pinned for that.
  void bind(SdmaSubmission& submission) const {
    submission.addresses.epoch = submission.launch.epoch;
    for (const auto& [place, extent] : extents_) {
      const auto& [buffer, rank] = place;
      std::byte* base = submission.launch.binding.base(buffer, rank);
      if (base == nullptr) {
        fail(Code::invalid, "buffer ", program_->buffers[buffer].name, " of ",
             rank == kHostRank ? "the host" : cat("rank ", rank), " is not mapped here");
      }
      SubmitPath::Pinned pinned =
          executor_->path().pin(base + extent.begin, extent.end - extent.begin);
      submission.addresses.bases[place] = pinned.address - extent.begin;
      submission.places[place] = pinned.place;
      if (pinned.owner != nullptr) submission.kept.push_back(std::move(pinned.owner));
    }
  }

  bool swaps_fit(const SdmaSubmission& submission) const {
    if (!executor_->path().swaps()) return false;
    for (const Queue& queue : program_->queues) {
      for (const Command& command : queue.commands) {
        if (command.op != Op::swap) continue;
        for (uint32_t row = 0; row < command.rows; ++row) {
          const Slice dst = row_of(command.dst, command.dst_step, row, program_->ranks);
          const Slice src = row_of(command.src, command.src_step, row, program_->ranks);
          if ((submission.addresses.of(dst) | submission.addresses.of(src)) % kSwapAlign != 0)
            return false;
        }
      }
    }
    return true;
  }

  void replace_swaps(SdmaSubmission& submission) {
    submission.native = false;
    submission.program = std::make_shared<const Program>(without_swaps(*program_));
    const auto scratch = static_cast<BufferId>(program_->buffers.size());
    for (Rank rank = 0; rank < program_->ranks; ++rank) {
      Share share = executor_->path().allocate(rank, submission.program->buffers.back().bytes);
      submission.addresses.bases[{scratch, rank}] = reinterpret_cast<uint64_t>(share.data);
      submission.places[{scratch, rank}] = rank;
      submission.kept.push_back(share.owner);
    }
  }

  // Words of the launch's own: the fences', one for the end of each queue, the timestamps.
  void add_ring_tasks(SdmaSubmission& submission) {
    const uint64_t stamps_at = kWordBytes * (1 + engine_queues_);
    const Share words = executor_->path().allocate_host(
        stamps_at + kTimestampAlign * std::max<size_t>(1, stamped_by_.size()));
    submission.kept.push_back(words.owner);
    submission.stamps = words.data + stamps_at;
    submission.stamped_by = stamped_by_;
    submission.addresses.scratch = reinterpret_cast<uint64_t>(words.data);
    submission.addresses.timestamps = reinterpret_cast<uint64_t>(submission.stamps);
    std::byte* word = words.data;
    for (const EncodedQueue& stream : streams_for(submission)) {
      const Queue& queue = program_->queues[stream.queue];
      PacketRing& ring = executor_->path().ring(submission.ring_group, queue.rank, queue.index,
                                                moves_host_memory(submission, queue));
      word += kWordBytes;
      submission.parts[queue.rank].push_back(make_ring_task(submission, stream, ring, word));
    }
  }

  // Encoded once; later launches replay the same packets where their memory is aligned alike.
  std::vector<EncodedQueue> streams_for(const SdmaSubmission& submission) {
    if (submission.program != program_)
      return encode(*submission.program, submission.addresses, copy_bytes_max_);
    if (!streams_.empty()) {
      try {
        std::vector<EncodedQueue> streams = streams_;
        for (EncodedQueue& stream : streams) replay(stream, encoded_for_, submission.addresses);
        return streams;
      } catch (const Error&) {  // moved by no multiple of kBaseAlign
      }
    }
    streams_ = encode(*program_, submission.addresses, copy_bytes_max_);
    encoded_for_ = submission.addresses;
    return streams_;
  }

  void add_host_tasks(SdmaSubmission& submission, bool engines) {
    for (uint32_t index = 0; index < program_->queues.size(); ++index) {
      const Queue& queue = program_->queues[index];
      if ((queue.index == kCallerQueue) == engines) continue;
      submission.parts[queue.rank].push_back(make_host_task(submission, index, executor_->path()));
    }
  }

  std::shared_ptr<SdmaExecutor> executor_;
  std::shared_ptr<const Program> program_;
  const uint64_t copy_bytes_max_;
  const Extents extents_;
  std::vector<Rank> stamped_by_;
  size_t engine_queues_ = 0;
  bool has_swaps_ = false;
  std::mutex mutex_;  // guards what follows
  std::vector<EncodedQueue> streams_;
  Addresses encoded_for_;
  uint32_t own_rings_ = 0;  // a group; 0: none
  std::deque<std::shared_ptr<SdmaSubmission>> armed_;
  std::weak_ptr<SdmaSubmission> last_;  // launched, in the own rings
};

class SdmaBackend final : public Backend {
 public:
  SdmaBackend(const Machine& machine, Rank ranks)
      : machine_(machine),
        ranks_(ranks),
        executor_(owned_by_process(std::make_unique<SdmaExecutor>(open_path(ranks)))) {}
  ~SdmaBackend() override { executor_->stop(); }

  const Machine& machine() const override { return machine_; }
  Share allocate(Rank rank, uint64_t bytes) override {
    return executor_->path().allocate(rank, bytes);
  }
  Share allocate_host(uint64_t bytes) override { return executor_->path().allocate_host(bytes); }
  Share import(Rank, uint64_t, int) override {
    fail(Code::unsupported, "the sdma backend runs all ranks in one process: nothing to import");
  }
  std::unique_ptr<Loaded> load(std::shared_ptr<const Program> program) override {
    if (program->ranks != ranks_) {
      fail(Code::invalid, "a program for ", program->ranks, " ranks cannot run on a backend of ",
           ranks_);
    }
    if (program->mode == Mode::capture) {
      fail(Code::unsupported, "the sdma backend has no graphs to capture into");
    }
    const uint64_t largest = std::min(machine_.limits.copy_bytes_max, kCopyBytesMax);
    return std::make_unique<SdmaLoaded>(executor_, std::move(program), largest);
  }
  int64_t now_ns() const override { return offcore::now_ns(); }

 private:
  Machine machine_;
  Rank ranks_;
  std::shared_ptr<SdmaExecutor> executor_;
};

}  // namespace

Probe probe_sdma() {
  try {
    return {.name = "sdma", .available = true, .reason = cat(path_summary(), "; ", kUntried)};
  } catch (const Error& error) {
    return {
        .name = "sdma", .reason = cat(error.message(), "; ", kUntried), .refusal = error.code()};
  }
}

std::unique_ptr<Backend> make_sdma(const Machine& machine, Rank ranks,
                                   std::vector<Rank> local_ranks) {
  check(machine);
  if (machine.vendor != "amd") {
    fail(Code::unsupported, "machine ", machine.name, " has no SDMA engines: packets are AMD's");
  }
  if (local_ranks.size() != ranks) {
    fail(Code::unsupported, "the sdma backend runs all ", ranks, " ranks in one process, not ",
         local_ranks.size());
  }
  return std::make_unique<SdmaBackend>(machine, ranks);
}

}  // namespace offcore
