// What executes reduce commands on a GPU: kernels on a stated number of its SMs
// (kernels/reduce.cu).
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "core/backend/cuda/driver.h"
#include "core/ir/reduction.h"

namespace offcore::cuda {

class PrimaryContext;

// One launch: addresses, and bytes of each source.
struct KernelReduction {
  CUdeviceptr dst = 0;
  CUdeviceptr src = 0;
  uint64_t step = 0;         // from source to source
  CUdeviceptr own = 0;       // of the source that lies apart
  uint32_t at = UINT32_MAX;  // its number; rows or more: there is none
  uint32_t rows = 1;
  uint64_t bytes = 0;
};

// The kernels of one GPU, each loaded by whoever asks first.
class ReduceKernels {
 public:
  explicit ReduceKernels(std::shared_ptr<const PrimaryContext> context);
  ~ReduceKernels();
  ReduceKernels(const ReduceKernels&) = delete;
  ReduceKernels& operator=(const ReduceKernels&) = delete;

  // Loads what launches of this reduction need; they are not to be the first to: that may wait for
  // the GPU. Throws driver.
  void prepare(const Reduction& reduction) const;
  // On at most so many SMs; how many it takes. One source alone is copied as it is, unless it lies
  // apart.
  uint32_t launch(const Reduction& reduction, const KernelReduction& what, uint32_t sms,
                  CUstream stream) const;

 private:
  struct Kernel {
    CUmodule module = nullptr;
    CUfunction function = nullptr;
  };
  CUfunction kernel(const std::string& name) const;

  const std::shared_ptr<const PrimaryContext> context_;
  mutable std::mutex mutex_;
  mutable std::map<std::string, Kernel> kernels_;
};

}  // namespace offcore::cuda
