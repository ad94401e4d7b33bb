// What programs do that have no offcore: a driver's call for each page, or one for all of them. For
// measuring beside it.
#pragma once
#include <cstdint>
#include <span>

namespace offcore::studies {

// Pages between a GPU and pinned memory; all of one size.
struct Pages {
  std::span<const uint64_t> dsts;
  std::span<const uint64_t> srcs;
  uint64_t bytes = 0;
};

// These return once all is in the stream of that GPU. Throw invalid, unsupported or driver.
void copy_by_loop(const Pages& pages, int device, uintptr_t stream);
// In one call, or so many pages a call.
void copy_by_batch(const Pages& pages, int device, uintptr_t stream, uint64_t call_pages);
// In this process's own memory, done on return.
void copy_by_hand(const Pages& pages);

}  // namespace offcore::studies
