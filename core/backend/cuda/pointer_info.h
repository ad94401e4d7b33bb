// Where memory lies, as the driver tells: for addresses of a caller, which nobody vouches for.
#pragma once
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/backend/cuda/device.h"

namespace offcore::cuda {

inline constexpr int kHostMemory = -1;  // in the place of a GPU's number

// Looks each allocation up once. It may go away as soon as this was asked: so one is for one
// call, and not kept.
class PointerInfo {
 public:
  // `ordinal`: the GPU whose context looks.
  explicit PointerInfo(int ordinal);

  // The GPU that all these bytes are on, or kHostMemory where they are pinned. Throws invalid,
  // beginning with "entry INDEX: its SIDE", for what copy engines cannot reach in one copy.
  int home(uint64_t address, uint64_t bytes, const char* side, size_t index);

  // Where the driver's ranges of memory begin that were looked up, with their homes: allocations,
  // or reserved addresses. No place that was looked up goes from one into the next.
  std::set<std::pair<uint64_t, int>> ranges() const;

 private:
  struct PointerRange {
    uint64_t range = 0;  // begins here
    uint64_t begin = 0;
    uint64_t end = 0;
    int home = kHostMemory;
  };

  const PointerRange& extent(uint64_t address, const char* side, size_t index);
  PointerRange look_up(uint64_t address, const char* side, size_t index) const;

  ContextGuard current_;
  std::vector<PointerRange> extents_;  // by begin
  size_t last_ = 0;                    // the one found last
  std::set<uint64_t> crossed_;         // ranges that go on from the one before
};

}  // namespace offcore::cuda
