// Engines of a GPU that are free while it sends to other GPUs.
//
// All copies to other GPUs, and those within the GPU by a peer's base (engine_alias.h), are one
// engine's: a rank's own part of an all-to-all takes its whole time beside what is pushed. A copy
// within the GPU whose destination's base is the host's memory, or its source's, is made by the
// engine of that direction: 90 GB/s each, 153 both, and pushes keep their rate meanwhile (2 x H200,
// driver 580; benchmarks/results/cuda-h200-2-spare-engines.txt). No document says so: whether every
// byte comes is tried first.
#pragma once
#include <deque>
#include <memory>
#include <optional>

#include "core/backend/cuda/engine_alias.h"

namespace offcore::cuda {

class SpareEngines {
 public:
  // Of a row: an application's own copies to and from the host wait for one at a time.
  static constexpr uint64_t kRowMax = uint64_t{8} << 20;
  static constexpr uint64_t kCopyMin = uint64_t{4} << 20;  // of copies that are divided

  // Begins to try them, in memory and a stream of the trial's own. Null: there are none.
  static std::shared_ptr<SpareEngines> find(const GpuContext& gpu);

  // Whether the trial has ended, within a moment, and every byte had come. Where others' copies
  // keep the engines busy it has not, and may be asked again. Throws driver where the GPU failed.
  bool work(const GpuContext& gpu);
  bool under_trial() const;  // its copies are under way

  const std::deque<EngineAlias>& aliases() const { return aliases_; }  // an engine each

  // How many of `own` bytes within the GPU they take, so that they end together with the engine
  // that does the rest, `pushed` bytes to other GPUs and `moved` further ones within. 0: too few.
  static uint64_t share(uint64_t own, uint64_t pushed, uint64_t moved);

 private:
  explicit SpareEngines(const GpuContext& gpu);
  void begin_trial(const GpuContext& gpu);

  std::deque<EngineAlias> aliases_;
  // The trial's. The driver takes host memory back only once the GPU is idle: so it stays.
  std::shared_ptr<const PrimaryContext> context_;
  std::shared_ptr<void> pinned_;
  std::optional<AddressRange> tried_;
  std::unique_ptr<CudaStream> stream_;  // null: it has ended
};

}  // namespace offcore::cuda
