#include "core/backend/cuda/engine_alias.h"

namespace offcore::cuda {
namespace {

// A power of two, so that whole pitches lead on past 2^64.
constexpr uint64_t kPitch = uint64_t{1} << 30;
static_assert(kPitch <= kPitchMax && EngineAlias::kRowMax <= kPitch);

}  // namespace

EngineAlias::EngineAlias(const GpuContext& gpu, const std::shared_ptr<const Allocation>& other,
                         Side side, uint64_t row_max)
    : side_(side), row_max_(row_max), range_(gpu.context(), rounded(row_max, other->bytes())) {
  for (uint64_t at = 0; at < row_max; at += other->bytes()) range_.map(at, other);
  const int ordinal = gpu.device();
  range_.open({&ordinal, 1});
}

CUmemcpy2D EngineAlias::first(CUdeviceptr dst, CUdeviceptr src, uint64_t bytes) const {
  const uint64_t distance = (side_ == Side::dst ? dst : src) - range_.base();
  const uint64_t rest = distance % kPitch;
  const uint64_t width = std::min({bytes, row_max_, kPitch - rest});
  CUmemcpy2D row{
      .src = src, .src_pitch = width, .dst = dst, .dst_pitch = width, .width = width, .height = 1};
  if (side_ == Side::dst) {
    row.dst_x = rest;
    row.dst_y = distance / kPitch;
    row.dst = range_.base();
    row.dst_pitch = kPitch;
  } else {
    row.src_x = rest;
    row.src_y = distance / kPitch;
    row.src = range_.base();
    row.src_pitch = kPitch;
  }
  return row;
}

}  // namespace offcore::cuda
