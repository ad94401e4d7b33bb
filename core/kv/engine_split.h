// Whether both engines of a GPU's link copy in one direction: the one that is made for it, and the
// other one by copies that pretend to be for the way back (Launch::crossed). An engine pauses after
// each copy, which is a large part of the time where pages are small.
//
// The other direction's copies would have to wait for them: so only while there are none.
#pragma once
#include <cstdint>
#include <vector>

#include "core/backend/backend.h"
#include "core/kv/command_builder.h"

namespace offcore::kv {

struct EngineSplit {
  std::vector<bool> groups;  // whose blocks go so
  Share tried;  // rows of the trial: to give pinned memory back waits for the whole GPU

  bool any() const;
};

// Takes at most so many bytes of the host's memory, besides four blocks for the trial, or two rows
// that blocks share, and no SM. No group where none has such pages, where the backend has no such
// engines, or a trial of them does not bring the same bytes as others do. `memories`: of each
// group, as Layout::folds takes them.
EngineSplit crossing_of(Backend& backend, const std::vector<CacheGroup>& groups,
                        const std::vector<std::vector<uint64_t>>& memories, uint64_t bytes);

}  // namespace offcore::kv
