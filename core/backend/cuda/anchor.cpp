#include "core/backend/cuda/anchor.h"

#include <algorithm>

namespace offcore::cuda {
namespace {

constexpr uint64_t kPieceBytes = uint64_t{8} << 20;
constexpr uint64_t kReachMax = uint64_t{1} << 40;
// The driver gives a range of this size an address below all of a GPU's memory.
constexpr uint64_t kReachMin = uint64_t{1} << 30;
constexpr uint64_t kPitchesMax = uint64_t{1} << 31;  // to what is meant: more were not tried

uint64_t whole_pieces(uint64_t reach) {
  if (reach > kReachMax) fail(Code::invalid, "rows over ", reach, " bytes: at most ", kReachMax);
  return (reach + kPieceBytes - 1) / kPieceBytes * kPieceBytes;
}

}  // namespace

Anchor::Anchor(const Device& device, uint64_t reach)
    : bytes_(whole_pieces(reach)), range_(device.context(), std::max(bytes_, kReachMin)) {
  const auto part = Part::create_host(device, kPieceBytes);
  for (uint64_t at = 0; at < bytes_; at += kPieceBytes) range_.map(at, part);
  const int ordinal = device.ordinal();
  range_.open({&ordinal, 1});
}

CUdeviceptr Anchor::before(CUdeviceptr meant, uint64_t pitch, uint32_t rows) const {
  if (meant < range_.base() || pitch > kPitchMax) return 0;
  const uint64_t distance = meant - range_.base();
  const uint64_t rest = distance % pitch;
  if (distance / pitch > kPitchesMax || rest + rows * pitch > bytes_) return 0;
  return range_.base() + rest;
}

}  // namespace offcore::cuda
