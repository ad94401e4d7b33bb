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

// Both as kernels/reduce.cu has them.
struct JobArguments {
  uint64_t dst, src, step, own, bytes;
  uint64_t wait[ReduceKernelJob::kWordsMax];
  uint64_t signal[ReduceKernelJob::kWordsMax];
  uint32_t wait_value[ReduceKernelJob::kWordsMax];
  uint32_t signal_value[ReduceKernelJob::kWordsMax];
  uint32_t waits, signals, rows, at;
};
struct KernelArguments {
  double scale;
  uint64_t counters;
  uint32_t operation, averages, jobs, pad;
  JobArguments job[ReduceKernels::kJobsMax];
};
static_assert(sizeof(JobArguments) == 248 && sizeof(KernelArguments) == 3752);

JobArguments arguments_of(const ReduceKernelJob& job) {
  JobArguments arguments{.dst = job.dst,
                         .src = job.src,
                         .step = job.step,
                         .own = job.own,
                         .bytes = job.bytes,
                         .waits = static_cast<uint32_t>(job.waits.size()),
                         .signals = static_cast<uint32_t>(job.signals.size()),
                         .rows = job.rows,
                         .at = job.at};
  for (size_t i = 0; i < job.waits.size(); ++i) {
    arguments.wait[i] = job.waits[i].first;
    arguments.wait_value[i] = job.waits[i].second;
  }
  for (size_t i = 0; i < job.signals.size(); ++i) {
    arguments.signal[i] = job.signals[i].first;
    arguments.signal_value[i] = job.signals[i].second;
  }
  return arguments;
}

}  // namespace

ReduceKernels::ReduceKernels(std::shared_ptr<const PrimaryContext> context)
    : context_(std::move(context)) {}

CUfunction ReduceKernels::kernel(DType dtype) const {
  const std::scoped_lock lock(mutex_);
  if (const auto known = kernels_.find(dtype); known != kernels_.end()) {
    return known->second.function();
  }
  const std::string name = cat("offcore_reduce_", to_string(dtype));
  const auto found = std::find_if(std::begin(kPtx), std::end(kPtx),
                                  [&](const auto& one) { return one.name == name; });
  const CaptureGuard relaxed;
  const auto [kernel, made] =
      kernels_.try_emplace(dtype, context_, found->ptx, found->name,
                           "reductions need a GPU of compute capability 8.0 or more, and the "
                           "driver's own compiler of PTX, libnvidia-ptxjitcompiler");
  KernelArguments nothing{};
  try {
    kernel->second.warm_up(kReduceThreads, &nothing);
  } catch (const Error&) {
    kernels_.erase(kernel);
    throw;
  }
  return kernel->second.function();
}

void ReduceKernels::prepare(const Reduction& reduction) const { kernel(reduction.dtype); }

uint32_t ReduceKernels::launch(const Reduction& reduction, std::span<const ReduceKernelJob> jobs,
                               CUdeviceptr counters, uint32_t sms, CUstream stream) const {
  KernelArguments arguments{.scale = reduction.scale,
                            .counters = counters,
                            .operation = reduction.op == ReduceOp::min   ? kMin
                                         : reduction.op == ReduceOp::max ? kMax
                                                                         : kSum,
                            .averages = reduction.op == ReduceOp::avg,
                            .jobs = static_cast<uint32_t>(jobs.size())};
  uint64_t blocks = 1;
  for (size_t i = 0; i < jobs.size(); ++i) {
    arguments.job[i] = arguments_of(jobs[i]);
    blocks = std::max(blocks, (jobs[i].bytes / kReduceUnit + kReduceThreads) / kReduceThreads);
  }
  void* pointers[] = {&arguments};
  const auto grid = static_cast<uint32_t>(std::min<uint64_t>(sms, blocks));
  check(Driver::get().cuLaunchKernel(kernel(reduction.dtype), grid, 1, 1, kReduceThreads, 1, 1, 0,
                                     stream, pointers, nullptr),
        "cuLaunchKernel");
  return grid;
}

}  // namespace offcore::cuda
