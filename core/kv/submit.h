// A part of a job as a program of one engine queue, launched at once.
#pragma once
#include <memory>

#include "core/backend/backend.h"
#include "core/kv/command_builder.h"

namespace offcore::kv {

// Where a part goes. Those of one lane run one after the other, those of several at once.
struct SubmitTarget {
  Backend& backend;  // its local rank is `rank`
  Direction direction;
  Rank rank = kOwner;  // who copies
  uint16_t lane = 0;
  bool gives_way = false;      // others' copies may come between it and the one before
  bool crossed = false;        // strided copies are the other direction's engine's
  std::byte* stage = nullptr;  // the lane's own memory of that rank
  uint64_t stage_bytes = 0;
  const Mark* after = nullptr;  // that it begins after
};

// `keep` is held until the part has ended. `checked`: verifies the program first. Throws what a
// launch does.
std::shared_ptr<Run> submit(const SubmitTarget& target, const Layout& layout, Part part,
                            std::shared_ptr<const void> keep, bool checked);

}  // namespace offcore::kv
