#include "core/backend/cuda/local_gpu.h"

#include "core/backend/cuda/dual_engine.h"
#include "core/backend/cuda/engine_alias.h"

namespace offcore::cuda {
namespace {

constexpr int kPackMajor = 8;  // of the compute capability that kernels/compile.py names

}  // namespace

LocalGpu::LocalGpu(Rank rank, int ordinal, bool copy_kernel, bool packs)
    : rank_(rank),
      gpu_(GpuContext::of(ordinal)),
      copy_kernel_(copy_kernel ? &gpu_->copy_kernel() : nullptr),
      pack_kernel_(packs && attribute(ordinal, Attribute::compute_major) >= kPackMajor
                       ? &gpu_->pack_kernel()
                       : nullptr) {}

LocalGpu::~LocalGpu() = default;

bool LocalGpu::cross(const Reach& reach) {
  const auto crossing = std::make_shared<DualEngine>(*gpu_, reach);
  try {
    if (!crossing->works(*gpu_)) return false;
  } catch (const Error&) {
    gpu_->keep_if_served(crossing);
    throw;
  }
  crossing_ = crossing;
  return true;
}

void LocalGpu::make_alias(std::shared_ptr<const Allocation> foreign) {
  engine_alias_ = std::make_unique<const EngineAlias>(*gpu_, std::move(foreign));
}

}  // namespace offcore::cuda
