// Copies between the host and a GPU that a kernel on a few of its SMs makes: only where a caller
// asks for that, for pages so small that engines take longer over each than a link over its bytes.
//
// A launch takes strided copies of one shape; their addresses are its arguments, so that nothing
// has to outlive the call.
#pragma once
#include <memory>
#include <vector>

#include "core/backend/cuda/device.h"

namespace offcore::cuda {

// The kernel, loaded on one GPU.
class Gather {
 public:
  static constexpr uint32_t kBlocks = 16;  // SMs that it takes, at most

  explicit Gather(std::shared_ptr<const Context> context);
  ~Gather();
  Gather(const Gather&) = delete;
  Gather& operator=(const Gather&) = delete;

 private:
  friend class Gathering;
  std::shared_ptr<const Context> context_;
  CUmodule module_ = nullptr;
  CUfunction function_ = nullptr;
};

// Copies that are collected for launches into one stream.
class Gathering {
 public:
  static constexpr size_t kCopiesMax = 128;  // of a launch: what its arguments hold

  Gathering(const Gather& gather, CUstream stream) : gather_(gather), stream_(stream) {}

  // Whether the kernel copies that: it moves 16 bytes at a time.
  static bool takes(const Rows& copy);
  // Both return the launches that this took.
  uint32_t add(const Rows& copy);
  uint32_t flush();

 private:
  struct Pair {
    CUdeviceptr dst = 0;
    CUdeviceptr src = 0;
  };
  bool fits(const Rows& copy) const;

  const Gather& gather_;
  CUstream stream_;
  Rows shape_;
  std::vector<Pair> pairs_;
};

}  // namespace offcore::cuda
