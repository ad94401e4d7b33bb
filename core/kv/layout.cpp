#include "core/kv/layout.h"

#include <algorithm>

#include "core/base/error.h"

namespace offcore::kv {
namespace {

constexpr size_t kSecondsMax = 8;  // candidates for a fold's second piece: K and V alternate, say
constexpr uint64_t kBytesMax = uint64_t{1} << 47;

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

// Joins a piece to the one before it where they touch in the cache; in the row all do.
void append(std::vector<Fold>& folds, const Fold& next, std::span<const uint64_t> memories) {
  if (!folds.empty()) {
    Fold& last = folds.back();
    if (last.at + last.bytes == next.at && last.block_step == next.block_step &&
        last.bytes + next.bytes <= last.block_step && together(last, next, memories)) {
      last.bytes += next.bytes;
      return;
    }
  }
  folds.push_back(next);
}

// How many of `folds` follow each other from `first` on at the steps from `first` to `second`.
std::vector<size_t> progression(const std::vector<Fold>& folds, const std::vector<bool>& taken,
                                size_t first, size_t second, std::span<const uint64_t> memories) {
  const Fold& start = folds[first];
  const auto fits = [&](const Fold& fold) {
    return fold.bytes == start.bytes && fold.block_step == start.block_step &&
           together(fold, start, memories);
  };
  std::vector<size_t> found = {first};
  const uint64_t step = folds[second].at - start.at;
  const uint64_t row_step = folds[second].row_at - start.row_at;
  if (!fits(folds[second]) || folds[second].at < start.at || step < start.bytes) return found;
  for (size_t i = second; i < folds.size(); ++i) {
    const uint64_t ahead = found.size() * row_step;
    if (folds[i].row_at - start.row_at > ahead) break;  // rows only rise
    if (taken[i] || !fits(folds[i]) || folds[i].row_at - start.row_at != ahead) continue;
    if (folds[i].at - start.at != found.size() * step) break;
    found.push_back(i);
  }
  return found;
}

}  // namespace

Layout::Layout(std::vector<Piece> pieces, uint64_t blocks)
    : pieces_(std::move(pieces)), blocks_(blocks) {
  if (pieces_.empty() || blocks == 0) fail(Code::invalid, "a cache needs layers and blocks");
  uint32_t layer = 0;
  uint64_t last = 0;
  for (const Piece& piece : pieces_) {
    if (piece.layer != layer && piece.layer != ++layer) {
      fail(Code::invalid, "layer ", piece.layer, " of the cache is out of order");
    }
    if (piece.bytes == 0 || piece.bytes > piece.block_step ||
        piece.block_step > kBytesMax / blocks) {
      fail(Code::invalid, "layer ", layer, ": a page of ", piece.bytes, " bytes at steps of ",
           piece.block_step, " is none: each block's page must be contiguous and its own");
    }
    if (base_ == nullptr || piece.address < base_) base_ = piece.address;
    last = std::max(last, end_of(piece, blocks));
    row_bytes_ += piece.bytes;
  }
  if (pieces_.front().layer != 0) fail(Code::invalid, "layers are counted from 0 on");
  span_ = last - reinterpret_cast<uint64_t>(base_);
  each_overlap(placed(*this), [](const Placed& first, const Placed& second) {
    fail(Code::invalid, "layers ", first.piece.layer, " and ", second.piece.layer,
         " of the cache share memory: pass each tensor once");
  });
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
         " of two groups share memory, but not block by block: one's block ",
         "numbers would tell nothing about the other's");
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
    row_at += piece.bytes;
  }
  std::vector<Fold> result;
  std::vector<bool> taken(single.size());
  for (size_t i = 0; i < single.size(); ++i) {
    if (taken[i]) continue;
    std::vector<size_t> best = {i};
    for (size_t j = i + 1; j < std::min(single.size(), i + 1 + kSecondsMax); ++j) {
      if (taken[j]) continue;
      auto found = progression(single, taken, i, j, memories);
      if (found.size() > best.size()) best = std::move(found);
    }
    Fold fold = single[i];
    fold.pieces = static_cast<uint32_t>(best.size());
    for (size_t k : best) taken[k] = true;
    if (best.size() > 1) {
      fold.step = single[best[1]].at - fold.at;
      fold.row_step = single[best[1]].row_at - fold.row_at;
    }
    result.push_back(fold);
  }
  return result;
}

}  // namespace offcore::kv
