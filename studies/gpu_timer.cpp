#include "studies/gpu_timer.h"

#include <sched.h>

#include <chrono>
#include <thread>

#include "core/backend/cuda/memory.h"

namespace offcore::cuda {
namespace {

constexpr double kLeaveS = 1;             // what is left in the stream at the end
constexpr int64_t kWatchNs = 20'000'000;  // who times by the host's clock sees the end at once

std::shared_ptr<const GpuContext> gpu_at(int ordinal) {
  const int devices = Driver::open().devices();
  if (ordinal < 0 || ordinal >= devices) {
    fail(Code::invalid, "GPU ", ordinal, " does not exist: there are ", devices);
  }
  return GpuContext::of(ordinal);
}

// Whether the event passed before the deadline.
bool passes(const CudaEvent& event, const Deadline& deadline) {
  const int64_t began_ns = now_ns();
  while (!event.passed()) {
    if (deadline.passed()) return false;
    if (now_ns() - began_ns < kWatchNs) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    deadline.listen();
  }
  return true;
}

}  // namespace

GpuTimer::GpuTimer(int ordinal)
    : OfProcess("the GPU timer"),
      gpu_(gpu_at(ordinal)),
      stream_(gpu_->stream()),
      first_(gpu_->event(true)),
      last_(gpu_->event(true)),
      word_(allocate_pinned(gpu_->context(), sizeof(uint32_t))) {}

GpuTimer::~GpuTimer() {
  open();
  try {
    // The word is not taken away from a wait that looks at it.
    const ContextGuard current = gpu_->current();
    last_.record(stream_->handle());
    passes(last_, Deadline::after_s(kLeaveS));
  } catch (const Error&) {  // a failed GPU runs nothing any more
  }
}

void GpuTimer::shut() {
  const ContextGuard current = gpu_->current();
  CUdeviceptr word = 0;
  check(Driver::get().cuMemHostGetDevicePointer(&word, word_.get(), 0),
        "cuMemHostGetDevicePointer");
  CUstreamMemOp wait{.operation = kOpWait32, .address = word, .value = ++turn_, .flags = kWaitGeq};
  check(Driver::get().cuStreamBatchMemOp(stream_->handle(), 1, &wait, 0), "cuStreamBatchMemOp");
}

void GpuTimer::open() {
  std::atomic_ref(*static_cast<uint32_t*>(word_.get()))
      .store(turn_.load(), std::memory_order_release);
}

void GpuTimer::start() {
  const ContextGuard current = gpu_->current();
  first_.record(stream_->handle());
}

void GpuTimer::stop() {
  const ContextGuard current = gpu_->current();
  last_.record(stream_->handle());
}

double GpuTimer::elapsed_us(const Deadline& deadline) const {
  if (!passes(last_, deadline)) {
    fail(Code::timeout, "the timed work on GPU ", gpu_->device(), " did not end within ",
         shown_s(deadline.wait_ns()), " s: a rank did not take part, or a library hangs");
  }
  return last_.us_since(first_);
}

}  // namespace offcore::cuda
