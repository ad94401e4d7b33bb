#include "core/kv/layout.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "core/base/error.h"
#include "core/plan/progression.h"

namespace offcore::kv {
namespace {

constexpr uint64_t kBytesMax = uint64_t{1} << 47;
constexpr uint32_t kRowBlocksMax = 1 << 16;

uint64_t begin_of(const Piece& piece) { return reinterpret_cast<uint64_t>(piece.address); }
uint64_t end_of(const Piece& piece, uint64_t blocks) {
  return begin_of(piece) + (blocks - 1) * piece.block_step + piece.bytes;
}

// A layout's piece, and how many blocks it has.
struct Placed {
  Piece piece;
  uint64_t blocks = 0;
  const Layout* layout = nullptr;
  uint64_t begin() const { return begin_of(piece); }
};

// Whether blocks of the two may share bytes, given that `second` begins no lower.
bool overlap(const Placed& first, const Placed& second) {
  if (second.begin() >= end_of(first.piece, first.blocks)) return false;
  if (first.piece.block_step != second.piece.block_step) return true;
  const uint64_t shift = (second.begin() - first.begin()) % first.piece.block_step;
  return shift < first.piece.bytes || first.piece.block_step - shift < second.piece.bytes;
}

// Calls `found` with each two that may share bytes, the lower one first.
template <typename Found>
void each_overlap(std::vector<Placed> placed, const Found& found) {
  std::stable_sort(placed.begin(), placed.end(),
                   [](const Placed& a, const Placed& b) { return a.begin() < b.begin(); });
  for (auto first = placed.begin(); first != placed.end(); ++first) {
    const uint64_t end = end_of(first->piece, first->blocks);
    for (auto second = first + 1; second != placed.end() && second->begin() < end; ++second) {
      if (overlap(*first, *second)) found(*first, *second);
    }
  }
}

std::vector<Placed> placed(const Layout& layout) {
  std::vector<Placed> result;
  for (const Piece& piece : layout.pieces()) result.push_back({piece, layout.blocks(), &layout});
  return result;
}

// Whether one command may go over both.
bool together(const Fold& a, const Fold& b, std::span<const uint64_t> memories) {
  return memories.empty() || memories[a.tensor] == memories[b.tensor];
}

// Joins a piece to the one before it where they touch in the cache and in the row.
void append(std::vector<Fold>& folds, const Fold& next, std::span<const uint64_t> memories) {
  if (!folds.empty()) {
    Fold& last = folds.back();
    if (last.at + last.bytes == next.at && last.row_at + last.bytes == next.row_at &&
        last.block_step == next.block_step && last.bytes + next.bytes <= last.block_step &&
        together(last, next, memories)) {
      last.bytes += next.bytes;
      return;
    }
  }
  folds.push_back(next);
}

// Those at equal steps as one, in the order of their rows.
std::vector<Fold> folded(const std::vector<Fold>& single, std::span<const uint64_t> memories) {
  using Alike = std::tuple<uint64_t, uint64_t, uint64_t>;
  std::map<Alike, std::vector<Span>> alike;
  for (uint32_t i = 0; i < single.size(); ++i) {
    const Fold& fold = single[i];
    const uint64_t memory = memories.empty() ? 0 : memories[fold.tensor];
    alike[{fold.bytes, fold.block_step, memory}].push_back({fold.row_at, fold.at, fold.bytes, i});
  }
  std::vector<Fold> result;
  for (auto& [what, spans] : alike) {
    for (const SpanFold& found : fold(spans, 2, UINT64_MAX)) {
      Fold& fold = result.emplace_back(single[found.first.move]);
      fold.pieces = found.rows;
      fold.step = found.src_step;
      fold.row_step = found.dst_step;
    }
    for (const Span& span : spans) result.push_back(single[span.move]);
  }
  std::sort(result.begin(), result.end(),
            [](const Fold& a, const Fold& b) { return a.row_at < b.row_at; });
  return result;
}

}  // namespace

Layout::Layout(std::vector<Piece> pieces, uint64_t blocks, uint32_t row_blocks)
    : pieces_(std::move(pieces)), blocks_(blocks), row_blocks_(row_blocks) {
  if (pieces_.empty() || blocks == 0) fail(Code::invalid, "a cache needs layers and blocks");
  if (row_blocks == 0 || row_blocks > kRowBlocksMax) {
    fail(Code::invalid, "row_blocks is ", row_blocks, ": it must lie in 1..", kRowBlocksMax);
  }
  uint32_t layer = 0;
  uint64_t last = 0;
  for (const Piece& piece : pieces_) {
    if (piece.layer != layer && piece.layer != ++layer) {
      fail(Code::invalid, "layer ", piece.layer, " of the cache is out of order");
    }
    if (piece.bytes == 0 || piece.bytes > piece.block_step ||
        piece.block_step > kBytesMax / blocks) {
      fail(Code::invalid, "layer ", layer, ": a page of ", piece.bytes, " bytes at steps of ",
           piece.block_step,
           " is invalid: each block's page must be contiguous and not overlap others");
    }
    if (row_blocks > 1 && piece.bytes != pieces_.front().bytes) {
      fail(Code::invalid, "blocks with pages of ", pieces_.front().bytes, " and of ", piece.bytes,
           " bytes cannot share rows: row_blocks needs pages of one size");
    }
    if (base_ == nullptr || piece.address < base_) base_ = piece.address;
    last = std::max(last, end_of(piece, blocks));
    block_bytes_ += piece.bytes;
  }
  if (pieces_.front().layer != 0) fail(Code::invalid, "the first layer of a cache must be layer 0");
  span_ = last - reinterpret_cast<uint64_t>(base_);
  each_overlap(placed(*this), [](const Placed& first, const Placed& second) {
    fail(Code::invalid, "layers ", first.piece.layer, " and ", second.piece.layer,
         " of the cache share memory: pass each tensor once");
  });
}

std::vector<MemoryExtent> Layout::extents() const {
  std::vector<MemoryExtent> extents;
  for (const Piece& piece : pieces_) {
    if (piece.tensor >= extents.size()) extents.resize(piece.tensor + size_t{1});
    MemoryExtent& extent = extents[piece.tensor];
    const std::byte* end = piece.address + (blocks_ - 1) * piece.block_step + piece.bytes;
    if (extent.first == nullptr || piece.address < extent.first) extent.first = piece.address;
    extent.last = std::max(extent.last, end);
  }
  return extents;
}

bool Layout::meets(const Layout& other) const {
  if (this == &other) return true;
  std::vector<Placed> all = placed(*this);
  for (const Placed& one : placed(other)) all.push_back(one);
  bool found = false;
  each_overlap(std::move(all), [&](const Placed& first, const Placed& second) {
    found = found || first.layout != second.layout;
    if (first.layout == second.layout) return;
    const uint64_t step = first.piece.block_step;
    if (blocks_ == other.blocks_ && step == second.piece.block_step &&
        second.begin() - first.begin() + second.piece.bytes <= step) {
      return;
    }
    fail(Code::invalid, "layers ", first.piece.layer, " and ", second.piece.layer,
         " of two groups share memory, but not block by block, so their ",
         "block numbers cannot be compared");
  });
  return found;
}

std::vector<Fold> Layout::folds(uint32_t first, uint32_t last,
                                std::span<const uint64_t> memories) const {
  std::vector<Fold> single;
  uint64_t row_at = 0;
  for (const Piece& piece : pieces_) {
    if (piece.layer >= first && piece.layer < last) {
      const Fold alone{.at = static_cast<uint64_t>(piece.address - base_),
                       .row_at = row_at,
                       .bytes = piece.bytes,
                       .block_step = piece.block_step,
                       .tensor = piece.tensor};
      append(single, alone, memories);
    }
    row_at += row_blocks_ * piece.bytes;
  }
  return folded(single, memories);
}

}  // namespace offcore::kv
