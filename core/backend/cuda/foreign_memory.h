// Windows of memory that others have allocated: what lies behind a share before the window is
// mapped, and how a peer imports it.
//
// VMM memory is taken by its allocations: each is retained, and exported as a descriptor. What
// cuMemAlloc gave has no allocations to take: other processes open it by IPC, and this one has its
// address. Nothing else can be taken.
//
// Nobody believes an address: its owner may have freed the memory and got other memory there. An
// allocation that is retained is known by its handle, cuMemAlloc's by its buffer's number.
#pragma once
#include <memory>
#include <string_view>
#include <vector>

#include "core/backend/backend.h"
#include "core/backend/cuda/memory.h"

namespace offcore::cuda {

// What owns a share until its window is mapped; and afterwards, where that has no stride.
struct ShareMemory {
  RankMemory memory;                    // VMM
  std::unique_ptr<AddressRange> range;  // this process's own mapping of it, if it has one
  // Of a peer's allocations, in their order: those still to come have no descriptor yet.
  std::vector<uint64_t> sizes;
  CUdeviceptr plain = 0;         // of cuMemAlloc: where this process reaches it; 0: VMM memory
  int ordinal = -1;              // of its GPU, where it is this process's own
  std::shared_ptr<void> opened;  // by IPC

  // Maps it for these devices, and tells where the rank's memory begins.
  CUdeviceptr map(std::span<const std::shared_ptr<LocalGpu>> local);
};

// A local rank's. `exported`: for other processes. Throws invalid, for what does not lie on the
// rank's GPU, or unsupported.
Share hold_foreign(Rank rank, const std::shared_ptr<const GpuContext>& gpu, std::byte* data,
                   uint64_t bytes, std::shared_ptr<void> keep, bool exported);
// A peer's. Throws driver.
Share import_foreign(Rank rank, const GpuContext& gpu, uint64_t bytes, std::string_view layout);
void import_foreign_part(Share& share, const GpuContext& gpu, Descriptor part);

// Whether they can be mapped at one constant stride.
bool strided(std::span<const Share> shares);

}  // namespace offcore::cuda
