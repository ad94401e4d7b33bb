#include "studies/driver_copies.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/backend/cuda/gpu_context.h"

namespace offcore::studies {
namespace {

void check(const Pages& pages) {
  if (pages.dsts.size() == pages.srcs.size()) return;
  fail(Code::invalid, pages.dsts.size(), " destinations and ", pages.srcs.size(), " sources");
}

}  // namespace

void copy_by_loop(const Pages& pages, int device, uintptr_t stream) {
  check(pages);
  const cuda::Driver& driver = cuda::Driver::open();
  const cuda::PrimaryContext context(device);
  const cuda::ContextGuard current(context.handle());
  const auto handle = reinterpret_cast<cuda::CUstream>(stream);
  for (size_t i = 0; i < pages.dsts.size(); ++i) {
    cuda::check(driver.cuMemcpyAsync(pages.dsts[i], pages.srcs[i], pages.bytes, handle),
                "cuMemcpyAsync");
  }
}

void copy_by_batch(const Pages& pages, int device, uintptr_t stream, uint64_t call_pages) {
  check(pages);
  const cuda::Driver& driver = cuda::Driver::open();
  if (driver.cuMemcpyBatchAsync == nullptr) {
    fail(Code::unsupported, "this driver has no cuMemcpyBatchAsync: it is older than CUDA 13.0");
  }
  const cuda::PrimaryContext context(device);
  const cuda::ContextGuard current(context.handle());
  std::vector<cuda::CUdeviceptr> dsts(pages.dsts.begin(), pages.dsts.end());
  std::vector<cuda::CUdeviceptr> srcs(pages.srcs.begin(), pages.srcs.end());
  std::vector<size_t> sizes(pages.dsts.size(), pages.bytes);
  cuda::CUmemcpyAttributes attributes{.src_order = cuda::kSrcOrderStream};
  size_t first = 0;
  for (size_t at = 0; at < dsts.size(); at += call_pages) {
    cuda::check(driver.cuMemcpyBatchAsync(&dsts[at], &srcs[at], sizes.data(),
                                          std::min(call_pages, dsts.size() - at), &attributes,
                                          &first, 1, reinterpret_cast<cuda::CUstream>(stream)),
                "cuMemcpyBatchAsync");
  }
}

void copy_by_hand(const Pages& pages) {
  check(pages);
  for (size_t i = 0; i < pages.dsts.size(); ++i) {
    std::memcpy(reinterpret_cast<void*>(pages.dsts[i]), reinterpret_cast<void*>(pages.srcs[i]),
                pages.bytes);
  }
}

}  // namespace offcore::studies
