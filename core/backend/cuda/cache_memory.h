// GPU memory for KV caches with a tensor a layer, so that one strided copy goes over all of them:
// in one reserved range of addresses, at equal steps. A pool gives such memory to an allocator;
// tensors in VMM memory that others have allocated are mapped there once more.
#pragma once
#include <list>
#include <optional>
#include <vector>

#include "core/backend/cuda/memory.h"

namespace offcore::cuda {

// Physical memory for each part, at the first free addresses: parts of one size that are taken one
// after the other are at equal steps. Callers lock.
class CachePool {
 public:
  // `bytes`: of addresses; 0: twice the GPU's memory. Throws unavailable or driver.
  CachePool(int ordinal, uint64_t bytes);

  // Null: the addresses or the GPU's memory are full.
  std::byte* take(uint64_t bytes);
  // Its memory goes once all that the GPU has been given so far is through, for which this waits a
  // moment. Who used it nobody can say: a driver may crash where a stream is named that is gone.
  void give(std::byte* part);
  // Memory that may still be in use is taken. Throws driver.
  uint64_t taken_bytes() {
    sweep();
    return taken_;
  }

 private:
  struct LeavingPart {
    uint64_t offset;
    uint64_t bytes;
    std::optional<CudaEvent> through;  // none: the driver has refused it, as while it captures
  };
  bool through(LeavingPart& part);
  void sweep();

  std::shared_ptr<const GpuContext> gpu_;
  AddressRange range_;
  uint64_t taken_ = 0;
  std::map<uint64_t, uint64_t> parts_;  // bytes, by offset
  std::list<LeavingPart> leaving_;
};

// The memory of tensors at equal steps.
class TensorsAtSteps final : public MappedAgain {
 public:
  // Null where something is not in VMM memory, or begins at another place of a granule than the
  // others. Throws driver or memory.
  static std::unique_ptr<TensorsAtSteps> map(const GpuContext& gpu,
                                             std::span<const MemoryExtent> tensors);

  std::byte* at(size_t tensor) const override;
  bool intact() const override;

 private:
  TensorsAtSteps(const GpuContext& gpu, std::vector<RankMemory> memories,
                 std::span<const MemoryExtent> tensors, const StrideLayout& layout);

  std::vector<RankMemory> memories_;
  std::vector<CUdeviceptr> owners_;  // where the tensors' owners have them
  StrideLayout layout_;
  AddressRange range_;
};

}  // namespace offcore::cuda
