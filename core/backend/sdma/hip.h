// AMD's HIP runtime, opened at run time, for what older ROCm has instead of HSA's batch copy. Types
// are declared by hand, as HIP 7's public headers lay them out. Never yet run on AMD hardware.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

#include "core/base/fork.h"

namespace offcore::hip {

using Error = int;
using Stream = struct StreamTag*;

inline constexpr Error kSuccess = 0;
inline constexpr Error kOutOfMemory = 2;
inline constexpr Error kNotReady = 600;
inline constexpr Error kPeerAccessAlready = 704;
inline constexpr unsigned kNonBlocking = 1;
inline constexpr unsigned kHostPortable = 1;
inline constexpr unsigned kHostMapped = 2;

// Attributes are left out: some versions of hipMemcpyBatchAsync refuse them.
#define OFFCORE_HIP_TABLE(X)                                   \
  X(hipInit, Error, (unsigned))                                \
  X(hipGetDeviceCount, Error, (int*))                          \
  X(hipSetDevice, Error, (int))                                \
  X(hipDeviceEnablePeerAccess, Error, (int, unsigned))         \
  X(hipMalloc, Error, (void**, size_t))                        \
  X(hipFree, Error, (void*))                                   \
  X(hipHostMalloc, Error, (void**, size_t, unsigned))          \
  X(hipHostFree, Error, (void*))                               \
  X(hipHostRegister, Error, (void*, size_t, unsigned))         \
  X(hipHostUnregister, Error, (void*))                         \
  X(hipHostGetDevicePointer, Error, (void**, void*, unsigned)) \
  X(hipStreamCreateWithFlags, Error, (Stream*, unsigned))      \
  X(hipStreamDestroy, Error, (Stream))                         \
  X(hipStreamQuery, Error, (Stream))                           \
  X(hipGetErrorString, const char*, (Error))                   \
  X(hipMemcpyBatchAsync, Error,                                \
    (void**, void**, size_t*, size_t, void*, size_t*, size_t, size_t*, Stream))

class Runtime : public OfProcess {
 public:
  // Opens the runtime, once in a process. Throws unavailable, saying what is missing,
  // and invalid in a child of a process that had opened it.
  static const Runtime& open();
  int devices() const { return devices_; }

#define OFFCORE_HIP_MEMBER(name, returns, parameters) returns(*name) parameters = nullptr;
  OFFCORE_HIP_TABLE(OFFCORE_HIP_MEMBER)
#undef OFFCORE_HIP_MEMBER

 private:
  Runtime();
  int devices_ = 0;
};

bool can_open(std::string& why_not);
void check(Error error, std::string_view what);  // throws memory or driver

}  // namespace offcore::hip
