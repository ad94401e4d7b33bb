// Addresses by which a copy engine makes copies within a GPU.
//
// The driver has SMs copy what begins and ends in one GPU's memory, and a batch that asks it to
// prefer overlap is no exception. It judges by the base address of each side. So one side's base is
// given as another GPU's memory, from which whole pitches and a rest lead to the address meant: by
// arithmetic modulo 2^64, so that it may lie above the base or below.
//
// Two rules of the driver (2 x H100, driver 580; benchmarks/results/cuda-h100-2-engine-alias.txt):
// - As many bytes as the row has must be mapped behind the base, else it refuses the copy.
// - They must be one GPU's, else the copy runs at 94 GB/s instead of 545.
// So one part of another GPU's memory is mapped again and again, and wider rows go in pieces.
// Nothing behind the base is read or written.
#pragma once
#include "core/backend/cuda/memory.h"

namespace offcore::cuda {

class EngineAlias {
 public:
  // Throws memory or driver.
  EngineAlias(const GpuContext& gpu, std::shared_ptr<const Allocation> foreign);

  // Addresses the first bytes of a copy within the GPU so; the result's width says how many.
  CUmemcpy2D first(CUdeviceptr dst, CUdeviceptr src, uint64_t bytes) const;

 private:
  AddressRange range_;
};

}  // namespace offcore::cuda
