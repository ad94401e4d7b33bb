#include "core/plan/chunks.h"

#include <cmath>

namespace offcore {
namespace {

constexpr uint64_t kCutBytesMin = 256 << 10;  // of what is worth a signal of its own
constexpr uint64_t kCutBytesFair = 4 << 20;   // but so much each; kRingDepth a peer in a slot
constexpr double kTaper = 0.8;                // from one chunk to the next
constexpr uint32_t kTapered = 6;              // chunks
constexpr uint32_t kCuts = 8;                 // numbers of pieces that are worth a look

uint64_t bytes_max(uint64_t largest, uint64_t peers, uint64_t most) {
  const uint64_t shared = most / std::max<uint64_t>(peers, 1) / kChunkAlign * kChunkAlign;
  return std::max({shared, kCutBytesFair, round_up(largest / kChunksMax + 1, kChunkAlign)});
}

}  // namespace

Chunks::Chunks(uint32_t pieces, Taper taper, uint64_t largest, uint64_t first) : bytes_(first) {
  std::vector<double> weights(pieces, 1.0);
  const uint32_t tapered = taper == Taper::none ? 0 : std::min(kTapered, pieces - 1);
  for (uint32_t i = 0; i < tapered; ++i) weights[i] = std::pow(kTaper, tapered - i);
  if (taper == Taper::end) std::reverse(weights.begin(), weights.end());
  double sum = 0;
  for (const double weight : weights) sum += weight;
  if (first > 0) ends_.push_back(first);
  uint64_t end = first;
  for (const double weight : weights) {
    const double share = static_cast<double>(largest - first) * weight / sum;
    const uint64_t begin = end;
    end = std::min(end + round_up(static_cast<uint64_t>(share) + 1, kChunkAlign), largest);
    ends_.push_back(end);
    bytes_ = std::max(bytes_, end - begin);
    if (end == largest) break;
  }
  bytes_ = round_up(bytes_, kChunkAlign);
}

std::vector<uint64_t> chunk_sizes(uint64_t largest, uint64_t peers, uint32_t pieces_max,
                                  uint64_t shared) {
  largest = std::max<uint64_t>(largest, 1);
  const uint64_t most = bytes_max(largest, peers, shared);
  std::vector<uint64_t> sizes;
  for (uint64_t pieces = 1; pieces <= pieces_max; pieces *= 2) {
    const uint64_t bytes = round_up((largest + pieces - 1) / pieces, kChunkAlign);
    if (pieces > 1 && bytes < kCutBytesMin) break;
    if (bytes <= most) sizes.push_back(bytes);
  }
  if (sizes.empty()) sizes.push_back(most);
  return sizes;
}

std::vector<Chunks> chunkings(uint64_t largest, const CutLimits& limits, uint64_t first) {
  largest = std::max<uint64_t>(largest, 1);
  if (first == largest) return {Chunks(first)};
  if (limits.captured) return {Chunks(1, Taper::none, largest)};
  const uint64_t most = round_up(bytes_max(largest, limits.peers, limits.shared), kChunkAlign);
  const uint64_t rest = largest - first;
  std::vector<Taper> tapers{Taper::end};
  if (limits.behind) tapers = {Taper::begin, Taper::none};
  std::vector<Chunks> cuts;
  auto pieces = static_cast<uint32_t>((rest + most - 1) / most);
  for (uint32_t cut = 0; cut < kCuts && (pieces == 1 || rest / pieces >= kCutBytesMin); ++cut) {
    const size_t before = cuts.size();
    for (const Taper taper : tapers) {
      Chunks chunks(pieces, taper, largest, first);
      if (chunks.bytes() <= most) cuts.push_back(std::move(chunks));
    }
    pieces = cuts.size() == before ? pieces + 1 : std::max(pieces + 1, pieces * 5 / 4);
  }
  if (cuts.empty()) cuts.emplace_back(most);
  return cuts;
}

}  // namespace offcore
