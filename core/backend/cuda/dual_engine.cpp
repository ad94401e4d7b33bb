#include "core/backend/cuda/dual_engine.h"

#include <algorithm>
#include <cstring>

namespace offcore::cuda {
namespace {

constexpr uint64_t kPieceMin = uint64_t{8} << 20;
constexpr uint64_t kPieces = 8;
constexpr uint64_t kPieceNs = 100;
constexpr uint64_t kReachMax = uint64_t{1} << 40;

constexpr uint32_t kTriedRows = 2;
constexpr uint64_t kTriedBytes = 4096;  // of a row

// Of the host's memory: larger pieces are fewer, so that copies are submitted sooner.
uint64_t piece_of(const Reach& reach) {
  const uint64_t room = reach.room / kPieceMin * kPieceMin;
  const uint64_t piece = std::min(room, rounded(reach.bytes / kPieces + 1, kPieceMin));
  const bool far = std::max(reach.bytes, reach.host_bytes) > kReachMax;
  if (room == 0 || far || (reach.bytes / piece + 1) * kPieceNs > reach.submit_ns) {
    fail(Code::unsupported, "rows over ", reach.bytes, " bytes are too far apart to be crossed");
  }
  return piece;
}

}  // namespace

DualEngine::DualEngine(const GpuContext& gpu, const Reach& reach)
    : gpu_bytes_(rounded(reach.host_bytes, kPieceMin)),
      step_(rounded(std::max(reach.step, gpu_bytes_), kPieceMin)),
      host_bytes_(rounded(std::max(reach.bytes, (kTriedRows + 1) * step_), piece_of(reach))),
      range_(gpu.context(), host_bytes_ + step_ + kPieceMin) {
  const uint64_t piece = piece_of(reach);
  const auto host = Allocation::create_host(gpu, piece);
  for (uint64_t at = 0; at < host_bytes_; at += piece) range_.map(at, host);
  const auto own = Allocation::create(gpu, kPieceMin, false);
  for (uint64_t at = 0; at < gpu_bytes_; at += kPieceMin) range_.map(host_bytes_ + at, own);
  range_.map(host_bytes_ + step_,
             Allocation::create(gpu, kTriedBytes, false));  // the trial's 2nd row
  const int ordinal = gpu.device();
  range_.open({&ordinal, 1});
}

DualEngine::Origin DualEngine::before(CUdeviceptr meant, uint64_t pitch, uint32_t rows,
                                      bool host) const {
  const CUdeviceptr first = range_.base() + (host ? 0 : host_bytes_);
  // Modulo 2^64: to what lies below, pitches lead past the last address.
  const uint64_t rest = (meant - first) % pitch;
  if (rest + rows * pitch > (host ? host_bytes_ : gpu_bytes_)) return {};
  return {.at = first + rest, .pitches = (meant - first) / pitch};
}

bool DualEngine::turn(StridedCopy& rows) const {
  if (rows.dst_host == rows.src_host) return false;
  const Origin dst = before(rows.dst, rows.dst_pitch, rows.rows, rows.src_host);
  const Origin src = before(rows.src, rows.src_pitch, rows.rows, rows.dst_host);
  if (dst.at == 0 || src.at == 0) return false;
  rows.dst = dst.at;
  rows.src = src.at;
  rows.dst_ahead = dst.pitches;
  rows.src_ahead = src.pitches;
  rows.dst_host = rows.src_host = false;  // the driver is to look at the bases
  return true;
}

bool DualEngine::works(const GpuContext& gpu) {
  tried_ = allocate_pinned(gpu.context(), 2 * kTriedRows * kTriedBytes);
  auto* const sent = static_cast<std::byte*>(tried_.get());
  std::byte* const got = sent + kTriedRows * kTriedBytes;
  const CUdeviceptr place = range_.base() + host_bytes_;
  for (uint64_t i = 0; i < kTriedRows * kTriedBytes; ++i) {
    sent[i] = static_cast<std::byte>(1 + i * 7 + i / 251);
    got[i] = ~sent[i];
  }
  const auto row = [&](uint32_t i) { return reinterpret_cast<void*>(place + i * step_); };
  for (uint32_t i = 0; i < kTriedRows; ++i) gpu.copy(row(i), got, kTriedBytes);
  StridedCopy load{.dst = place,
                   .dst_pitch = step_,
                   .src = reinterpret_cast<CUdeviceptr>(sent),
                   .src_pitch = kTriedBytes,
                   .bytes = kTriedBytes,
                   .rows = kTriedRows,
                   .src_host = true};
  StridedCopy store{.dst = reinterpret_cast<CUdeviceptr>(got),
                    .dst_pitch = kTriedBytes,
                    .src = place,
                    .src_pitch = step_,
                    .bytes = kTriedBytes,
                    .rows = kTriedRows,
                    .dst_host = true};
  if (!turn(load) || !turn(store)) return false;
  if (!gpu.copy(load)) return false;
  bool came = true;
  for (uint32_t i = 0; i < kTriedRows; ++i) {
    std::vector<std::byte> found(kTriedBytes);
    gpu.copy(found.data(), row(i), kTriedBytes);
    came = came && std::memcmp(found.data(), sent + i * kTriedBytes, kTriedBytes) == 0;
  }
  return came && gpu.copy(store) && std::memcmp(got, sent, kTriedRows * kTriedBytes) == 0;
}

}  // namespace offcore::cuda
