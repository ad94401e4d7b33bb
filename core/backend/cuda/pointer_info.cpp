#include "core/backend/cuda/pointer_info.h"

#include <algorithm>

#include "core/backend/driver_library.h"
#include "core/base/env.h"

namespace offcore::cuda {
namespace {

std::shared_ptr<const GpuContext> opened(int ordinal) {
  Driver::open();
  return GpuContext::of(ordinal);
}

[[noreturn]] void reject(const char* side, size_t index, const std::string& reason) {
  fail(Code::invalid, "entry ", index, ": its ", side, " ", reason);
}

}  // namespace

std::optional<size_t> first_on_gpu(std::span<const uint64_t> addresses,
                                   std::span<const uint64_t> bytes) {
  // Whoever has such memory has loaded the driver. It stays loaded: a handle is not given back.
  void* const library = dlopen(env("OFFCORE_LIBCUDA").c_str(), RTLD_NOLOAD | RTLD_LAZY);
  if (library == nullptr) return std::nullopt;
  const auto get = symbol<CUresult (*)(void*, int, CUdeviceptr)>(library, "cuPointerGetAttribute");
  if (get == nullptr) return std::nullopt;
  uint64_t last = 0;  // a granule that is no GPU's: the next address is likely to lie there too
  for (size_t i = 0; i < addresses.size(); ++i) {
    if (bytes[i] == 0 || addresses[i] / kGranule == last) continue;
    last = addresses[i] / kGranule;
    int type = 0;
    int managed = 0;
    if (get(&type, kPointerMemoryType, addresses[i]) == kSuccess && type == kDeviceMemory &&
        get(&managed, kPointerManaged, addresses[i]) == kSuccess && managed == 0) {
      return i;
    }
  }
  return std::nullopt;
}

uint64_t allocation_of(const GpuContext& gpu, const std::byte* first, const std::byte* last) {
  const ContextGuard current = gpu.current();
  const auto at = reinterpret_cast<CUdeviceptr>(first);
  const uint64_t alone = ~at;  // no allocation begins there
  const auto start = attribute_of<CUdeviceptr>(at, kPointerRangeStart);
  const auto bytes = attribute_of<size_t>(at, kPointerRangeBytes);
  if (!start || !bytes) return alone;
  return reinterpret_cast<CUdeviceptr>(last) - *start <= *bytes ? *start : alone;
}

bool reaches(const GpuContext& gpu, const std::byte* first, const std::byte* last) {
  const Driver& driver = Driver::get();
  const ContextGuard current = gpu.current();
  for (const std::byte* byte : {first, last - 1}) {
    const auto at = reinterpret_cast<CUdeviceptr>(byte);
    int peers = 0;
    int access = 0;
    if (driver.cuPointerGetAttribute(&peers, kPointerPeers, at) != kSuccess) return false;
    if (peers != 0) continue;
    if (driver.cuPointerGetAttribute(&access, kPointerAccess, at) != kSuccess) return false;
    if (access != kAccessReadWrite) return false;
  }
  return true;
}

PointerInfo::PointerInfo(int ordinal) : gpu_(opened(ordinal)), current_(gpu_->current()) {}

int PointerInfo::home(uint64_t address, uint64_t bytes, const char* side, size_t index) {
  const PointerRange first = extent(address, side, index);
  uint64_t at = first.end;
  while (at < address + bytes) {
    const uint64_t left = address + bytes - at;
    const std::optional<int> next = attribute_of<int>(at, kPointerMemoryType);
    if (first.home == kHostMemory) {
      reject(side, index,
             next ? cat("spans two registrations of host memory, which one copy cannot: make two "
                        "entries of it, the second one from byte ",
                        bytes - left, " on")
                  : cat("leaves its pinned memory by ", left, " bytes"));
    }
    if (!next) reject(side, index, cat("leaves the memory of its GPU by ", left, " bytes"));
    const PointerRange& more = extent(at, side, index);
    if (more.home != first.home) {
      reject(side, index,
             cat("lies on GPU ", first.home, " and, from byte ", at - address, " on, ",
                 more.home == kHostMemory ? std::string("in host memory")
                                          : cat("on GPU ", more.home)));
    }
    if (more.range != first.range) crossed_.insert(more.range);
    at = more.end;
  }
  return first.home;
}

std::set<std::pair<uint64_t, int>> PointerInfo::ranges() const {
  std::set<std::pair<uint64_t, int>> ranges;
  for (const PointerRange& extent : extents_) {
    if (!crossed_.contains(extent.range)) ranges.emplace(extent.range, extent.home);
  }
  return ranges;
}

const PointerInfo::PointerRange& PointerInfo::extent(uint64_t address, const char* side,
                                                     size_t index) {
  const auto holds = [&](const PointerRange& extent) {
    return address >= extent.begin && address < extent.end;
  };
  if (last_ < extents_.size() && holds(extents_[last_])) return extents_[last_];
  auto found = std::upper_bound(
      extents_.begin(), extents_.end(), address,
      [](uint64_t wanted, const PointerRange& extent) { return wanted < extent.begin; });
  if (found == extents_.begin() || !holds(*(found - 1))) {
    found = extents_.insert(found, look_up(address, side, index)) + 1;
  }
  last_ = static_cast<size_t>(found - 1 - extents_.begin());
  return extents_[last_];
}

PointerInfo::PointerRange PointerInfo::look_up(uint64_t address, const char* side,
                                               size_t index) const {
  if (attribute_of<int>(address, kPointerMemoryType).value_or(0) == 0) {
    reject(side, index,
           "lies in ordinary host memory, which GPUs' copy engines cannot reach: pin it (torch: "
           "tensor.pin_memory()), or take host memory of Communicator.host_array()");
  }
  const uint64_t begin = attribute_of<CUdeviceptr>(address, kPointerRangeStart).value_or(address);
  const uint64_t size = attribute_of<size_t>(address, kPointerRangeBytes).value_or(1);
  PointerRange extent{.range = begin, .begin = begin, .end = begin + size};
  if (*attribute_of<int>(address, kPointerMemoryType) != kDeviceMemory) return extent;
  const auto gpu_at = [](uint64_t at) { return attribute_of<int>(at, kPointerOrdinal); };
  extent.home = gpu_at(address).value_or(0);
  // A range of reserved addresses may hold the memory of several GPUs, as windows do.
  for (const uint64_t end : {begin, begin + size - 1}) {
    if (gpu_at(end).value_or(extent.home) == extent.home) continue;
    extent.begin = std::max(extent.begin, address / kGranule * kGranule);
    extent.end = std::min(extent.end, (address / kGranule + 1) * kGranule);
  }
  return extent;
}

}  // namespace offcore::cuda
