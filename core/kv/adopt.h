// A cache with a tensor a layer, in memory where its tensors begin at equal steps: the one it has,
// mapped once more. Its pieces fold there, as those of one tensor do.
#pragma once
#include "core/backend/backend.h"
#include "core/kv/layout.h"

namespace offcore::kv {

struct AdoptedCache {
  std::shared_ptr<const Layout> layout;       // null: it stays where it is
  std::shared_ptr<const MappedAgain> memory;  // of `layout`
};

// `memories`: as for Layout::folds. Nothing where a block would not take fewer copies, or where the
// memory cannot be mapped once more.
AdoptedCache adopt(Backend& backend, const Layout& layout, std::span<const uint64_t> memories);

}  // namespace offcore::kv
