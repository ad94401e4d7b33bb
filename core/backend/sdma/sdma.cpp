#include "core/backend/sdma/sdma.h"

#include <algorithm>
#include <map>

#include "core/backend/sdma/encode.h"
#include "core/backend/sdma/executor.h"
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

class SdmaLoaded final : public exec::LoadedProgram {
 public:
  SdmaLoaded(std::shared_ptr<SdmaExecutor> executor,
             std::shared_ptr<const exec::CompiledProgram> compiled, uint64_t copy_bytes_max)
      : LoadedProgram(executor, compiled),
        sdma_(*executor),
        program_(compiled->program),
        copy_bytes_max_(copy_bytes_max),
        extents_(extents_of(*program_)),
        stamped_by_(compiled->timestamps, kHostRank) {
    for (const Queue& queue : program_->queues) {
      if (queue.index == kCallerQueue) continue;
      own_queues_.emplace_back(queue.rank, queue.index);
      for (const Command& command : queue.commands) {
        if (command.op == Op::timestamp) stamped_by_[command.value] = queue.rank;
      }
    }
  }

  ~SdmaLoaded() override { recall(); }

 private:
  std::shared_ptr<exec::Submission> build(const Launch& launch) override {
    return lay_out(launch, launch.lane);
  }

  // The packets go to the rings, where their first poll holds them until the launch.
  std::shared_ptr<exec::Submission> build_ahead(const Launch& launch) override {
    if (!sdma_.path().has_rings()) return nullptr;
    if (own_rings_ == 0) own_rings_ = sdma_.take_rings(own_queues_);
    if (own_rings_ == 0) return nullptr;
    std::shared_ptr<SdmaSubmission> submission = lay_out(launch, own_rings_);
    const auto before = armed_.empty() ? last_.lock() : armed_.back();
    sdma_.send(*submission, static_cast<const SdmaSubmission*>(before.get()));
    return submission;
  }

  void recall() override {
    if (own_rings_ == 0) return;
    sdma_.take_back({.group = std::exchange(own_rings_, 0),
                     .queues = own_queues_,
                     .submissions = {armed_.begin(), armed_.end()},
                     .before = last_.lock()});
  }

  void check(const Launch& launch) const override {
    LoadedProgram::check(launch);
    if (launch.epoch + program_->flag_span < launch.epoch) {
      fail(Code::unsupported, "the lane's flag values would wrap, and these engines compare them ",
           "plain: make a new communicator");
    }
  }

  std::shared_ptr<SdmaSubmission> lay_out(const Launch& launch, uint32_t ring_group) {
    auto submission = std::make_shared<SdmaSubmission>(compiled_, launch);
    bind(*submission);
    if (compiled_->swaps && !swaps_fit(*submission)) replace_swaps(*submission);
    submission->ring_group = ring_group;
    submission->way = sdma_.path().name();
    const std::lock_guard lock(sdma_.mutex());  // of the path
    const bool rings = sdma_.path().has_rings();
    if (rings) add_ring_tasks(*submission);
    for (Rank rank = 0; rank < program_->ranks; ++rank) {
      for (uint32_t queue : compiled_->locals[rank].queues) {
        if (rings && program_->queues[queue].index != kCallerQueue) continue;
        submission->tasks[rank].push_back(make_host_task(*submission, queue, sdma_.path()));
      }
    }
    return submission;
  }

  // The addresses of all that the program touches; the caller's own memory is pinned for that.
  void bind(SdmaSubmission& submission) const {
    submission.addresses.epoch = submission.launch.epoch;
    for (const auto& [place, extent] : extents_) {
      const auto& [buffer, rank] = place;
      std::byte* base = submission.launch.binding.base(buffer, rank);
      SubmitPath::Pinned pinned = sdma_.path().pin(base + extent.begin, extent.end - extent.begin);
      submission.addresses.bases[place] = pinned.address - extent.begin;
      submission.places[place] = pinned.place;
      if (pinned.owner != nullptr) submission.kept.push_back(std::move(pinned.owner));
    }
  }

  bool swaps_fit(const SdmaSubmission& submission) const {
    if (!sdma_.path().swaps()) return false;
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
      Share share = sdma_.path().allocate(rank, submission.program->buffers.back().bytes);
      submission.addresses.bases[{scratch, rank}] = reinterpret_cast<uint64_t>(share.data);
      submission.places[{scratch, rank}] = rank;
      submission.kept.push_back(share.owner);
    }
  }

  // Words of the launch's own: the fences', one for the end of each queue, the timestamps.
  void add_ring_tasks(SdmaSubmission& submission) {
    const uint64_t stamps_at = kWordBytes * (1 + own_queues_.size());
    const Share words = sdma_.path().allocate_host(
        stamps_at + kTimestampAlign * std::max<size_t>(1, stamped_by_.size()));
    submission.kept.push_back(words.owner);
    submission.stamps = words.data + stamps_at;
    submission.stamped_by = stamped_by_;
    submission.addresses.scratch = reinterpret_cast<uint64_t>(words.data);
    submission.addresses.timestamps = reinterpret_cast<uint64_t>(submission.stamps);
    std::byte* word = words.data;
    for (const EncodedQueue& stream : streams_for(submission)) {
      const Queue& queue = program_->queues[stream.queue];
      PacketRing& ring = sdma_.path().ring(submission.ring_group, queue.rank, queue.index,
                                           moves_host_memory(submission, queue));
      word += kWordBytes;
      std::unique_ptr<RingTask> task = make_ring_task(submission, stream, ring, word);
      submission.rings.push_back(task.get());
      submission.tasks[queue.rank].push_back(std::move(task));
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

  SdmaExecutor& sdma_;
  const std::shared_ptr<const Program> program_;
  const uint64_t copy_bytes_max_;
  const Extents extents_;
  std::vector<Rank> stamped_by_;
  SdmaExecutor::Queues own_queues_;  // of the engines
  std::vector<EncodedQueue> streams_;
  Addresses encoded_for_;
  uint32_t own_rings_ = 0;  // a group; 0: none
};

class SdmaBackend final : public Backend {
 public:
  SdmaBackend(const Machine& machine, Rank ranks, std::vector<Rank> local_ranks)
      : machine_(machine),
        local_ranks_(exec::sorted_ranks(std::move(local_ranks), ranks)),
        executor_(owned_by_process(std::make_unique<SdmaExecutor>(open_path(ranks)))) {}
  ~SdmaBackend() override { executor_->close(); }

  const Machine& machine() const override { return machine_; }
  Share allocate(Rank rank, uint64_t bytes) override {
    return executor_->path().allocate(rank, bytes);
  }
  Share allocate_host(uint64_t bytes) override { return executor_->path().allocate_host(bytes); }
  Share import(Rank, uint64_t, int) override {
    fail(Code::unsupported, "the sdma backend runs all ranks in one process: nothing to import");
  }
  std::unique_ptr<Loaded> load(std::shared_ptr<const Program> program) override {
    if (program->mode == Mode::capture) {
      fail(Code::unsupported, "the sdma backend has no graphs to capture into");
    }
    auto compiled = std::make_shared<const exec::CompiledProgram>(
        std::move(program), static_cast<Rank>(local_ranks_.size()), local_ranks_);
    if (compiled->reduces) {
      fail(Code::unsupported, "the sdma backend has engines only, and ", compiled->program->op,
           " reduces on cores: use backend host or cuda");
    }
    const uint64_t largest = std::min(machine_.limits.copy_bytes_max, kCopyBytesMax);
    return std::make_unique<SdmaLoaded>(executor_, std::move(compiled), largest);
  }
  int64_t now_ns() const override { return offcore::now_ns(); }

 private:
  Machine machine_;
  std::vector<Rank> local_ranks_;
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
  return std::make_unique<SdmaBackend>(machine, ranks, std::move(local_ranks));
}

}  // namespace offcore
