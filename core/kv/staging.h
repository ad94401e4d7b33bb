// Memory of a GPU's own by which stores of small pages go: strided copies gather the pages of a
// block there, from where rows cross the link as large copies. An engine pauses after each copy,
// and here the many small ones are another engine's than the link's.
//
// Loads gain nothing by it: on an H200 (driver 580) the engine that spreads the rows slows down
// while the other one writes. Nor do pages for which the pause hardly counts.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "core/backend/backend.h"
#include "core/kv/cursor.h"

namespace offcore::kv {

struct Staging {
  static constexpr uint16_t kLanes = 3;
  static constexpr uint16_t kFirstLane = 2;  // of the backend's, behind those of the directions
  static constexpr uint64_t kBlocks = 8;     // of a part, if a lane has room: rows of one batch

  Share room;   // a part of it for each lane; data is null where there is none
  Share tried;  // rows of the trial: to give pinned memory back waits for the whole GPU
  uint64_t lane_bytes = 0;
  std::vector<bool> groups;  // whose stores go by it
};

// Takes at most so many bytes of rank 0, and no SM. None where no group has such pages, where the
// backend has no engine for copies within a GPU's memory, or a trial of them does not bring the
// same bytes as copies to the host do. `memories`: of each group, as Layout::folds takes them.
Staging staging_of(Backend& backend, const std::vector<Group>& groups,
                   const std::vector<std::vector<uint64_t>>& memories, uint64_t bytes);

}  // namespace offcore::kv
