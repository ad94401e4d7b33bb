#include "core/backend/cuda/engine_alias.h"

namespace offcore::cuda {
namespace {

constexpr uint64_t kRowMax = uint64_t{64} << 20;  // a piece of this size loses 2 % to its own start
// A power of two, so that whole pitches lead on past 2^64.
constexpr uint64_t kPitch = uint64_t{1} << 30;
static_assert(kPitch <= kPitchMax && kRowMax <= kPitch);

}  // namespace

EngineAlias::EngineAlias(const GpuContext& gpu, std::shared_ptr<const Allocation> foreign)
    : range_(gpu.context(), rounded(kRowMax, foreign->bytes())) {
  for (uint64_t at = 0; at < kRowMax; at += foreign->bytes()) range_.map(at, foreign);
  const int ordinal = gpu.device();
  range_.open({&ordinal, 1});
}

CUmemcpy2D EngineAlias::first(CUdeviceptr dst, CUdeviceptr src, uint64_t bytes) const {
  const uint64_t distance = dst - range_.base();
  const uint64_t rest = distance % kPitch;
  const uint64_t width = std::min({bytes, kRowMax, kPitch - rest});
  return {.src = src,
          .src_pitch = width,
          .dst_x = rest,
          .dst_y = distance / kPitch,
          .dst = range_.base(),
          .dst_pitch = kPitch,
          .width = width,
          .height = 1};
}

}  // namespace offcore::cuda
