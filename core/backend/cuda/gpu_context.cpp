#include "core/backend/cuda/gpu_context.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <map>
#include <thread>

#include "core/backend/cuda/copy_kernel.h"
#include "core/backend/cuda/pack_kernel.h"
#include "core/backend/cuda/reduce_kernel.h"
#include "core/backend/cuda/spare_engines.h"
#include "core/base/clock.h"
#include "core/base/fork.h"

namespace offcore::cuda {
namespace {

constexpr double kServiceWaitS = 5;
constexpr uint64_t kPinnedBytes = 4096;

template <typename Copy>
void tell_memories(const StridedCopy& rows, Copy& copy) {
  if (rows.dst_host == rows.src_host) return;
  copy.dst_type = rows.dst_host ? kHostMemoryType : kDeviceMemory;
  copy.src_type = rows.src_host ? kHostMemoryType : kDeviceMemory;
  if (rows.dst_host) copy.dst_host = reinterpret_cast<void*>(rows.dst);
  if (rows.src_host) copy.src_host = reinterpret_cast<const void*>(rows.src);
}

}  // namespace

uint64_t rows_of_slice(uint64_t pitch) {
  uint64_t rows = 1;
  while (pitch / rows > kPitchMax) rows *= 2;
  return pitch % rows == 0 ? rows : 0;
}

CUresult copy_rows(const StridedCopy& rows, CUstream stream) {
  if (std::max(rows.dst_pitch, rows.src_pitch) <= kPitchMax) {
    CUmemcpy2D rectangle{.src_y = rows.src_ahead,
                         .src = rows.src,
                         .src_pitch = rows.src_pitch,
                         .dst_y = rows.dst_ahead,
                         .dst = rows.dst,
                         .dst_pitch = rows.dst_pitch,
                         .width = rows.bytes,
                         .height = rows.rows};
    tell_memories(rows, rectangle);
    return Driver::get().cuMemcpy2DAsync(&rectangle, stream);
  }
  const uint64_t src_height = rows_of_slice(rows.src_pitch);
  const uint64_t dst_height = rows_of_slice(rows.dst_pitch);
  CUmemcpy3D box{.src_z = rows.src_ahead,
                 .src = rows.src,
                 .src_pitch = rows.src_pitch / src_height,
                 .src_height = src_height,
                 .dst_z = rows.dst_ahead,
                 .dst = rows.dst,
                 .dst_pitch = rows.dst_pitch / dst_height,
                 .dst_height = dst_height,
                 .width = rows.bytes,
                 .height = 1,
                 .depth = rows.rows};
  tell_memories(rows, box);
  return Driver::get().cuMemcpy3DAsync(&box, stream);
}

void keep_for_good(std::shared_ptr<void> held) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<void>>;
  const std::scoped_lock lock(mutex);
  kept->push_back(std::move(held));
}

PrimaryContext::PrimaryContext(int ordinal) : ordinal_(ordinal) {
  const CaptureGuard relaxed;
  const Driver& driver = Driver::get();
  check(driver.cuDeviceGet(&device_, ordinal), cat("cuDeviceGet of device ", ordinal));
  check(driver.cuDevicePrimaryCtxRetain(&handle_, device_),
        cat("cuDevicePrimaryCtxRetain of device ", ordinal));
}

PrimaryContext::~PrimaryContext() {
  const CaptureGuard relaxed;
  Driver::get().cuDevicePrimaryCtxRelease(device_);
}

CudaStream::CudaStream(std::shared_ptr<const PrimaryContext> context, bool urgent)
    : context_(std::move(context)) {
  const ContextGuard current(context_->handle());
  check(Driver::get().cuStreamCreateWithPriority(&handle_, kStreamNonBlocking,
                                                 urgent ? kMostUrgent : 0),
        "cuStreamCreateWithPriority");
}

CudaStream::~CudaStream() {
  const ContextGuard current(context_->handle());
  Driver::get().cuStreamDestroy(handle_);
}

EventPool::~EventPool() {
  const ContextGuard current(context_->handle());
  for (const auto& events : free_) {
    for (CUevent event : events) Driver::get().cuEventDestroy(event);
  }
}

CUevent EventPool::take(bool timed) {
  {
    const std::scoped_lock lock(mutex_);
    if (!free_[timed].empty()) {
      const CUevent event = free_[timed].back();
      free_[timed].pop_back();
      return event;
    }
  }
  const ContextGuard current(context_->handle());
  CUevent event = nullptr;
  check(Driver::get().cuEventCreate(&event, timed ? kEventDefault : kEventDisableTiming),
        "cuEventCreate");
  return event;
}

void EventPool::give(CUevent event, bool timed) {
  const std::scoped_lock lock(mutex_);
  free_[timed].push_back(event);
}

bool CudaEvent::passed() const {
  const ContextGuard current = pool_->current();
  const CUresult result = Driver::get().cuEventQuery(handle_);
  if (result == kNotReady) return false;
  check(result, "a GPU failed: cuEventQuery");
  return true;
}

double CudaEvent::us_since(const CudaEvent& first) const {
  const ContextGuard current = pool_->current();
  float ms = 0;
  check(Driver::get().cuEventElapsedTime(&ms, first.handle(), handle_), "cuEventElapsedTime");
  return double{ms} * 1e3;
}

std::shared_ptr<const GpuContext> GpuContext::of(int ordinal) {
  struct Contexts {
    std::mutex mutex;
    std::map<int, std::weak_ptr<const GpuContext>> open;
  };
  static PerProcess<Contexts> contexts;
  Contexts& all = contexts.get();
  const std::scoped_lock lock(all.mutex);
  std::weak_ptr<const GpuContext>& place = all.open[ordinal];
  std::shared_ptr<const GpuContext> found = place.lock();
  if (found == nullptr) {
    found.reset(new GpuContext(ordinal));
    place = found;
  }
  return found;
}

GpuContext::GpuContext(int ordinal)
    : context_(std::make_shared<const PrimaryContext>(ordinal)),
      events_(std::make_shared<EventPool>(context_)),
      service_(std::make_unique<CudaStream>(context_)) {}

GpuContext::~GpuContext() {
  if (spare_engines_ && *spare_engines_ && (*spare_engines_)->under_trial()) {
    keep_for_good(*spare_engines_);
  }
}

std::unique_ptr<CudaStream> GpuContext::take_idle_stream() const {
  const std::scoped_lock lock(kept_mutex_);
  if (idle_.empty()) return stream();
  std::unique_ptr<CudaStream> idle = std::move(idle_.back());
  idle_.pop_back();
  return idle;
}

void GpuContext::give_idle_stream(std::unique_ptr<CudaStream> stream) const {
  const std::scoped_lock lock(kept_mutex_);
  idle_.push_back(std::move(stream));
}

const CopyKernel& GpuContext::copy_kernel() const {
  const std::scoped_lock lock(kept_mutex_);
  if (copy_kernel_ == nullptr) copy_kernel_ = std::make_unique<const CopyKernel>(context_);
  return *copy_kernel_;
}

const PackKernel& GpuContext::pack_kernel() const {
  const std::scoped_lock lock(kept_mutex_);
  if (pack_kernel_ == nullptr) pack_kernel_ = std::make_unique<const PackKernel>(context_);
  return *pack_kernel_;
}

const ReduceKernels& GpuContext::reduce_kernels() const {
  const std::scoped_lock lock(kept_mutex_);
  if (reduce_kernels_ == nullptr) reduce_kernels_ = std::make_unique<const ReduceKernels>(context_);
  return *reduce_kernels_;
}

const SpareEngines* GpuContext::spare_engines() const {
  const std::scoped_lock lock(spare_mutex_);
  if (!spare_engines_) spare_engines_ = SpareEngines::find(*this);
  return *spare_engines_ && (*spare_engines_)->work(*this) ? spare_engines_->get() : nullptr;
}

bool GpuContext::works() const {
  const ContextGuard here = current();
  const CUresult result = Driver::get().cuStreamQuery(service_->handle());
  return result == kSuccess || result == kNotReady;
}

bool GpuContext::idle_by(const Deadline& deadline, CUstream stream) const {
  const ContextGuard here = current();
  for (uint32_t looks = 0;; ++looks) {
    const CUresult result = Driver::get().cuStreamQuery(stream);
    if (result == kSuccess) return true;
    if (result != kNotReady) check(result, "a GPU failed: cuStreamQuery");
    if (deadline.passed()) return false;
    if (looks > 100) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void GpuContext::keep_if_served(std::shared_ptr<void> memory) const {
  const ContextGuard here = current();
  if (Driver::get().cuStreamQuery(service_->handle()) == kNotReady) {
    keep_for_good(std::move(memory));
  }
}

void GpuContext::reach(const GpuContext& peer) const {
  if (peer.device() == device()) return;
  const ContextGuard here = current();
  const CUresult result = Driver::get().cuCtxEnablePeerAccess(peer.context()->handle(), 0);
  if (result == kPeerAccessAlready) return;  // torch may have asked for it too
  check(result, cat("cuCtxEnablePeerAccess of device ", device(), " to ", peer.device()));
}

void GpuContext::settle() const {
  const Deadline deadline = Deadline::after_s(kServiceWaitS);
  if (idle_by(deadline, service_->handle())) return;
  fail(Code::driver, "device ", device(), " did not do a small service within ",
       shown_s(deadline.wait_ns()), " s: is something else holding it?");
}

void GpuContext::zero(CUdeviceptr dst, uint64_t bytes) const {
  const std::scoped_lock lock(mutex_);
  const ContextGuard here = current();
  check(Driver::get().cuMemsetD8Async(dst, 0, bytes, service_->handle()), "cuMemsetD8Async");
  settle();
}

void GpuContext::copy(void* dst, const void* src, uint64_t bytes) const {
  if (bytes == 0) return;
  const std::scoped_lock lock(mutex_);
  const ContextGuard here = current();
  check(Driver::get().cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(dst),
                                    reinterpret_cast<CUdeviceptr>(src), bytes, service_->handle()),
        "cuMemcpyAsync");
  settle();
}

void GpuContext::read(void* dst, const void* src, uint64_t bytes) const {
  const std::scoped_lock lock(mutex_);
  const ContextGuard here = current();
  if (pinned_ == nullptr) pinned_ = allocate_pinned(context_, kPinnedBytes);
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t part = std::min(bytes - done, kPinnedBytes);
    check(Driver::get().cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(pinned_.get()),
                                      reinterpret_cast<CUdeviceptr>(src) + done, part,
                                      service_->handle()),
          "cuMemcpyAsync");
    settle();
    std::memcpy(static_cast<std::byte*>(dst) + done, pinned_.get(), part);
    done += part;
  }
}

bool GpuContext::completed(CUresult result, const char* what) const {
  if (refused(result)) return false;
  check(result, what);
  settle();
  return true;
}

bool GpuContext::copy(const StridedCopy& rows) const {
  const std::scoped_lock lock(mutex_);
  const ContextGuard here = current();
  return completed(copy_rows(rows, service_->handle()), "a copy of rows");
}

bool GpuContext::copy(const CUmemcpy2D& rectangle) const {
  const std::scoped_lock lock(mutex_);
  const ContextGuard here = current();
  return completed(Driver::get().cuMemcpy2DAsync(&rectangle, service_->handle()),
                   "cuMemcpy2DAsync");
}

void GpuContext::write_words(const std::vector<CUdeviceptr>& words, uint32_t value) const {
  std::vector<CUstreamMemOp> ops;
  for (CUdeviceptr word : words) {
    ops.push_back({.operation = kOpWrite32, .address = word, .value = value});
  }
  const std::scoped_lock lock(mutex_);
  const ContextGuard here = current();
  for (size_t at = 0; at < ops.size(); at += kMemOpsMax) {
    const size_t count = std::min<size_t>(kMemOpsMax, ops.size() - at);
    check(Driver::get().cuStreamBatchMemOp(service_->handle(), static_cast<unsigned>(count),
                                           &ops[at], 0),
          "cuStreamBatchMemOp");
  }
  settle();
}

}  // namespace offcore::cuda
