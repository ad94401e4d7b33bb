// Holds every SM of GPUs, so that what still ends cannot have used one.
//
// Blocks of a kernel that only waits fill all places for threads. A control kernel is launched
// behind them: as long as it has not run, there was no room on any SM, not for one block. The
// blocks go when told, or by themselves at the limit.
#pragma once
#include <memory>
#include <vector>

#include "studies/proof/resident.h"

namespace offcore::cuda {

class Occupation : public OfProcess {
 public:
  // Returns once every SM of every device is full and the control kernels are launched. Throws
  // driver when the blocks do not all start, as where something else is on the GPU.
  Occupation(const std::vector<int>& ordinals, double limit_s);
  ~Occupation();  // releases
  Occupation(const Occupation&) = delete;
  Occupation& operator=(const Occupation&) = delete;

  uint32_t blocks() const { return blocks_; }
  // Whether a control kernel has run: then some SM had room.
  bool control_ran() const;
  // Whether the blocks are all still there: not gone at the limit, not released.
  bool holds() const;
  // Lets the blocks go and waits for them; whether the control kernels ran then. Throws driver.
  bool release();

 private:
  struct OccupiedGpu {
    std::shared_ptr<const GpuContext> gpu;
    std::unique_ptr<CudaStream> blocks;
    std::unique_ptr<CudaStream> control;
    std::unique_ptr<Kernels> kernels;
    uint32_t count = 0;  // blocks
    uint32_t at = 0;     // its words among `words_`
  };

  CUdeviceptr address(const OccupiedGpu& seat, uint32_t word) const;
  uint32_t read(uint32_t word) const;
  void fill(double limit_s);
  void let_go();
  void warm_up(const OccupiedGpu& seat) const;
  bool wait_idle(double limit_s) const;

  std::vector<OccupiedGpu> seats_;
  std::shared_ptr<void> words_;  // host memory: stop; then a seat's control word and blocks' states
  uint32_t blocks_ = 0;
  bool released_ = false;
};

}  // namespace offcore::cuda
