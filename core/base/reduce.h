// Reductions by this process's CPUs: what the host backend and multicast run, and what the
// simulator computes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/base/reduction.h"

namespace offcore {

// dst[i] = reduction of all sources' element i, for `bytes` of elements. `dst` may be a source;
// otherwise it overlaps none. Places need not be aligned. On every machine the same bits, but for
// the bits of a NaN.
void reduce(const Reduction& reduction, std::byte* dst, std::span<const std::byte* const> sources,
            uint64_t bytes);

}  // namespace offcore
