// Places in a program's buffers as Python tells them: buffer, rank (-1: the host), offset.
#pragma once
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <tuple>

#include "core/base/error.h"
#include "core/ir/command.h"

namespace offcore {

using Place = std::tuple<uint32_t, int32_t, uint64_t>;

inline Slice slice_of(const Place& place) {
  const auto& [buffer, rank, offset] = place;
  if (buffer > UINT8_MAX || rank < -1 || rank >= kHostRank) {
    fail(Code::invalid, "there is no buffer ", buffer, " of rank ", rank);
  }
  return {offset, rank < 0 ? kHostRank : static_cast<Rank>(rank), static_cast<BufferId>(buffer)};
}

}  // namespace offcore
