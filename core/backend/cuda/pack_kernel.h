// Copies between pages and a place of the same GPU where they lie side by side, by a few of its
// SMs: so that one plain copy carries over the link what many small ones would (kernels/pack.cu).
#pragma once
#include <memory>
#include <optional>

#include "core/backend/cuda/ptx_kernel.h"
#include "core/backend/page_table.h"

namespace offcore::cuda {

// The kernel, loaded on one GPU.
class PackKernel {
 public:
  static constexpr uint32_t kBlocksMax = 960;  // of a launch: what its arguments hold

  // What a launch copies: `bytes` of the pages from `offset` on, whole blocks.
  struct PackCopy {
    const PageTable& pages;
    uint64_t offset = 0;
    CUdeviceptr packed = 0;
    uint64_t bytes = 0;
    bool scatters = false;  // to the pages
  };

  // Throws driver.
  explicit PackKernel(std::shared_ptr<const PrimaryContext> context);

  struct Launched {
    uint32_t launches = 0;
    uint32_t sms = 0;
  };
  // On at most so many SMs.
  Launched launch(const PackCopy& copy, uint32_t sms, CUstream stream) const;

 private:
  std::optional<PtxKernel> kernel_;
};

}  // namespace offcore::cuda
