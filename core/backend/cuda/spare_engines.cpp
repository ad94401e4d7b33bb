#include "core/backend/cuda/spare_engines.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <vector>

namespace offcore::cuda {
namespace {

constexpr int kMajor = 9;  // of the compute capability whose engines were measured

constexpr uint64_t kOwnMin = uint64_t{16} << 20;  // fewer are hardly worth two streams more

// Bytes a nanosecond: to other GPUs, by a peer's base, by the spare engines beside both.
constexpr double kPush = 390;
constexpr double kPeerBase = 545;
constexpr double kSpare = 140;

constexpr EngineAlias::Side kSides[] = {EngineAlias::Side::dst, EngineAlias::Side::src};
constexpr uint64_t kPlaces = 1 + std::size(kSides);  // of the trial, where it reads and writes
constexpr uint64_t kTriedBytes = 4096;

}  // namespace

SpareEngines::SpareEngines(const GpuContext& gpu) {
  const std::shared_ptr<const Allocation> host = Allocation::create_host(gpu, kRowMax);
  for (const auto side : kSides) {
    aliases_.emplace_back(gpu, host, side, kRowMax);
  }
}

std::shared_ptr<const SpareEngines> SpareEngines::find(const GpuContext& gpu) {
  if (attribute(gpu.device(), Attribute::compute_major) != kMajor) return nullptr;
  std::shared_ptr<const SpareEngines> found;
  std::shared_ptr<AddressRange> tried;
  try {
    found.reset(new SpareEngines(gpu));
    const auto memory = Allocation::create(gpu, kPlaces * kTriedBytes, false);
    tried = std::make_shared<AddressRange>(gpu.context(), memory->bytes());
    tried->map(0, memory);
    const int ordinal = gpu.device();
    tried->open({&ordinal, 1});
  } catch (const Error&) {  // a driver that has no such memory, or none is left
    return nullptr;
  }
  try {
    return found->work(gpu, tried->base()) ? found : nullptr;
  } catch (const Error&) {
    if (!gpu.served()) {  // a copy is still under way
      keep_for_good(tried);
      keep_for_good(std::make_shared<std::shared_ptr<const SpareEngines>>(found));
    }
    if (!gpu.works()) throw;
    return nullptr;  // collectives do without them
  }
}

// Each copies what lies first to a place of its own behind it.
bool SpareEngines::work(const GpuContext& gpu, CUdeviceptr src) const {
  std::vector<std::byte> sent(kTriedBytes);
  for (size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<std::byte>(1 + i * 7 + i / 251);
  gpu.zero(src, kPlaces * kTriedBytes);
  gpu.copy(reinterpret_cast<void*>(src), sent.data(), kTriedBytes);
  for (size_t i = 0; i < aliases_.size(); ++i) {
    const CUdeviceptr dst = src + (i + 1) * kTriedBytes;
    for (uint64_t done = 0; done < kTriedBytes;) {
      const CUmemcpy2D piece = aliases_[i].first(dst + done, src + done, kTriedBytes - done);
      if (!gpu.copy(piece)) return false;
      done += piece.width;
    }
  }
  std::vector<std::byte> came(aliases_.size() * kTriedBytes);
  gpu.copy(came.data(), reinterpret_cast<const void*>(src + kTriedBytes), came.size());
  for (size_t i = 0; i < aliases_.size(); ++i) {
    if (std::memcmp(&came[i * kTriedBytes], sent.data(), kTriedBytes) != 0) return false;
  }
  return true;
}

uint64_t SpareEngines::share(uint64_t own, uint64_t pushed, uint64_t moved) {
  if (own < kOwnMin) return 0;
  const double alone = static_cast<double>(pushed) / kPush +
                       static_cast<double>(own + moved) / kPeerBase;  // without spare engines
  return std::min(own, static_cast<uint64_t>(alone / (1 / kSpare + 1 / kPeerBase)));
}

}  // namespace offcore::cuda
