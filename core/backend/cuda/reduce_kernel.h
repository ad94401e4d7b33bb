// What executes reduce commands on a GPU: kernels on a stated number of its SMs
// (kernels/reduce.cu).
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/backend/cuda/ptx_kernel.h"
#include "core/base/reduction.h"

namespace offcore::cuda {

// A reduce command as a kernel sees it: addresses, and bytes of each source.
struct ReduceKernelJob {
  static constexpr size_t kWordsMax = 8;  // that it waits for, and that it signals

  CUdeviceptr dst = 0;
  CUdeviceptr src = 0;
  uint64_t step = 0;         // from source to source
  CUdeviceptr own = 0;       // of the source that lies apart
  uint32_t at = UINT32_MAX;  // its number; rows or more: there is none
  uint32_t rows = 1;
  uint64_t bytes = 0;
  using Words = std::vector<std::pair<CUdeviceptr, uint32_t>>;  // with their values
  Words waits = {};
  Words signals = {};
};

// The kernels of one GPU, each loaded by whoever asks first.
class ReduceKernels {
 public:
  static constexpr size_t kJobsMax = 15;  // of a launch

  explicit ReduceKernels(std::shared_ptr<const PrimaryContext> context);
  ReduceKernels(const ReduceKernels&) = delete;
  ReduceKernels& operator=(const ReduceKernels&) = delete;

  // Loads what launches of this reduction need; they are not to be the first to: that may wait for
  // the GPU. Throws driver.
  void prepare(const Reduction& reduction) const;
  // One job after another, on at most so many SMs; how many it takes. `counters`: kJobsMax words
  // of this GPU, 0 before and after, of which no other launch makes use meanwhile; 0 where no job
  // signals. One source alone is copied as it is, unless it lies apart.
  uint32_t launch(const Reduction& reduction, std::span<const ReduceKernelJob> jobs,
                  CUdeviceptr counters, uint32_t sms, CUstream stream) const;

 private:
  CUfunction kernel(DType dtype) const;

  const std::shared_ptr<const PrimaryContext> context_;
  mutable std::mutex mutex_;
  mutable std::map<DType, PtxKernel> kernels_;
};

}  // namespace offcore::cuda
