// Addresses by which a copy engine makes copies within a GPU.
//
// The driver has SMs copy what begins and ends in one GPU's memory, and a batch that asks it to
// prefer overlap is no exception. It judges by the base address of each side. So one side's base is
// given as other memory, another GPU's or the host's, from which whole pitches and a rest lead to
// the address meant: by arithmetic modulo 2^64, so that it may lie above the base or below.
//
// Two rules of the driver (2 x H100, driver 580; benchmarks/results/cuda-h100-2-engine-alias.txt):
// - As many bytes as the row has must be mapped behind the base, else it refuses the copy.
// - They must be one GPU's, else the copy runs at 94 GB/s instead of 545.
// So one part of that memory is mapped again and again, and wider rows go in pieces. Nothing behind
// the base is read or written.
#pragma once
#include "core/backend/cuda/memory.h"

namespace offcore::cuda {

class EngineAlias {
 public:
  static constexpr uint64_t kRowMax = uint64_t{64} << 20;  // of it 2 % is lost to its own start
  enum class Side : uint8_t { dst, src };

  // `side`: the one that is addressed so, in rows of up to `row_max`. Throws memory or driver.
  EngineAlias(const GpuContext& gpu, const std::shared_ptr<const Allocation>& other,
              Side side = Side::dst, uint64_t row_max = kRowMax);

  // Addresses the first bytes of a copy within the GPU so; the result's width says how many.
  CUmemcpy2D first(CUdeviceptr dst, CUdeviceptr src, uint64_t bytes) const;

 private:
  Side side_;
  uint64_t row_max_;
  AddressRange range_;
};

}  // namespace offcore::cuda
