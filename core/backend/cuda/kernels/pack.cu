// The kernel that copies between pages and a place where they lie side by side (pack_kernel.h).
//
// A warp takes 4 KiB of a page at a time, all of them in flight at once, so that a few SMs have
// enough under way to keep up with a link. Pages and pieces are found by division, from the
// numbers of the blocks and a table of the pieces: nobody lists their product. Blocks that share a
// row on the host lie side by side piece by piece, so that rows and parts of them are one copy each.
#include <cstdint>

namespace {

constexpr int kThreads = 512;
constexpr int kWarp = 32;
constexpr int kUnroll = 8;
constexpr uint32_t kSlice = kUnroll * kWarp * sizeof(uint4);  // bytes that a warp takes at once
constexpr int kBlocksMax = 960;

struct Piece {
  uint64_t address;
  uint64_t block_step;
  uint64_t bytes;
  uint64_t at;
};

// As core/backend/cuda/pack_kernel.cpp lays it out.
struct Arguments {
  uint64_t pieces;
  uint64_t packed;
  uint64_t spent;        // words of the host's, one an SM; 0: none
  uint64_t first_at;     // of the first piece
  uint64_t block_bytes;  // of all pieces
  uint32_t count;        // of pieces
  uint32_t slices;       // of the largest piece
  uint32_t blocks;
  uint32_t scatters;  // to the pages
  // Blocks have places in rows of so many, one after the other: all of the copy those from `from`
  // to before `to`, the launch's those from `at` on.
  uint32_t row_blocks;
  uint32_t from;
  uint32_t to;
  uint32_t at;
  uint32_t block[kBlocksMax];
};

__device__ uint64_t now_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

template <typename Word>
__device__ void by_words(uint64_t dst, uint64_t src, uint32_t bytes, uint32_t lane) {
  for (uint32_t i = lane; i < bytes / sizeof(Word); i += kWarp) {
    reinterpret_cast<Word*>(dst)[i] = __ldcg(reinterpret_cast<const Word*>(src) + i);
  }
}

__device__ void copy(uint64_t dst, uint64_t src, uint32_t bytes, uint32_t lane) {
  const uint64_t all = dst | src | bytes;
  if (bytes == kSlice && (all & 15) == 0) {
    const uint4* from = reinterpret_cast<const uint4*>(src) + lane;
    uint4* to = reinterpret_cast<uint4*>(dst) + lane;
    uint4 held[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) held[k] = __ldcg(from + k * kWarp);
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) __stcs(to + k * kWarp, held[k]);
  } else if ((all & 15) == 0) {
    by_words<uint4>(dst, src, bytes, lane);
  } else if ((all & 3) == 0) {
    by_words<uint32_t>(dst, src, bytes, lane);
  } else {
    by_words<uint8_t>(dst, src, bytes, lane);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    offcore_pack(const __grid_constant__ Arguments a) {
  const uint64_t began_ns = now_ns();
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t warps = gridDim.x * (kThreads / kWarp);
  const uint32_t a_block = a.count * a.slices;
  const uint32_t units = a.blocks * a_block;
  // Neighbours take neighbouring bytes.
  for (uint32_t unit = threadIdx.x / kWarp * gridDim.x + blockIdx.x; unit < units; unit += warps) {
    const uint32_t block = unit / a_block;
    const uint32_t piece = (unit - block * a_block) / a.slices;
    const uint32_t slice = (unit - block * a_block) - piece * a.slices;
    const ulonglong2* entry = reinterpret_cast<const ulonglong2*>(a.pieces) + 2 * piece;
    const ulonglong2 place = __ldg(entry);
    const ulonglong2 size = __ldg(entry + 1);
    const uint64_t offset = uint64_t{slice} * kSlice;
    if (offset >= size.x) continue;
    const uint64_t left = size.x - offset;
    const uint32_t bytes = left < kSlice ? static_cast<uint32_t>(left) : kSlice;
    const uint64_t page = place.x + a.block[block] * place.y + offset;
    const uint32_t at = a.at + block;
    const uint32_t row = at - at % a.row_blocks;
    const uint32_t begin = max(row, a.from);
    const uint32_t blocks = min(row + a.row_blocks, a.to) - begin;  // of the row
    const uint64_t packed = a.packed + (begin - a.from) * a.block_bytes +
                            blocks * (size.y - a.first_at) + (at - begin) * size.x + offset;
    if (a.scatters != 0) {
      copy(page, packed, bytes, lane);
    } else {
      copy(packed, page, bytes, lane);
    }
  }
  if (a.spent == 0) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    reinterpret_cast<uint32_t*>(a.spent)[blockIdx.x] = static_cast<uint32_t>(now_ns() - began_ns);
  }
}
