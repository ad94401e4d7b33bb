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

// Whether blocks of the two may share bytes, given that `second` begins no lower.
bool overlap(const Piece& first, const Piece& second, uint64_t blocks) {
  if (begin_of(second) >= end_of(first, blocks)) return false;
  if (first.block_step != second.block_step) return true;
  const uint64_t shift = (begin_of(second) - begin_of(first)) % first.block_step;
  return shift < first.bytes || first.block_step - shift < second.bytes;
}

void check_overlaps(std::vector<Piece> pieces, uint64_t blocks) {
  std::vector<size_t> order(pieces.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return begin_of(pieces[a]) < begin_of(pieces[b]); });
  for (size_t i = 0; i < order.size(); ++i) {
    const Piece& first = pieces[order[i]];
    for (size_t j = i + 1; j < order.size(); ++j) {
      const Piece& second = pieces[order[j]];
      if (begin_of(second) >= end_of(first, blocks)) break;
      if (!overlap(first, second, blocks)) continue;
      fail(Code::invalid, "layers ", first.layer, " and ", second.layer,
           " of the cache share memory: pass each tensor once");
    }
  }
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
  check_overlaps(pieces_, blocks);
}

bool Layout::meets(const Layout& other) const {
  return base_ < other.base_ + other.span_ && other.base_ < base_ + span_;
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
