#include "core/kv/rows.h"

#include <algorithm>

#include "core/base/error.h"

namespace offcore::kv {

void RowsByAddress::pin(std::span<const int64_t> slots, bool distinct, const RowPlaces& places,
                        std::vector<Row>& rows) {
  rows.clear();
  rows.reserve(slots.size());
  std::vector<PlaceRun> runs;
  each_place(slots, places.blocks, [&](int64_t slot, uint64_t row, uint32_t place) {
    if (slot < 0 || row == 0) fail(Code::invalid, "slot ", slot, " is not in a row of memory");
    rows.push_back({.at = reinterpret_cast<std::byte*>(row + place * places.step), .place = place});
    if (!runs.empty() && runs.back().row == row && runs.back().place + runs.back().count == place) {
      ++runs.back().count;
    } else {
      runs.push_back({row, place, 1});
    }
  });
  if (distinct) check_apart(std::move(runs), places);
}

void RowsByAddress::check_apart(std::vector<PlaceRun> runs, const RowPlaces& places) const {
  std::sort(runs.begin(), runs.end());
  for (size_t i = 1; i < runs.size(); ++i) {
    const PlaceRun& before = runs[i - 1];
    const PlaceRun& run = runs[i];
    if (run.row == before.row && run.place < before.place + before.count) {
      fail(Code::invalid, "slot ", run.row * places.blocks + run.place, " is listed twice");
    }
    if (run.row == before.row || run.row - before.row >= row_bytes_) continue;
    fail(Code::invalid, "two rows of ", row_bytes_, " bytes overlap: one begins ",
         run.row - before.row, " bytes behind the other");
  }
}

}  // namespace offcore::kv
