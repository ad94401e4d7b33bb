// A GPU as one local rank of one group uses it: the process's GPU, and what this group has of it
// besides.
#pragma once
#include <memory>

#include "core/backend/cuda/gpu_context.h"

namespace offcore::cuda {

class Allocation;
class DualEngine;
class EngineAlias;

class LocalGpu {
 public:
  // `copy_kernel`: a kernel copies between the host and this GPU (copy_kernel.h). `packs`: one
  // copies pages (pack_kernel.h), if the GPU can run it; its streams' kernels begin before others'.
  // Throws driver.
  LocalGpu(Rank rank, int ordinal, bool copy_kernel = false, bool packs = false);
  ~LocalGpu();
  LocalGpu(const LocalGpu&) = delete;
  LocalGpu& operator=(const LocalGpu&) = delete;

  Rank rank() const { return rank_; }
  const std::shared_ptr<const GpuContext>& shared() const { return gpu_; }
  const GpuContext& gpu() const { return *gpu_; }
  int ordinal() const { return gpu_->device(); }
  ContextGuard current() const { return gpu_->current(); }
  ContextGuard enqueuing() const { return gpu_->enqueuing(); }
  std::unique_ptr<CudaStream> stream() const { return gpu_->stream(pack_kernel_ != nullptr); }
  CudaEvent event(bool timed = false) const { return gpu_->event(timed); }

  const CopyKernel* copy_kernel() const { return copy_kernel_; }  // null: engines copy
  const PackKernel* pack_kernel() const { return pack_kernel_; }  // null: nothing packs

  // Tries copies by the engine of the other direction (dual_engine.h), and keeps what these need.
  // False: not every byte came. Throws unsupported, memory or driver. Not while anything is
  // enqueued.
  bool cross(const Reach& reach);
  void uncross() { crossing_.reset(); }                           // nor while anything is under way
  const DualEngine* crossing() const { return crossing_.get(); }  // null: there are none

  // Lets copy engines make copies within this GPU, by addresses of that memory of another GPU's
  // (engine_alias.h). Once, before anything is enqueued. Throws memory or driver.
  void make_alias(std::shared_ptr<const Allocation> foreign);
  // Null: SMs make such copies.
  const EngineAlias* engine_alias() const { return engine_alias_.get(); }
  // Engines that make them beside copies to other GPUs, and none until then. Throws driver.
  void take_spare_engines() { spare_engines_ = gpu_->spare_engines(); }
  const SpareEngines* spare_engines() const { return spare_engines_; }

 private:
  Rank rank_;
  std::shared_ptr<const GpuContext> gpu_;
  const CopyKernel* copy_kernel_;
  const PackKernel* pack_kernel_;
  std::shared_ptr<const DualEngine> crossing_;
  std::unique_ptr<const EngineAlias> engine_alias_;
  const SpareEngines* spare_engines_ = nullptr;
};

}  // namespace offcore::cuda
