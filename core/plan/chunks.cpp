#include "core/plan/chunks.h"

namespace offcore {
namespace {

constexpr uint64_t kBytesMin = 256 << 10;  // of what is worth a signal of its own
constexpr uint64_t kBytesMax = 16 << 20;   // of one peer, and shared by all of them
constexpr uint64_t kBytesFair = 4 << 20;   // but so much each; kRingDepth a peer in a slot

}  // namespace

std::vector<uint64_t> chunk_sizes(uint64_t largest, uint64_t peers, uint32_t pieces_max,
                                  bool captured) {
  largest = std::max<uint64_t>(largest, 1);
  const uint64_t shared = kBytesMax / std::max<uint64_t>(peers, 1) / kChunkAlign * kChunkAlign;
  const uint64_t most =
      std::max({shared, kBytesFair, round_up(largest / kChunksMax + 1, kChunkAlign)});
  if (captured) pieces_max = std::min(pieces_max, kRingDepth);
  std::vector<uint64_t> sizes;
  for (uint64_t pieces = 1; pieces <= pieces_max; pieces *= 2) {
    const uint64_t bytes = round_up((largest + pieces - 1) / pieces, kChunkAlign);
    if (pieces > 1 && bytes < kBytesMin) break;
    if (captured || bytes <= most) sizes.push_back(bytes);
  }
  if (sizes.empty()) sizes.push_back(most);
  return sizes;
}

}  // namespace offcore
