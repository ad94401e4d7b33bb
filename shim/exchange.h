// How the ranks of a NCCL communicator tell each other a few bytes: by its own all-gather. So it
// works on any hosts, and for communicators of any origin.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "core/backend/cuda/gpu_context.h"
#include "shim/nccl.h"

namespace offcore::shim {

class Exchange {
 public:
  static constexpr size_t kTextMax = 6 << 10;

  // Of texts of up to so many bytes. Throws driver, or memory.
  Exchange(Comm comm, Rank rank, Rank ranks, int device, size_t text_max = kTextMax);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  Rank rank() const { return rank_; }
  Rank ranks() const { return ranks_; }
  const cuda::GpuContext& gpu() const { return *gpu_; }
  // Every rank's text, by rank; longer ones are cut. Collective: waits for the others as long as
  // NCCL does. Throws driver, peer where NCCL fails, and cancelled.
  std::vector<std::string> all_gather(std::string text);
  // Ends what waits, and what comes: NCCL's communicator is about to go.
  void cancel() { cancelled_ = true; }

 private:
  void check_comm() const;

  Comm comm_;
  Rank rank_;
  Rank ranks_;
  size_t text_max_;
  size_t slot_bytes_;
  std::shared_ptr<const cuda::GpuContext> gpu_;
  std::unique_ptr<cuda::CudaStream> stream_;
  std::atomic<bool> cancelled_{false};
  cuda::CUdeviceptr memory_ = 0;  // ranks_ slots, and this rank's own behind them
};

}  // namespace offcore::shim
