// A kernel of ours, which the driver compiles from PTX when it is loaded.
#pragma once
#include <memory>

#include "core/backend/cuda/driver.h"

namespace offcore::cuda {

class PrimaryContext;

class PtxKernel {
 public:
  // `needs`: what the reader of a failure is to look at. Throws driver.
  PtxKernel(std::shared_ptr<const PrimaryContext> context, const char* ptx, const char* name,
            const char* needs);
  ~PtxKernel();
  PtxKernel(const PtxKernel&) = delete;
  PtxKernel& operator=(const PtxKernel&) = delete;

  CUfunction function() const { return function_; }
  // Launches one block that finds nothing to do: a kernel's first launch may be what loads it, and
  // that would wait for the GPU.
  void warm_up(uint32_t threads, void* nothing) const;

 private:
  const std::shared_ptr<const PrimaryContext> context_;
  CUmodule module_ = nullptr;
  CUfunction function_ = nullptr;
};

}  // namespace offcore::cuda
