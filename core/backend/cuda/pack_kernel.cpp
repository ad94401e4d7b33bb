#include "core/backend/cuda/pack_kernel.h"

#include <algorithm>

#include "core/backend/cuda/gpu_context.h"

namespace offcore::cuda {
namespace {

constexpr uint32_t kPackThreads = 512;
constexpr uint32_t kWarps = kPackThreads / 32;
constexpr uint64_t kSliceBytes = 4096;

constexpr struct {
  const char* name;
  const char* ptx;
} kPackPtx[] = {
#include "core/backend/cuda/kernels/pack_ptx.inc"
};

// As kernels/pack.cu has it.
struct PackArguments {
  uint64_t pieces, packed, spent, first_at, block_bytes;
  uint32_t count, slices, blocks, scatters;
  uint32_t row_blocks, from, to, at;
  uint32_t block[PackKernel::kBlocksMax];
};
static_assert(sizeof(PackArguments) == 3912);

}  // namespace

PackKernel::PackKernel(std::shared_ptr<const PrimaryContext> context) {
  const CaptureGuard relaxed;
  kernel_.emplace(std::move(context), kPackPtx[0].ptx, kPackPtx[0].name,
                  "packing needs a GPU of compute capability 8.0 or more, and the driver's own "
                  "compiler of PTX, libnvidia-ptxjitcompiler");
  PackArguments nothing{.count = 1, .slices = 1, .row_blocks = 1};
  kernel_->warm_up(kPackThreads, &nothing);
}

PackKernel::Launched PackKernel::launch(const PackCopy& copy, uint32_t sms, CUstream stream) const {
  const PageTable& pages = copy.pages;
  const size_t first = copy.offset / pages.block_bytes;
  const size_t last = first + copy.bytes / pages.block_bytes;
  const uint64_t slices = (pages.piece_bytes + kSliceBytes - 1) / kSliceBytes;
  const uint64_t units = slices * pages.count;  // of a block
  const uint64_t most = std::clamp<uint64_t>(UINT32_MAX / 2 / units, 1, kBlocksMax);
  CUdeviceptr spent = 0;
  if (pages.spent_ns != nullptr) {
    check(Driver::get().cuMemHostGetDevicePointer(&spent, pages.spent_ns, 0),
          "cuMemHostGetDevicePointer");
  }
  Launched launched;
  for (size_t at = first; at < last; at += most) {
    const size_t count = std::min<size_t>(last - at, most);
    PackArguments arguments{.pieces = reinterpret_cast<uint64_t>(pages.pieces),
                            .packed = copy.packed,
                            .spent = spent,
                            .first_at = pages.first_at,
                            .block_bytes = pages.block_bytes,
                            .count = pages.count,
                            .slices = static_cast<uint32_t>(slices),
                            .blocks = static_cast<uint32_t>(count),
                            .scatters = copy.scatters,
                            .row_blocks = pages.row_blocks,
                            .from = pages.first_place,
                            .to = static_cast<uint32_t>(pages.first_place + last - first),
                            .at = static_cast<uint32_t>(pages.first_place + at - first)};
    for (size_t i = 0; i < count; ++i) {
      arguments.block[i] = static_cast<uint32_t>(pages.blocks[at + i]);
    }
    const auto grid =
        static_cast<uint32_t>(std::min<uint64_t>(sms, (count * units + kWarps - 1) / kWarps));
    void* pointers[] = {&arguments};
    check(Driver::get().cuLaunchKernel(kernel_->function(), grid, 1, 1, kPackThreads, 1, 1, 0,
                                       stream, pointers, nullptr),
          "cuLaunchKernel");
    ++launched.launches;
    launched.sms = std::max(launched.sms, grid);
  }
  return launched;
}

}  // namespace offcore::cuda
