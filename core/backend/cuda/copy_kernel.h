// Copies between the host and a GPU that a kernel on a few of its SMs makes: only where a caller
// asks for that, for pages so small that engines take longer over each than a link over its bytes.
//
// A launch takes strided copies of one shape; their addresses are its arguments, so that nothing
// has to outlive the call.
#pragma once
#include <memory>
#include <vector>

#include "core/backend/cuda/gpu_context.h"
#include "core/backend/cuda/ptx_kernel.h"

namespace offcore::cuda {

// The kernel, loaded on one GPU.
class CopyKernel {
 public:
  static constexpr uint32_t kBlocks = 16;  // SMs that it takes, at most

  explicit CopyKernel(const std::shared_ptr<const PrimaryContext>& context);

 private:
  friend class KernelCopies;
  PtxKernel kernel_;
};

// Copies that are collected for launches into one stream.
class KernelCopies {
 public:
  static constexpr size_t kCopiesMax = 128;  // of a launch: what its arguments hold

  KernelCopies(const CopyKernel& gather, CUstream stream) : gather_(gather), stream_(stream) {}

  // Whether the kernel copies that: it moves 16 bytes at a time.
  static bool takes(const StridedCopy& copy);
  // Both return the launches that this took.
  uint32_t add(const StridedCopy& copy);
  uint32_t flush();

 private:
  struct Pair {
    CUdeviceptr dst = 0;
    CUdeviceptr src = 0;
  };
  bool fits(const StridedCopy& copy) const;

  const CopyKernel& gather_;
  CUstream stream_;
  StridedCopy shape_;
  std::vector<Pair> pairs_;
};

}  // namespace offcore::cuda
