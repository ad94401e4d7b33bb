// One GPU as a local rank uses it: its primary context, a service stream for what is no part of a
// program, a pool of events, and words of its own that signals are copied from.
#pragma once
#include <memory>
#include <mutex>
#include <vector>

#include "core/backend/backend.h"
#include "core/backend/cuda/driver.h"

namespace offcore::cuda {

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
  explicit CudaStream(std::shared_ptr<const PrimaryContext> context);
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

class DualEngine;
class CopyKernel;
class Allocation;
class EngineAlias;

class Device final : public Port {
 public:
  Device(Rank rank, int ordinal);
  ~Device() override;

  Rank rank() const { return rank_; }
  int ordinal() const { return context_->ordinal(); }
  int device() const override { return ordinal(); }
  const std::shared_ptr<const PrimaryContext>& context() const { return context_; }
  ContextGuard current() const { return ContextGuard(context_->handle()); }
  CudaEvent event(bool timed = false) const { return CudaEvent(events_, timed); }
  std::unique_ptr<CudaStream> stream() const { return std::make_unique<CudaStream>(context_); }

  bool works() const;  // false: the GPU has failed, and so does every later call

  // These return when it is done; they use the service stream alone. Throw driver.
  void copy(void* dst, const void* src, uint64_t bytes) const override;
  bool copy(const StridedCopy& rows) const;  // false: the driver refuses it
  void zero(CUdeviceptr dst, uint64_t bytes) const;
  void write_words(const std::vector<CUdeviceptr>& words, uint32_t value) const;

  // Loads the kernel that copies between the host and this GPU instead of engines (copy_kernel.h).
  void load_gather();
  const CopyKernel* gather() const { return gather_.get(); }  // null unless loaded

  // Tries copies by the engine of the other direction (dual_engine.h), and keeps what these need.
  // False: not every byte came. Throws unsupported, memory or driver. Not while anything is fed.
  bool cross(const Reach& reach);
  void uncross() { crossing_.reset(); }                           // nor while anything is under way
  const DualEngine* crossing() const { return crossing_.get(); }  // null: there are none

  // Lets copy engines make copies within this GPU, by addresses of that memory of another GPU's
  // (engine_alias.h). Once, before anything is fed. Throws memory or driver.
  void make_alias(std::shared_ptr<const Allocation> foreign);
  const EngineAlias* engine_alias() const {
    return engine_alias_.get();
  }  // null: SMs make such copies

  // Makes the driver copy straight to and from the peer's memory that others have allocated; that
  // of windows it reaches anyhow.
  void reach(const Device& peer) const;

 private:
  void settle() const;

  Rank rank_;
  std::shared_ptr<const PrimaryContext> context_;
  std::shared_ptr<EventPool> events_;
  std::unique_ptr<CudaStream> service_;
  std::unique_ptr<const CopyKernel> gather_;
  std::shared_ptr<const DualEngine> crossing_;
  std::unique_ptr<const EngineAlias> engine_alias_;
  mutable std::mutex mutex_;  // one user of the service stream at a time
};

inline constexpr unsigned kMemOpsMax = 240;  // the driver takes fewer than 256 in a batch

}  // namespace offcore::cuda
