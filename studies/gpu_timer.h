// Times work on one GPU as the GPU runs it. The work is enqueued behind a gate, so that the host's
// own share is over when it begins, and between two events, so that the host's noticing the end is
// left out. What is enqueued while the gate is shut must fit the stream's queue: a caller opens the
// gate from another thread when its enqueuing does not come back.
#pragma once
#include <atomic>
#include <memory>

#include "core/backend/cuda/gpu_context.h"
#include "core/base/clock.h"

namespace offcore::cuda {

class GpuTimer : public OfProcess {
 public:
  // `ordinal`: the GPU, as the driver counts. Throws unavailable, invalid or driver.
  explicit GpuTimer(int ordinal);
  ~GpuTimer();  // opens the gate
  GpuTimer(const GpuTimer&) = delete;
  GpuTimer& operator=(const GpuTimer&) = delete;

  CUstream stream() const { return stream_->handle(); }
  void shut();   // what is enqueued from now on waits for open()
  void open();   // from any thread; calls no driver
  void start();  // the time runs from where the stream is now
  void stop();
  // Once the stream has passed stop(). Throws timeout.
  double elapsed_us(const Deadline& deadline) const;

 private:
  std::shared_ptr<const GpuContext> gpu_;
  std::unique_ptr<CudaStream> stream_;
  CudaEvent first_;
  CudaEvent last_;
  std::shared_ptr<void> word_;  // in pinned host memory, so that opening needs no driver
  std::atomic<uint32_t> turn_{0};
};

}  // namespace offcore::cuda
