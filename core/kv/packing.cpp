#include "core/kv/packing.h"

#include <algorithm>

#include "core/base/names.h"

namespace offcore::kv {
namespace {

constexpr uint32_t kLanesMax = 2;
constexpr uint64_t kBlocksMax = uint64_t{1} << 32;  // whose numbers cores are told in 32 bits

std::vector<PagePiece> pieces_of(const Layout& layout) {
  std::vector<PagePiece> pieces;
  uint64_t at = 0;
  for (const Piece& piece : layout.pieces()) {
    pieces.push_back({.address = reinterpret_cast<uint64_t>(piece.address),
                      .block_step = piece.block_step,
                      .bytes = piece.bytes,
                      .at = at});
    at += piece.bytes;
  }
  return pieces;
}

Share on_gpu(Backend& backend, const std::vector<PagePiece>& pieces) {
  const uint64_t bytes = pieces.size() * sizeof(PagePiece);
  Share share = backend.allocate(kOwner, bytes);
  share.copy(share.data, pieces.data(), bytes);
  return share;
}

// Whether cores reach all of it: what they do not is an error of the whole GPU's, where engines'
// copies are refused alone.
bool reached(Backend& backend, const Layout& layout) {
  GpuRanks* gpus = backend.capabilities().gpus;
  const std::vector<MemoryExtent> extents = layout.extents();
  return gpus != nullptr && std::all_of(extents.begin(), extents.end(), [&](const auto& extent) {
           return gpus->reaches(kOwner, extent.first, extent.last);
         });
}

// Whether it pays for blocks that are scattered, many of them, by the machine's numbers.
bool may_pay(const Layout& layout, std::span<const uint64_t> memories, const Machine& machine) {
  constexpr uint64_t kMany = 64;
  uint64_t copies = 0;
  uint64_t rows = 0;
  for (const Fold& fold : layout.folds(0, layout.layers(), memories)) {
    ++copies;
    rows += fold.pieces;
  }
  return packing_pays(kMany * copies, kMany * rows, kMany * layout.block_bytes(), machine);
}

}  // namespace

Policy parse_policy(std::string_view name) {
  constexpr std::string_view kNames[] = {"auto", "zero_sm", "pack"};
  return parse_name<Policy>("policy", name, kNames);
}

uint32_t sms_of_lane(uint32_t sms) { return sms / std::min(sms, kLanesMax); }

Packing packing_of(Backend& backend, const std::vector<CacheGroup>& groups,
                   const std::vector<std::vector<uint64_t>>& memories, const PackOptions& options) {
  if (options.policy == Policy::zero_sm) return {};
  const bool all = options.policy == Policy::pack;
  if (!backend.capabilities().packs || options.sms == 0) {
    if (!all) return {};
    fail(Code::unsupported,
         "nothing packs here: it takes a GPU of compute capability 8.0 or more, and pack_sms of 1 "
         "or "
         "more");
  }
  Packing packing{.lanes = std::min(options.sms, kLanesMax), .sms = sms_of_lane(options.sms)};
  packing.lane_bytes = options.bytes / (2 * packing.lanes);
  bool any = false;
  for (size_t i = 0; i < groups.size(); ++i) {
    const Layout& layout = *groups[i].layout;
    if (all && !reached(backend, layout)) {
      fail(Code::invalid, "the cache is not memory of GPU ", backend.device(kOwner),
           ", or not open to it: its SMs cannot pack it");
    }
    const bool fits = layout.block_bytes() <= packing.lane_bytes && layout.blocks() <= kBlocksMax;
    if (all && !fits) {
      fail(Code::invalid, "to pack blocks of ", layout.block_bytes(), " bytes takes pack_bytes of ",
           2 * packing.lanes * layout.block_bytes(), " or more, not ", options.bytes);
    }
    const bool packs =
        fits &&
        (all || (may_pay(layout, memories[i], backend.machine()) && reached(backend, layout)));
    packing.pays.push_back({packs, packs});
    packing.pieces.push_back(packs ? on_gpu(backend, pieces_of(layout)) : Share{});
    any = any || packs;
  }
  if (!any) return {};
  packing.always = all;
  packing.stage = backend.allocate(kOwner, 2 * packing.lanes * packing.lane_bytes);
  const uint64_t words = 2 * packing.lanes * Packing::kTimesKept * packing.sms;
  packing.times = backend.allocate_host(words * sizeof(uint32_t));
  return packing;
}

}  // namespace offcore::kv
