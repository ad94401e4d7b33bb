#include "core/backend/cuda/reduce_kernel.h"

#include <algorithm>
#include <iterator>

#include "core/backend/cuda/gpu_context.h"

namespace offcore::cuda {
namespace {

constexpr uint32_t kReduceThreads = 1024;
constexpr uint64_t kReduceUnit = 16;  // bytes that a thread takes at once

constexpr struct {
  const char* name;
  const char* ptx;
} kPtx[] = {
#include "core/backend/cuda/kernels/reduce_ptx.inc"
};

enum KernelOperation : uint32_t { kSum, kMin, kMax };

// As kernels/reduce.cu has it.
struct KernelArguments {
  uint64_t dst;
  uint64_t src;
  uint64_t step;
  uint64_t own;
  double scale;
  uint64_t count;
  uint32_t rows;
  uint32_t at;
  uint32_t operation;
  uint32_t divisor;
};
static_assert(sizeof(KernelArguments) == 64);

bool is_copy(const KernelReduction& what) { return what.rows == 1 && what.at >= what.rows; }

std::string name_of(const Reduction& reduction) {
  return cat("offcore_reduce_", to_string(reduction.dtype));
}

}  // namespace

ReduceKernels::ReduceKernels(std::shared_ptr<const PrimaryContext> context)
    : context_(std::move(context)) {}

ReduceKernels::~ReduceKernels() {
  const ContextGuard current(context_->handle());
  for (const auto& [name, kernel] : kernels_) Driver::get().cuModuleUnload(kernel.module);
}

CUfunction ReduceKernels::kernel(const std::string& name) const {
  const std::scoped_lock lock(mutex_);
  if (const auto known = kernels_.find(name); known != kernels_.end())
    return known->second.function;
  const auto found = std::find_if(std::begin(kPtx), std::end(kPtx),
                                  [&](const auto& one) { return one.name == name; });
  const Driver& driver = Driver::get();
  const CaptureGuard relaxed;
  const ContextGuard current(context_->handle());
  Kernel kernel;
  check(
      driver.cuModuleLoadData(&kernel.module, found->ptx),
      "cuModuleLoadData (reductions need a GPU of compute capability 8.0 or more, and the driver's "
      "own compiler of PTX, libnvidia-ptxjitcompiler)");
  const CUresult result = driver.cuModuleGetFunction(&kernel.function, kernel.module, name.c_str());
  if (result != kSuccess) driver.cuModuleUnload(kernel.module);
  check(result, "cuModuleGetFunction");
  kernels_.emplace(name, kernel);
  return kernel.function;
}

void ReduceKernels::prepare(const Reduction& reduction) const {
  // A function may be loaded by its first launch only: one of no elements, while nothing waits.
  const ContextGuard current(context_->handle());
  const CaptureGuard relaxed;
  const CudaStream stream(context_);
  KernelArguments nothing{.rows = 1, .at = 1, .divisor = 1};
  void* arguments[] = {&nothing};
  for (const std::string& name : {name_of(reduction), std::string("offcore_copy")}) {
    {
      const std::scoped_lock lock(mutex_);
      if (kernels_.contains(name)) continue;
    }
    check(Driver::get().cuLaunchKernel(kernel(name), 1, 1, 1, kReduceThreads, 1, 1, 0,
                                       stream.handle(), arguments, nullptr),
          "cuLaunchKernel");
  }
}

uint32_t ReduceKernels::launch(const Reduction& reduction, const KernelReduction& what,
                               uint32_t sms, CUstream stream) const {
  const bool copies = is_copy(what);
  const uint64_t size = copies ? 1 : size_of(reduction.dtype);
  const bool avg = reduction.op == ReduceOp::avg;
  KernelArguments arguments{.dst = what.dst,
                            .src = what.src,
                            .step = what.step,
                            .own = what.own,
                            .scale = reduction.scale,
                            .count = what.bytes / size,
                            .rows = what.rows,
                            .at = what.at,
                            .operation = reduction.op == ReduceOp::min   ? kMin
                                         : reduction.op == ReduceOp::max ? kMax
                                                                         : kSum,
                            .divisor = avg ? what.rows : 1};
  void* pointers[] = {&arguments};
  const uint64_t blocks = (what.bytes / kReduceUnit + kReduceThreads) / kReduceThreads;
  const auto grid = static_cast<uint32_t>(std::min<uint64_t>(sms, blocks));
  check(Driver::get().cuLaunchKernel(kernel(copies ? "offcore_copy" : name_of(reduction)), grid, 1,
                                     1, kReduceThreads, 1, 1, 0, stream, pointers, nullptr),
        "cuLaunchKernel");
  return grid;
}

}  // namespace offcore::cuda
