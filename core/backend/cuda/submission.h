// Programs made ready for the local GPUs, and launches of them under way.
#pragma once
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "core/backend/cuda/stream_encoder.h"
#include "core/backend/exec/submission.h"
#include "core/ir/serial_order.h"

namespace offcore::cuda {

// An engine queue that can be enqueued ahead of its launch. Only its data and signals go ahead,
// behind a gate that opens once the polls before them have passed in the caller's stream: a queue
// that has to be taken back must not need its flag words written. Data commands that write memory
// of the caller's own wait for the launch too, because no mapping can stand in for that.
struct ArmedQueue {
  std::vector<Command> polls;
  std::vector<Command> ahead;
  std::vector<Command> late;  // of the first data group: any time after the polls
  std::vector<Command> rest;  // after `ahead`
};

// What one local rank runs.
struct LocalProgram : exec::RankQueues {
  uint32_t device = 0;  // index into the executor's devices
  size_t leading = 0;   // commands of the caller before its first poll
  // The caller only signals first and polls last: then one engine queue may run in between, in
  // the caller's own stream.
  bool joined = true;
  std::vector<ArmedQueue> aheads;  // by engine queue; empty: cannot be enqueued ahead
  // Of the engine queue that only copies within the rank, what spare engines take; 0: nothing.
  uint64_t spare_bytes = 0;
  size_t spared = 0;  // index into `engines`
};

struct CudaProgram : exec::CompiledProgram {
  CudaProgram(std::shared_ptr<const Program> of, Rank ranks, std::span<const Rank> local,
              bool packs)
      : CompiledProgram(std::move(of), ranks, local, packs, true) {}
  std::vector<LocalProgram> gpus;  // by device
  std::vector<std::shared_ptr<LocalGpu>> devices;
  uint64_t bytes = 0;  // that the local queues copy
  // Of programs that reduce: how their local queues are enqueued. Their callers wait in between.
  struct SerialPart {
    uint32_t gpu = 0;  // index into `gpus`
    SerialStep step;
  };
  std::vector<SerialPart> serial;
  bool one_stream = false;  // nothing of one rank would overlap: all goes into the caller's stream
};

// Whether all of them can copy pages.
bool packs(const std::vector<std::shared_ptr<LocalGpu>>& devices);

// Throws invalid for commands that name what the program does not have, unsupported for swaps.
std::shared_ptr<const CudaProgram> compile(std::shared_ptr<const Program> program, Rank ranks,
                                           const std::vector<std::shared_ptr<LocalGpu>>& devices);

struct ArmedStreams;

// One part: the streams order all ranks'.
struct CudaSubmission final : exec::Submission {
  struct RankPart {
    std::shared_ptr<const CudaEvent> done;
    std::optional<CudaEvent> start;  // timed programs
    int64_t start_ns = 0;            // when the host recorded it, after the launch
    SubmitStats stats;
    bool ended = false;
    std::vector<CudaEvent> joins;  // armed: of each engine queue
  };

  CudaSubmission(std::shared_ptr<const CudaProgram> of, const Launch& launch_)
      : Submission(of, launch_, 1), compiled(*of), parts(of->gpus.size()) {}

  // Whether every local rank's part has ended; throws driver when a GPU has failed.
  bool poll() override;
  bool part_ended(uint32_t) override { return poll(); }
  Report report() const override;
  // Words that local queues poll, on that device.
  std::vector<CUdeviceptr> awaited(uint32_t device, const MappingTable& mappings) const;
  // The first poll of the queue whose words are not there.
  size_t reached(uint32_t queue) const override;
  uint32_t read_word(const Slice& word) const override;
  std::string_view no_position() const override {
    return "every poll has what it waits for; the driver does not show which copy is under way";
  }

  const CudaProgram& compiled;
  std::vector<RankPart> parts;            // as compiled.gpus
  const ArmedStreams* streams = nullptr;  // that hold its engine queues ahead of its launch
  uint32_t turn = 0;                      // the value of their gates that lets them go
};

}  // namespace offcore::cuda
