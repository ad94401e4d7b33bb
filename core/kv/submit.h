// A part of a job as a program of one engine queue, launched at once.
#pragma once
#include <memory>

#include "core/backend/backend.h"
#include "core/kv/cursor.h"

namespace offcore::kv {

// Parts of one direction run one after the other, those of the two directions at once. `keep` is
// held until the part has ended. `checked`: verifies the program first. Throws what a launch does.
std::shared_ptr<Run> submit(Backend& backend, Direction direction, const Layout& layout, Part part,
                            std::shared_ptr<const void> keep, bool checked);

}  // namespace offcore::kv
