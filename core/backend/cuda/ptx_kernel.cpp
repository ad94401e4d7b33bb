#include "core/backend/cuda/ptx_kernel.h"

#include "core/backend/cuda/gpu_context.h"

namespace offcore::cuda {

PtxKernel::PtxKernel(std::shared_ptr<const PrimaryContext> context, const char* ptx,
                     const char* name, const char* needs)
    : context_(std::move(context)) {
  const Driver& driver = Driver::get();
  const ContextGuard current(context_->handle());
  check(driver.cuModuleLoadData(&module_, ptx), cat("cuModuleLoadData (", needs, ")"));
  const CUresult result = driver.cuModuleGetFunction(&function_, module_, name);
  if (result != kSuccess) driver.cuModuleUnload(module_);
  check(result, "cuModuleGetFunction");
}

PtxKernel::~PtxKernel() {
  const ContextGuard current(context_->handle());
  Driver::get().cuModuleUnload(module_);
}

void PtxKernel::warm_up(uint32_t threads, void* nothing) const {
  const ContextGuard current(context_->handle());
  const CudaStream stream(context_);
  void* arguments[] = {nothing};
  check(Driver::get().cuLaunchKernel(function_, 1, 1, 1, threads, 1, 1, 0, stream.handle(),
                                     arguments, nullptr),
        "cuLaunchKernel");
}

}  // namespace offcore::cuda
