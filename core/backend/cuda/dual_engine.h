// Addresses by which the engine of the other direction makes copies between the host and a GPU.
//
// A driver gives a copy to the engine of the direction that its base addresses have, and goes from
// there by whole pitches to where rows begin, however many, modulo 2^64 (H100 and H200, driver
// 580). So a copy of the host's rows to the GPU is made by the engine for the way back if its
// destination's base is memory of the host and its source's the GPU's. An engine pauses after each
// copy: while one does, the other one keeps the link busy.
//
// Wanted is memory behind a base, mapped, as far as the rows' pitches go: a piece of it is, again
// and again. Nothing of it is read or written, but for the trial. The host's has to come from
// cuMemCreate; registered, pinned and managed memory is refused. Submitting a copy takes 0.1 us
// longer for each piece that lies behind its base.
#pragma once
#include "core/backend/cuda/memory.h"

namespace offcore::cuda {

class DualEngine {
 public:
  // Throws unsupported where they would cost too much, memory or driver.
  DualEngine(const GpuContext& gpu, const Reach& reach);

  // Addresses a copy between the host and the GPU so. False: it stays as it is, because its rows
  // reach too far.
  bool turn(StridedCopy& rows) const;
  // Whether each byte comes, in both directions, in memory of its own. Throws driver.
  bool works(const GpuContext& gpu);

 private:
  // From where so many pitches lead to an address.
  struct Origin {
    CUdeviceptr at = 0;  // 0: from nowhere
    uint64_t pitches = 0;
  };
  Origin before(CUdeviceptr meant, uint64_t pitch, uint32_t rows, bool host) const;

  uint64_t gpu_bytes_;   // of addresses, behind those of the host's memory
  uint64_t step_;        // of the trial: the widest of the rows, or past all those
  uint64_t host_bytes_;  // of addresses, from the first on
  AddressRange range_;
  std::shared_ptr<void> tried_;  // kept: to give pinned memory back waits for the whole GPU
};

}  // namespace offcore::cuda
