// Programs made ready for the local GPUs, and launches of them under way.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/backend/cuda/stream_encoder.h"

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
struct LocalProgram {
  Rank rank = 0;
  uint32_t device = 0;            // index into the executor's devices
  std::vector<uint32_t> engines;  // indices into program.queues
  std::optional<uint32_t> caller;
  size_t leading = 0;  // commands of the caller before its first poll
  // The caller only signals first and polls last: then one engine queue may run in between, in
  // the caller's own stream.
  bool joined = true;
  std::vector<ArmedQueue> aheads;  // by engine queue; empty: cannot be enqueued ahead
};

struct CudaProgram {
  std::shared_ptr<const Program> program;
  std::vector<LocalProgram> locals;
  Bases bases;         // what the local queues address
  bool timed = false;  // has timestamps
};

// Throws invalid for commands that name what the program does not have, unsupported for swaps.
std::shared_ptr<const CudaProgram> compile(std::shared_ptr<const Program> program,
                                           const std::vector<std::shared_ptr<LocalGpu>>& devices);

struct CudaSubmission {
  struct RankPart {
    std::shared_ptr<const CudaEvent> done;
    std::optional<CudaEvent> start;  // timed programs
    int64_t start_ns = 0;            // when the host recorded it, after the launch
    SubmitStats stats;
    bool ended = false;
  };

  CudaSubmission(std::shared_ptr<const CudaProgram> compiled_, Launch launch_)
      : compiled(std::move(compiled_)),
        launch(std::move(launch_)),
        parts(compiled->locals.size()) {}

  // Whether every local rank's part has ended; throws driver when a GPU has failed.
  bool ended();
  uint32_t poisoned() const;  // rank + 1 of who poisoned a local rank before its end; 0: nobody
  void poison(Rank by) const;
  Report report() const;
  // Words that local queues poll, on that device.
  std::vector<CUdeviceptr> awaited(uint32_t device, const MappingTable& mappings) const;
  // "queue 0.1 at command 2 (poll ...)": the first poll of each queue whose words are not there.
  std::string position(const std::vector<std::shared_ptr<LocalGpu>>& devices) const;

  std::shared_ptr<const CudaProgram> compiled;
  Launch launch;
  std::vector<RankPart> parts;  // as compiled->locals
  int64_t launch_ns = 0;
  int64_t control_ns = 0;
  int64_t end_ns = -1;            // when the host saw it
  std::atomic<uint32_t> dead{0};  // rank + 1 of who poisoned it, once its waits were released
  mutable std::mutex mutex;       // of end_ns and the parts' ends
};

}  // namespace offcore::cuda
