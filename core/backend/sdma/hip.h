// AMD's HIP runtime, opened at run time, for what older ROCm has instead of HSA's batch copy. Types
// are declared by hand, as HIP 7's public headers lay them out. Never yet run on AMD hardware.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

#include "core/base/fork.h"

namespace offcore::hip {

using HipError = int;
using HipStream = struct StreamTag*;

inline constexpr HipError kSuccess = 0;
inline constexpr HipError kOutOfMemory = 2;
inline constexpr HipError kNotReady = 600;
inline constexpr HipError kPeerAccessAlready = 704;
inline constexpr unsigned kNonBlocking = 1;
inline constexpr unsigned kHostPortable = 1;
inline constexpr unsigned kHostMapped = 2;

// Attributes are left out: some versions of hipMemcpyBatchAsync refuse them.
#define OFFCORE_HIP_TABLE(X)                                      \
  X(hipInit, HipError, (unsigned))                                \
  X(hipGetDeviceCount, HipError, (int*))                          \
  X(hipSetDevice, HipError, (int))                                \
  X(hipDeviceEnablePeerAccess, HipError, (int, unsigned))         \
  X(hipMalloc, HipError, (void**, size_t))                        \
  X(hipFree, HipError, (void*))                                   \
  X(hipHostMalloc, HipError, (void**, size_t, unsigned))          \
  X(hipHostFree, HipError, (void*))                               \
  X(hipHostRegister, HipError, (void*, size_t, unsigned))         \
  X(hipHostUnregister, HipError, (void*))                         \
  X(hipHostGetDevicePointer, HipError, (void**, void*, unsigned)) \
  X(hipStreamCreateWithFlags, HipError, (HipStream*, unsigned))   \
  X(hipStreamDestroy, HipError, (HipStream))                      \
  X(hipStreamQuery, HipError, (HipStream))                        \
  X(hipGetErrorString, const char*, (HipError))                   \
  X(hipMemcpyBatchAsync, HipError,                                \
    (void**, void**, size_t*, size_t, void*, size_t*, size_t, size_t*, HipStream))

class HipRuntime : public OfProcess {
 public:
  // Opens the runtime, once in a process. Throws unavailable, saying what is missing.
  static const HipRuntime& open();
  // The runtime, once open. Both throw invalid in a child of a process that had opened it.
  static const HipRuntime& get();
  explicit HipRuntime(const std::string& path);  // by open() only
  int devices() const { return devices_; }

#define OFFCORE_HIP_MEMBER(name, returns, parameters) returns(*name) parameters = nullptr;
  OFFCORE_HIP_TABLE(OFFCORE_HIP_MEMBER)
#undef OFFCORE_HIP_MEMBER

 private:
  int devices_ = 0;
};

bool can_open(std::string& why_not);
void check(HipError error, std::string_view what);  // throws memory or driver

}  // namespace offcore::hip
