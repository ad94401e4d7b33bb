// The part of NCCL's C interface (2.18 to 2.31) that the shim takes calls of, declared by hand:
// types that callers only pass on are opaque, enumerations are ints.
#pragma once
#include <cstddef>
#include <cstdint>

namespace offcore::shim {

using Comm = struct CommTag*;
using Stream = struct StreamTag*;
using NcclWindow = struct NcclWindowTag*;
inline const Stream kStreamOfThread =
    reinterpret_cast<Stream>(uintptr_t{2});  // cudaStreamPerThread

using NcclResult = int;
inline constexpr NcclResult kNcclSuccess = 0;
inline constexpr NcclResult kNcclUnhandledCudaError = 1;
inline constexpr NcclResult kNcclSystemError = 2;
inline constexpr NcclResult kNcclInternalError = 3;
inline constexpr NcclResult kNcclInvalidArgument = 4;
inline constexpr NcclResult kNcclInvalidUsage = 5;
inline constexpr NcclResult kNcclRemoteError = 6;
inline constexpr NcclResult kNcclInProgress = 7;

inline constexpr int kNcclUint8 = 1;
inline constexpr int kWindowSymmetric = 1;  // NCCL_WIN_COLL_SYMMETRIC
inline constexpr int kShrinkAbort = 1;      // NCCL_SHRINK_ABORT

// Every function that the shim calls in the real library: name without "nccl", parameters.
#define OFFCORE_NCCL_CALLED(X)                                           \
  X(AllGather, (const void*, void*, size_t, int, Comm, Stream))          \
  X(AllReduce, (const void*, void*, size_t, int, int, Comm, Stream))     \
  X(AlltoAll, (const void*, void*, size_t, int, Comm, Stream))           \
  X(Bcast, (void*, size_t, int, int, Comm, Stream))                      \
  X(Broadcast, (const void*, void*, size_t, int, int, Comm, Stream))     \
  X(CommAbort, (Comm))                                                   \
  X(CommCount, (Comm, int*))                                             \
  X(CommCuDevice, (Comm, int*))                                          \
  X(CommDestroy, (Comm))                                                 \
  X(CommFinalize, (Comm))                                                \
  X(CommGetAsyncError, (Comm, NcclResult*))                              \
  X(CommRevoke, (Comm, int))                                             \
  X(CommShrink, (Comm, int*, int, Comm*, void*, int))                    \
  X(CommUserRank, (Comm, int*))                                          \
  X(CommWindowDeregister, (Comm, NcclWindow))                            \
  X(CommWindowRegister, (Comm, void*, size_t, NcclWindow*, int))         \
  X(Gather, (const void*, void*, size_t, int, int, Comm, Stream))        \
  X(GetVersion, (int*))                                                  \
  X(GroupEnd, ())                                                        \
  X(GroupSimulateEnd, (void*))                                           \
  X(GroupStart, ())                                                      \
  X(Reduce, (const void*, void*, size_t, int, int, int, Comm, Stream))   \
  X(ReduceScatter, (const void*, void*, size_t, int, int, Comm, Stream)) \
  X(Scatter, (const void*, void*, size_t, int, int, Comm, Stream))

}  // namespace offcore::shim
