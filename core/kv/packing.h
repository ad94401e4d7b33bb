// Whether blocks are packed: a few SMs gather their pages into a place in the GPU's memory, from
// where one plain copy takes whole rows over the link; loads the other way round. A part in one of
// several such places is packed while another one's crosses the link.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "core/backend/backend.h"
#include "core/backend/page_table.h"
#include "core/kv/command_builder.h"

namespace offcore::kv {

// Which jobs may take SMs.
enum class Policy : uint8_t {
  best,     // those that are expected to end sooner so
  zero_sm,  // none
  pack,     // all
};

Policy parse_policy(std::string_view name);  // auto, zero_sm or pack; throws invalid

struct PackOptions {
  Policy policy = Policy::zero_sm;
  uint32_t sms = 4;                     // in a direction, at most
  uint64_t bytes = uint64_t{32} << 20;  // of the GPU's memory, at most
};

struct Packing {
  static constexpr uint32_t kTimesKept =
      256;  // parts of a lane whose time is not read yet, at most

  std::vector<std::array<bool, 2>> pays;  // for many scattered blocks, by group, then direction;
                                          // empty: none
  bool always = false;                    // all blocks, whatever pays
  std::vector<Share> pieces;              // of each group, as cores read them
  Share stage;                            // of all lanes
  Share times;                            // registered host memory: kTimesKept times a lane and SM
  uint32_t lanes = 0;                     // in a direction
  uint32_t sms = 0;                       // of a lane
  uint64_t lane_bytes = 0;

  bool any() const { return !pays.empty(); }
  const PagePiece* pieces_of(size_t group) const {
    return reinterpret_cast<const PagePiece*>(pieces[group].data);
  }
};

// How many SMs a kernel of such a transfer takes, at most.
uint32_t sms_of_lane(uint32_t sms);

// Throws invalid where all are to be packed and a block does not fit, unsupported where nothing
// packs, and what the backend throws. `memories`: of each group, as Layout::folds takes them.
Packing packing_of(Backend& backend, const std::vector<CacheGroup>& groups,
                   const std::vector<std::vector<uint64_t>>& memories, const PackOptions& options);

}  // namespace offcore::kv
