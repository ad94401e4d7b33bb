// What a reduce command does to bytes that the host can reach.
#pragma once
#include <cstring>

#include "core/base/reduce.h"
#include "core/ir/command.h"

namespace offcore {

// To `bytes` of its destination and sources.
inline void reduce(const Reduction& reduction, const Command& command, std::byte* dst,
                   std::span<const std::byte* const> sources, uint64_t bytes) {
  if (copies_source(command)) {
    std::memmove(dst, sources[0], bytes);
  } else {
    reduce(reduction, dst, sources, bytes);
  }
}

}  // namespace offcore
