// One GPU of this process: communicators, batches, KV transfers and proofs all use the same one,
// the local ranks of a group by local_gpu.h. It owns the primary context, a service stream for what
// is no part of a program, idle streams, a pool of events and its kernels, and lives as long as
// anybody holds it.
#pragma once
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "core/backend/backend.h"
#include "core/backend/cuda/driver.h"

namespace offcore::cuda {

inline constexpr uint64_t kGranule = uint64_t{2} << 20;  // what memory is mapped in, at least
inline constexpr uint64_t kPitchMax = (uint64_t{1} << 31) - 1;
inline constexpr uint64_t kSlice = uint64_t{1} << 30;  // what wider strides are whole numbers of

// A pitch beyond the limit is that of slices of a box, each so many rows of a pitch within it: that
// number, or 0 where no power of two is one.
uint64_t rows_of_slice(uint64_t pitch);

// Rows at constant steps, of pitches that have such a number: one command of a copy engine.
struct StridedCopy {
  CUdeviceptr dst = 0;
  uint64_t dst_pitch = 0;
  CUdeviceptr src = 0;
  uint64_t src_pitch = 0;
  uint64_t bytes = 0;  // of a row
  uint32_t rows = 0;
  // One of them, where the other side is a GPU's: the driver, told so, need not look addresses up.
  bool dst_host = false;
  bool src_host = false;
  uint64_t dst_ahead = 0;  // pitches from `dst` to where the first row goes
  uint64_t src_ahead = 0;
};
CUresult copy_rows(const StridedCopy& rows, CUstream stream);

// What a GPU does not let go of: it lives as long as the process.
void keep_for_good(std::shared_ptr<void> held);

// A retained primary context, which CUDA's runtime and torch use too.
class PrimaryContext {
 public:
  explicit PrimaryContext(int ordinal);
  ~PrimaryContext();
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;
  CUcontext handle() const { return handle_; }
  int ordinal() const { return ordinal_; }

 private:
  int ordinal_;
  CUdevice device_ = 0;
  CUcontext handle_ = nullptr;
};

// A non-blocking stream.
class CudaStream {
 public:
  // `urgent`: its kernels begin before those of others that wait for an SM too.
  explicit CudaStream(std::shared_ptr<const PrimaryContext> context, bool urgent = false);
  ~CudaStream();
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  CUstream handle() const { return handle_; }

 private:
  std::shared_ptr<const PrimaryContext> context_;
  CUstream handle_ = nullptr;
};

// Events that are used again and again. Without timing, unless a program has timestamps.
class EventPool {
 public:
  explicit EventPool(std::shared_ptr<const PrimaryContext> context)
      : context_(std::move(context)) {}
  ~EventPool();
  CUevent take(bool timed);
  void give(CUevent event, bool timed);
  ContextGuard current() const { return ContextGuard(context_->handle()); }

 private:
  std::shared_ptr<const PrimaryContext> context_;
  std::mutex mutex_;
  std::vector<CUevent> free_[2];  // [timed]
};

// An event of the pool, given back at the end.
class CudaEvent {
 public:
  explicit CudaEvent(std::shared_ptr<EventPool> pool, bool timed = false)
      : pool_(std::move(pool)), timed_(timed), handle_(pool_->take(timed)) {}
  ~CudaEvent() {
    if (pool_) pool_->give(handle_, timed_);
  }
  CudaEvent(CudaEvent&&) = default;
  CudaEvent& operator=(CudaEvent&&) = delete;
  CUevent handle() const { return handle_; }
  void record(CUstream stream) const {
    check(Driver::get().cuEventRecord(handle_, stream), "cuEventRecord");
  }
  // Makes the stream wait for what was recorded last.
  void enqueue_wait(CUstream stream) const {
    check(Driver::get().cuStreamWaitEvent(stream, handle_, 0), "cuStreamWaitEvent");
  }
  bool passed() const;                            // throws driver when the device has failed
  double us_since(const CudaEvent& first) const;  // both timed, and passed

 private:
  std::shared_ptr<EventPool> pool_;
  bool timed_;
  CUevent handle_;
};

class CopyKernel;
class PackKernel;
class ReduceKernels;
class SpareEngines;

class GpuContext final : public Port {
 public:
  // The process's, made by whoever asks first. Throws driver.
  static std::shared_ptr<const GpuContext> of(int ordinal);
  ~GpuContext() override;
  GpuContext(const GpuContext&) = delete;
  GpuContext& operator=(const GpuContext&) = delete;

  int device() const override { return context_->ordinal(); }
  const std::shared_ptr<const PrimaryContext>& context() const { return context_; }
  ContextGuard current() const { return ContextGuard(context_->handle()); }
  ContextGuard enqueuing() const { return ContextGuard(context_->handle(), Under::enqueuing); }
  CudaEvent event(bool timed = false) const { return CudaEvent(events_, timed); }
  std::unique_ptr<CudaStream> stream(bool urgent = false) const {
    return std::make_unique<CudaStream>(context_, urgent);
  }
  // One with nothing in it, and giving it back when that is so again.
  std::unique_ptr<CudaStream> take_idle_stream() const;
  void give_idle_stream(std::unique_ptr<CudaStream> stream) const;

  bool works() const;  // false: the GPU has failed, and so does every later call
  // Whether the stream is empty by then. Throws driver where the GPU has failed.
  bool idle_by(const Deadline& deadline, CUstream stream) const;

  // What a service worked on that has thrown: it may be under way still, and then finds that there.
  void keep_if_served(std::shared_ptr<void> memory) const;

  // These return when it is done; they use the service stream alone. Throw driver.
  void copy(void* dst, const void* src, uint64_t bytes) const override;
  bool copy(const StridedCopy& rows) const;      // false: the driver refuses it
  bool copy(const CUmemcpy2D& rectangle) const;  // likewise
  void zero(CUdeviceptr dst, uint64_t bytes) const;
  // By way of pinned memory: other memory of the host holds its caller until an engine is free.
  void read(void* dst, const void* src, uint64_t bytes) const;
  void write_words(const std::vector<CUdeviceptr>& words, uint32_t value) const;

  // The kernel that copies between the host and this GPU instead of engines (copy_kernel.h), loaded
  // by whoever asks first. Throws unsupported or driver.
  const CopyKernel& copy_kernel() const;

  // The kernel that packs pages on this GPU (pack_kernel.h), loaded by whoever asks first. Throws
  // driver.
  const PackKernel& pack_kernel() const;

  // The kernels that reduce on this GPU, made by whoever asks first.
  const ReduceKernels& reduce_kernels() const;

  // The engines that are free beside copies to other GPUs (spare_engines.h), tried by whoever asks
  // first. Null: there are none, or others' copies have kept them busy until now. Throws driver.
  const SpareEngines* spare_engines() const;

  // Makes the driver copy straight to and from the peer's memory that others have allocated; that
  // of windows it reaches anyhow.
  void reach(const GpuContext& peer) const;

 private:
  explicit GpuContext(int ordinal);
  void settle() const;
  bool completed(CUresult result, const char* what) const;

  std::shared_ptr<const PrimaryContext> context_;
  std::shared_ptr<EventPool> events_;
  std::unique_ptr<CudaStream> service_;
  mutable std::mutex mutex_;  // one user at a time of the service stream, and of what is read into
  mutable std::shared_ptr<void> pinned_;  // null: nothing was read
  mutable std::mutex kept_mutex_;         // of what is below
  mutable std::vector<std::unique_ptr<CudaStream>> idle_;
  mutable std::unique_ptr<const CopyKernel> copy_kernel_;
  mutable std::unique_ptr<const PackKernel> pack_kernel_;
  mutable std::unique_ptr<const ReduceKernels> reduce_kernels_;
  mutable std::mutex spare_mutex_;  // of what is below: its holder may wait for the GPU
  mutable std::optional<std::shared_ptr<SpareEngines>> spare_engines_;
};

inline constexpr unsigned kMemOpsMax = 240;  // the driver takes fewer than 256 in a batch

}  // namespace offcore::cuda
