// Finds arithmetic progressions in two dimensions: what a paged cache looks like, whose blocks are
// scattered and whose layers lie at one constant stride.
//
// A step of a progression carries nearly every span of it to another one. So the steps from one
// span to all others are tried on a few more, and those that carry most of them on all; the best
// one makes chains, and what is left over is tried again. Every part is linear in the spans, but
// for the sample, which is constant.
#include "core/plan/progression.h"

#include <algorithm>

namespace offcore {
namespace {

constexpr uint32_t kNone = UINT32_MAX;
constexpr size_t kSample = 16;     // spans that a step is tried on first
constexpr size_t kPatience = 4;    // misses beyond twice the hits, when it is given up
constexpr size_t kCandidates = 4;  // steps that are tried on all spans
constexpr int kRounds = 4;
constexpr int kStarts = 3;        // spans that steps are taken from, in a round
constexpr size_t kNearlyAll = 8;  // a step that carries all but one in so many is not improved on

struct FoldStep {
  uint64_t dst = 0;
  uint64_t src = 0;
  size_t carried = 0;  // spans that it carries to another one
};

// Whether one is a multiple of the other, which makes the same chains, but more of them.
bool parallel(const FoldStep& a, const FoldStep& b) {
  return static_cast<unsigned __int128>(a.dst) * b.src ==
         static_cast<unsigned __int128>(b.dst) * a.src;
}

// Spans by where they write, which no two do alike.
class Index {
 public:
  explicit Index(const std::vector<Span>& spans) : spans_(spans) {
    size_t slots = 16;
    for (shift_ = 60; slots < 2 * spans.size(); --shift_) slots *= 2;
    mask_ = slots - 1;
    slots_.assign(slots, kNone);
    for (uint32_t i = 0; i < spans.size(); ++i) {
      size_t slot = slot_of(spans[i].dst);
      while (slots_[slot] != kNone) slot = (slot + 1) & mask_;
      slots_[slot] = i;
    }
  }

  // The span that lies a step away, or kNone.
  uint32_t find(uint64_t dst, uint64_t src) const {
    for (size_t slot = slot_of(dst); slots_[slot] != kNone; slot = (slot + 1) & mask_) {
      const Span& span = spans_[slots_[slot]];
      if (span.dst == dst) return span.src == src ? slots_[slot] : kNone;
    }
    return kNone;
  }

 private:
  size_t slot_of(uint64_t dst) const { return dst * 0x9e3779b97f4a7c15u >> shift_; }

  const std::vector<Span>& spans_;
  int shift_ = 0;
  size_t mask_ = 0;
  std::vector<uint32_t> slots_;
};

class Folding {
 public:
  Folding(std::vector<Span>& spans, uint32_t rows_min, uint64_t pitch_max)
      : spans_(spans), rows_min_(rows_min), pitch_max_(pitch_max) {}

  std::vector<SpanFold> run() {
    for (int round = 0; round < kRounds && spans_.size() >= rows_min_; ++round) {
      const Index index(spans_);
      const FoldStep step = best_step(index);
      if (step.carried + 1 < rows_min_ || !take_chains(index, step)) break;
    }
    return std::move(folds_);
  }

 private:
  bool is_step(const Span& from, const Span& to) const {
    const uint64_t dst = to.dst - from.dst;
    const uint64_t src = to.src - from.src;
    return to.dst > from.dst && to.src > from.src && std::min(dst, src) >= from.bytes &&
           std::max(dst, src) <= pitch_max_;
  }

  FoldStep best_step(const Index& index) const {
    std::vector<FoldStep> candidates;
    FoldStep best;
    for (int start = 0;
         start < kStarts && best.carried * kNearlyAll < spans_.size() * (kNearlyAll - 1); ++start) {
      const size_t tried = candidates.size();
      collect(index, spans_[(2 * start + 1) * spans_.size() / (2 * kStarts + 1)], candidates);
      for (size_t i = tried; i < candidates.size(); ++i) {
        candidates[i].carried = carried(index, candidates[i], best.carried);
        if (candidates[i].carried > best.carried) best = candidates[i];
      }
    }
    return best;
  }

  // How many spans a step carries; not to the end where they cannot become more than so many.
  size_t carried(const Index& index, const FoldStep& step, size_t least) const {
    size_t found = 0;
    size_t left = spans_.size();
    for (const Span& span : spans_) {
      if (found + left-- <= least) break;
      found += index.find(span.dst + step.dst, span.src + step.src) != kNone;
    }
    return found;
  }

  // The steps from a span that carry most of the sample, the shorter ones first.
  void collect(const Index& index, const Span& from, std::vector<FoldStep>& candidates) const {
    std::vector<FoldStep> found;
    for (const Span& to : spans_) {
      if (!is_step(from, to)) continue;
      FoldStep step{.dst = to.dst - from.dst, .src = to.src - from.src};
      size_t misses = 0;
      for (size_t k = 0; k < kSample && misses < kPatience + 2 * step.carried; ++k) {
        const Span& span = spans_[k * spans_.size() / kSample];
        const bool hit = index.find(span.dst + step.dst, span.src + step.src) != kNone;
        ++(hit ? step.carried : misses);
      }
      if (misses < kPatience + 2 * step.carried) found.push_back(step);
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const FoldStep& a, const FoldStep& b) { return a.carried > b.carried; });
    size_t kept = 0;
    for (const FoldStep& step : found) {
      const auto again = [&](const FoldStep& other) { return parallel(step, other); };
      if (std::any_of(candidates.begin(), candidates.end(), again)) continue;
      candidates.push_back(step);
      if (++kept == kCandidates) break;
    }
  }

  bool take_chains(const Index& index, const FoldStep& step) {
    std::vector<bool> taken(spans_.size(), false);
    size_t rows_taken = 0;
    for (uint32_t i = 0; i < spans_.size(); ++i) {
      const Span& first = spans_[i];
      if (index.find(first.dst - step.dst, first.src - step.src) != kNone) continue;
      SpanFold fold{.first = first, .dst_step = step.dst, .src_step = step.src};
      chain_ = {i};
      for (uint64_t k = 1;; ++k) {
        const uint32_t next = index.find(first.dst + k * step.dst, first.src + k * step.src);
        if (next == kNone) break;
        chain_.push_back(next);
      }
      fold.rows = static_cast<uint32_t>(chain_.size());
      if (fold.rows < rows_min_) continue;
      for (uint32_t row : chain_) taken[row] = true;
      rows_taken += fold.rows;
      folds_.push_back(fold);
    }
    size_t kept = 0;
    for (size_t i = 0; i < spans_.size(); ++i) {
      if (!taken[i]) spans_[kept++] = spans_[i];
    }
    spans_.resize(kept);
    return rows_taken > 0;
  }

  std::vector<Span>& spans_;
  const uint32_t rows_min_;
  const uint64_t pitch_max_;
  std::vector<uint32_t> chain_;
  std::vector<SpanFold> folds_;
};

}  // namespace

std::vector<SpanFold> fold(std::vector<Span>& spans, uint32_t rows_min, uint64_t pitch_max) {
  return Folding(spans, std::max(rows_min, 2u), pitch_max).run();
}

}  // namespace offcore
