// What the driver tells of addresses.
#pragma once
#include <optional>
#include <span>
#include <vector>

#include "core/backend/cuda/gpu_context.h"
#include "core/backend/pointers.h"

namespace offcore::cuda {

// What the driver says of an address; nothing for memory that it does not know.
template <typename Value>
std::optional<Value> attribute_of(uint64_t address, int which) {
  Value value{};
  const CUresult result = Driver::get().cuPointerGetAttribute(&value, which, address);
  if (result == kInvalidValue) return std::nullopt;
  check(result, "cuPointerGetAttribute");
  return value;
}

// The allocation that these bytes lie in, by where it begins; else a number that is no other
// range's. Rows in several were refused as a destination of one strided copy (H200, driver 580).
uint64_t allocation_of(const GpuContext& gpu, const std::byte* first, const std::byte* last);

// Whether the GPU's engines reach these bytes: what cuMemAlloc gave is open to peers that have
// asked; what is mapped, to those it was opened for.
bool reaches(const GpuContext& gpu, const std::byte* first, const std::byte* last);

// The first of so many bytes, not 0, that CPUs cannot reach, as far as a driver tells that the
// process has loaded.
std::optional<size_t> first_on_gpu(std::span<const uint64_t> addresses,
                                   std::span<const uint64_t> bytes);

class PointerInfo final : public PointerLookup {
 public:
  // `ordinal`: the GPU whose context looks. Throws unavailable or driver.
  explicit PointerInfo(int ordinal);
  int home(uint64_t address, uint64_t bytes, const char* side, size_t index) override;
  std::set<std::pair<uint64_t, int>> ranges() const override;

 private:
  struct PointerRange {
    uint64_t range = 0;  // begins here
    uint64_t begin = 0;
    uint64_t end = 0;
    int home = kHostMemory;
  };

  const PointerRange& extent(uint64_t address, const char* side, size_t index);
  PointerRange look_up(uint64_t address, const char* side, size_t index) const;

  std::shared_ptr<const GpuContext> gpu_;
  ContextGuard current_;
  std::vector<PointerRange> extents_;  // by begin
  size_t last_ = 0;                    // the one found last
  std::set<uint64_t> crossed_;         // ranges that go on from the one before
};

}  // namespace offcore::cuda
