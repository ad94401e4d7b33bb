// Host memory that strided copies within a GPU are addressed from.
//
// The driver has SMs copy what begins and ends in one GPU's memory, and judges that by the base
// addresses (H200, driver 580). A base in host memory, from which whole pitches lead to the row
// that is meant, makes an engine of it: that of the direction which it pretends to have, to the
// host where the destination's base is the host's. Wanted are all rows' pitches behind the base,
// mapped: a little memory is, again and again. It must be of cuMemCreate; registered, pinned and
// managed memory is refused. Nothing of it is read or written.
#pragma once
#include "core/backend/cuda/memory.h"

namespace offcore::cuda {

class Anchor {
 public:
  // For copies whose rows, and one pitch more, are within `reach` bytes. Throws invalid, memory or
  // driver.
  Anchor(const Device& device, uint64_t reach);

  CUdeviceptr base() const { return range_.base(); }
  // From where whole pitches lead to `meant`, the first of the rows; 0: from nowhere.
  CUdeviceptr before(CUdeviceptr meant, uint64_t pitch, uint32_t rows) const;

 private:
  uint64_t bytes_;
  Range range_;
};

}  // namespace offcore::cuda
