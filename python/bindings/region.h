// A part of a window: the same bytes on every rank.
#pragma once
#include <cstdint>
#include <memory>

#include "core/comm/request.h"

namespace offcore {

struct Region {
  std::shared_ptr<Window> window;
  uint64_t offset = 0;
  uint64_t bytes = 0;

  Operand operand(Rank rank) const {
    std::byte* base = window->base(rank);
    return {.data = base == nullptr ? nullptr : base + offset,
            .bytes = bytes,
            .window = window,
            .offset = offset,
            .given = true};
  }
};

}  // namespace offcore
