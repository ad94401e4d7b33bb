#include "core/kv/adopt.h"

#include <algorithm>

namespace offcore::kv {
namespace {

// The layout with each tensor's lowest byte at another address.
std::shared_ptr<const Layout> moved(const Layout& layout, const std::vector<std::byte*>& firsts) {
  const std::vector<MemoryExtent> extents = layout.extents();
  std::vector<Piece> pieces = layout.pieces();
  for (Piece& piece : pieces) {
    piece.address = firsts[piece.tensor] + (piece.address - extents[piece.tensor].first);
  }
  return std::make_shared<Layout>(std::move(pieces), layout.blocks(), layout.row_blocks());
}

size_t copies(const Layout& layout, std::span<const uint64_t> memories) {
  return layout.folds(0, layout.layers(), memories).size();
}

// How many copies a block would take if each tensor began with an allocation.
size_t copies_at_steps(const Layout& layout) {
  constexpr uint64_t kGranule = uint64_t{2} << 20;
  const std::vector<MemoryExtent> extents = layout.extents();
  uint64_t step = kGranule;
  for (const MemoryExtent& extent : extents) {
    const auto bytes = static_cast<uint64_t>(extent.last - extent.first);
    step = std::max(step, (bytes + kGranule - 1) / kGranule * kGranule);
  }
  std::vector<std::byte*> firsts;
  for (size_t i = 0; i < extents.size(); ++i) {
    firsts.push_back(reinterpret_cast<std::byte*>((i + 1) * step));
  }
  return copies(*moved(layout, firsts), {});
}

}  // namespace

AdoptedCache adopt(Backend& backend, const Layout& layout, std::span<const uint64_t> memories) {
  GpuRanks* gpus = backend.capabilities().gpus;
  const size_t now = copies(layout, memories);
  if (gpus == nullptr || copies_at_steps(layout) >= now) return {};
  const std::vector<MemoryExtent> extents = layout.extents();
  AdoptedCache cache;
  cache.memory = gpus->at_steps(extents);
  if (cache.memory == nullptr) return {};
  std::vector<std::byte*> firsts;
  for (size_t i = 0; i < extents.size(); ++i) firsts.push_back(cache.memory->at(i));
  cache.layout = moved(layout, firsts);
  return copies(*cache.layout, {}) < now ? cache : AdoptedCache{};
}

}  // namespace offcore::kv
