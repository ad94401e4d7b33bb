// Reductions by this process's CPUs: what the host backend runs, and what the simulator computes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "core/ir/command.h"
#include "core/ir/reduction.h"

namespace offcore {

// dst[i] = reduction of all sources' element i, for `bytes` of elements. `dst` may be a source;
// otherwise it overlaps none. Places need not be aligned. On every machine the same bits, but for
// the bits of a NaN.
void reduce(const Reduction& reduction, std::byte* dst, std::span<const std::byte* const> sources,
            uint64_t bytes);

// What a reduce command does to `bytes` of its destination and sources.
inline void reduce(const Reduction& reduction, const Command& command, std::byte* dst,
                   std::span<const std::byte* const> sources, uint64_t bytes) {
  if (copies_source(command)) {
    std::memmove(dst, sources[0], bytes);
  } else {
    reduce(reduction, dst, sources, bytes);
  }
}

}  // namespace offcore
