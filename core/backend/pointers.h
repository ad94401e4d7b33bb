// Where memory lies, as a driver tells: for addresses of a caller, which nobody vouches for.
#pragma once
#include <cstddef>
#include <cstdint>
#include <set>
#include <utility>

namespace offcore {

inline constexpr int kHostMemory = -1;  // in the place of a GPU's number

// Looks each allocation up once. It may go away as soon as this was asked: so one is for one
// call, and not kept.
class PointerLookup {
 public:
  virtual ~PointerLookup() = default;
  // The GPU that all these bytes are on, or kHostMemory where they are pinned. Throws invalid,
  // beginning with "entry INDEX: its SIDE", for what copy engines cannot reach in one copy.
  virtual int home(uint64_t address, uint64_t bytes, const char* side, size_t index) = 0;
  // Where the driver's ranges of memory begin that were looked up, with their homes: allocations,
  // or reserved addresses. No place that was looked up goes from one into the next.
  virtual std::set<std::pair<uint64_t, int>> ranges() const = 0;
};

}  // namespace offcore
