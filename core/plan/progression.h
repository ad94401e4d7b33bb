// Arithmetic progressions: whatever lies at equal steps is one command of several rows. The one
// place that looks for them, in lists (run_of) and in two dimensions, whatever the order (fold).
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace offcore {

// How many of `count` items, from the first on, follow each other at one step. `step_of(i)` is the
// step from item i to the next one, as an optional: none where no command takes it.
template <typename StepOf>
size_t run_of(size_t count, const StepOf& step_of) {
  if (count < 2) return count;
  const auto step = step_of(size_t{0});
  if (!step) return 1;
  size_t rows = 2;
  while (rows < count && step_of(rows - 1) == step) ++rows;
  return rows;
}

// A move between positions: of a batch an offset in one of its memories, whose number is in the
// bits from kPositionBits on. So neither sorting nor arithmetic has to ask where a place lies.
inline constexpr int kPositionBits = 48;
struct Span {
  uint64_t dst = 0;
  uint64_t src = 0;
  uint64_t bytes = 0;
  uint32_t move = 0;  // the first that it is made of
};
inline bool same_memory(uint64_t one, uint64_t other) {
  return ((one ^ other) >> kPositionBits) == 0;
}

// Spans of equal size at constant steps: row k is the first one's places + k steps.
struct SpanFold {
  Span first;
  uint64_t dst_step = 0;
  uint64_t src_step = 0;
  uint32_t rows = 1;
};

// Takes folds of at least rows_min rows out of `spans`, which are all of one size, sorted by dst,
// and between the same two memories. Steps lie between the size and pitch_max, so that rows do not
// overlap. Finds the steps whatever the order was in which the moves came: see progression.cpp.
std::vector<SpanFold> fold(std::vector<Span>& spans, uint32_t rows_min, uint64_t pitch_max);

}  // namespace offcore
