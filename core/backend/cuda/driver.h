// NVIDIA's driver API, opened at run time: the one place that knows its names and layouts.
//
// The table below is the whole surface. Types are declared here by hand, as the driver's ABI of
// version 13 lays them out, so that nothing needs CUDA's headers. Every call goes through
// Driver::get() and check().
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/error.h"
#include "core/base/fork.h"

namespace offcore::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUmemHandle = unsigned long long;
using CUcontext = struct ContextTag*;
using CUstream = struct StreamTag*;
using CUevent = struct EventTag*;
using CUmodule = struct ModuleTag*;
using CUfunction = struct FunctionTag*;
using CUgraph = struct GraphTag*;
using CUgraphNode = struct GraphNodeTag*;
using CUuserObject = struct UserObjectTag*;
using CUhostFn = void (*)(void*);
struct CUipcMemHandle {
  char bytes[64];
};

inline constexpr CUresult kSuccess = 0;
inline constexpr CUresult kInvalidValue = 1;
inline constexpr CUresult kOutOfMemory = 2;
inline constexpr CUresult kNotReady = 600;
inline constexpr CUresult kPeerAccessAlready = 704;
inline constexpr CUresult kAlreadyRegistered = 712;
inline constexpr CUresult kNotSupported = 801;

// Whether the driver does not do what it was asked for, and all else is as it was.
constexpr bool refused(CUresult result) {
  return result == kInvalidValue || result == kNotSupported;
}

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr int kMostUrgent = -1000;  // the driver takes the most that there is
inline constexpr unsigned kEventDefault = 0;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kWaitGeq = 0;  // cyclic: (int32_t)(*word - value) >= 0
inline constexpr unsigned kWaitEq = 1;
inline constexpr unsigned kHostPortable = 1;
inline constexpr unsigned kHostDeviceMap = 2;

// Streams that are names rather than handles: 0 and 1 are the legacy default stream, 2 is the
// calling thread's.
inline constexpr uintptr_t kLegacyStream = 1;
inline constexpr uintptr_t kPerThreadStream = 2;

// CUstreamCaptureStatus and CUstreamCaptureMode.
inline constexpr int kCaptureNone = 0;
inline constexpr int kCaptureActive = 1;
inline constexpr int kCaptureRelaxed = 2;

inline constexpr unsigned kNoDestructorSync = 1;  // CUuserObject_flags
inline constexpr unsigned kIpcPeerAccess = 1;     // CUipcMem_flags: to whatever device it is on

enum class Attribute : int {
  max_pitch = 11,
  multiprocessors = 16,
  multiprocessor_threads = 39,
  unified_addressing = 41,
  compute_major = 75,
  can_use_host_pointer = 91,
  virtual_memory = 102,
  posix_descriptors = 103,
  wide_stream_words = 122,  // of 64 bits
};

inline constexpr int kMemoryPinned = 1;     // CUmemAllocationType
inline constexpr int kPosixDescriptor = 1;  // CUmemAllocationHandleType
inline constexpr int kLocationDevice = 1;   // CUmemLocationType
inline constexpr int kLocationNumaNode = 3;
inline constexpr int kAccessReadWrite = 3;
inline constexpr int kHostMemoryType = 1;  // CUmemorytype
inline constexpr int kDeviceMemory = 2;
inline constexpr int kUnifiedMemory = 4;
inline constexpr int kPointerMemoryType = 2;  // CUpointer_attribute
inline constexpr int kPointerBufferId = 7;    // of an allocation: none in the process has it again
inline constexpr int kPointerManaged = 8;
inline constexpr int kPointerOrdinal = 9;
// Whether contexts with peer access reach it, and other processes can open it by IPC.
inline constexpr int kPointerPeers = 10;
inline constexpr int kPointerRangeStart = 11;
inline constexpr int kPointerRangeBytes = 12;
inline constexpr int kPointerAccess = 16;  // of the current context's device: as CUmemAccess_flags
inline constexpr int kSrcOrderStream = 1;  // CUmemcpySrcAccessOrder
inline constexpr unsigned kPreferOverlap = 1;  // CUmemcpyFlags
inline constexpr uint32_t kOpWait32 = 1;       // CUstreamBatchMemOpType
inline constexpr uint32_t kOpWrite32 = 2;
inline constexpr uint32_t kOpWait64 = 4;
inline constexpr uint32_t kOpWrite64 = 5;

struct CUmemLocation {
  int type = 0;
  int id = 0;
};

struct CUmemAllocationProp {
  int type = 0;
  int handle_types = 0;
  CUmemLocation location;
  void* win32_metadata = nullptr;
  struct {
    unsigned char compression = 0;
    unsigned char rdma = 0;
    unsigned short usage = 0;
    unsigned char reserved[4] = {0, 0, 0, 0};
  } flags;
};
static_assert(sizeof(CUmemAllocationProp) == 32);

struct CUmemAccessDesc {
  CUmemLocation location;
  int flags = 0;
};

struct CUmemcpyAttributes {
  int src_order = 0;
  CUmemLocation src_hint;
  CUmemLocation dst_hint;
  unsigned flags = 0;
};
static_assert(sizeof(CUmemcpyAttributes) == 24);

// One wait or write of a batch.
struct CUstreamMemOp {
  uint32_t operation = 0;
  CUdeviceptr address = 0;
  uint64_t value = 0;  // the low half, for 32 bits
  unsigned flags = 0;
  CUdeviceptr alias = 0;
  uint64_t reserved = 0;
};
static_assert(sizeof(CUstreamMemOp) == 48);

struct CUmemcpy2D {
  size_t src_x = 0;
  size_t src_y = 0;
  int src_type = kUnifiedMemory;
  const void* src_host = nullptr;
  CUdeviceptr src = 0;
  void* src_array = nullptr;
  size_t src_pitch = 0;
  size_t dst_x = 0;
  size_t dst_y = 0;
  int dst_type = kUnifiedMemory;
  void* dst_host = nullptr;
  CUdeviceptr dst = 0;
  void* dst_array = nullptr;
  size_t dst_pitch = 0;
  size_t width = 0;
  size_t height = 0;
};
static_assert(sizeof(CUmemcpy2D) == 128);

struct CUmemcpy3D {
  size_t src_x = 0;
  size_t src_y = 0;
  size_t src_z = 0;
  size_t src_lod = 0;
  int src_type = kUnifiedMemory;
  const void* src_host = nullptr;
  CUdeviceptr src = 0;
  void* src_array = nullptr;
  void* reserved0 = nullptr;
  size_t src_pitch = 0;
  size_t src_height = 0;
  size_t dst_x = 0;
  size_t dst_y = 0;
  size_t dst_z = 0;
  size_t dst_lod = 0;
  int dst_type = kUnifiedMemory;
  void* dst_host = nullptr;
  CUdeviceptr dst = 0;
  void* dst_array = nullptr;
  void* reserved1 = nullptr;
  size_t dst_pitch = 0;
  size_t dst_height = 0;
  size_t width = 0;
  size_t height = 0;
  size_t depth = 0;
};
static_assert(sizeof(CUmemcpy3D) == 200);

// name, the version whose form of it is meant, parameters
#define OFFCORE_CUDA_TABLE(X)                                                                    \
  X(cuInit, 2000, (unsigned))                                                                    \
  X(cuDeviceGetCount, 2000, (int*))                                                              \
  X(cuDeviceGet, 2000, (CUdevice*, int))                                                         \
  X(cuDeviceGetName, 2000, (char*, int, CUdevice))                                               \
  X(cuDeviceGetAttribute, 2000, (int*, Attribute, CUdevice))                                     \
  X(cuDeviceCanAccessPeer, 4000, (int*, CUdevice, CUdevice))                                     \
  X(cuDevicePrimaryCtxRetain, 7000, (CUcontext*, CUdevice))                                      \
  X(cuDevicePrimaryCtxRelease, 11000, (CUdevice))                                                \
  X(cuCtxGetCurrent, 4000, (CUcontext*))                                                         \
  X(cuCtxPushCurrent, 4000, (CUcontext))                                                         \
  X(cuCtxPopCurrent, 4000, (CUcontext*))                                                         \
  X(cuCtxEnablePeerAccess, 4000, (CUcontext, unsigned))                                          \
  X(cuCtxSynchronize, 2000, ())                                                                  \
  X(cuMemAlloc, 3020, (CUdeviceptr*, size_t))                                                    \
  X(cuMemFree, 3020, (CUdeviceptr))                                                              \
  X(cuMemGetAllocationGranularity, 10020, (size_t*, const CUmemAllocationProp*, int))            \
  X(cuMemCreate, 10020, (CUmemHandle*, size_t, const CUmemAllocationProp*, unsigned long long))  \
  X(cuMemRelease, 10020, (CUmemHandle))                                                          \
  X(cuMemAddressReserve, 10020, (CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long)) \
  X(cuMemAddressFree, 10020, (CUdeviceptr, size_t))                                              \
  X(cuMemMap, 10020, (CUdeviceptr, size_t, size_t, CUmemHandle, unsigned long long))             \
  X(cuMemUnmap, 10020, (CUdeviceptr, size_t))                                                    \
  X(cuMemSetAccess, 10020, (CUdeviceptr, size_t, const CUmemAccessDesc*, size_t))                \
  X(cuMemExportToShareableHandle, 10020, (void*, CUmemHandle, int, unsigned long long))          \
  X(cuMemImportFromShareableHandle, 10020, (CUmemHandle*, void*, int))                           \
  X(cuMemRetainAllocationHandle, 11000, (CUmemHandle*, void*))                                   \
  X(cuMemGetAddressRange, 3020, (CUdeviceptr*, size_t*, CUdeviceptr))                            \
  X(cuIpcGetMemHandle, 4010, (CUipcMemHandle*, CUdeviceptr))                                     \
  X(cuIpcOpenMemHandle, 11000, (CUdeviceptr*, CUipcMemHandle, unsigned))                         \
  X(cuIpcCloseMemHandle, 4010, (CUdeviceptr))                                                    \
  X(cuMemGetInfo, 3020, (size_t*, size_t*))                                                      \
  X(cuPointerGetAttribute, 4000, (void*, int, CUdeviceptr))                                      \
  X(cuStreamCreateWithPriority, 5050, (CUstream*, unsigned, int))                                \
  X(cuStreamDestroy, 4000, (CUstream))                                                           \
  X(cuStreamQuery, 2000, (CUstream))                                                             \
  X(cuStreamWaitEvent, 3020, (CUstream, CUevent, unsigned))                                      \
  X(cuStreamGetCaptureInfo, 11030,                                                               \
    (CUstream, int*, uint64_t*, CUgraph*, const CUgraphNode**, size_t*))                         \
  X(cuThreadExchangeStreamCaptureMode, 10010, (int*))                                            \
  X(cuStreamBatchMemOp, 11070, (CUstream, unsigned, CUstreamMemOp*, unsigned))                   \
  X(cuEventCreate, 2000, (CUevent*, unsigned))                                                   \
  X(cuEventRecord, 2000, (CUevent, CUstream))                                                    \
  X(cuEventQuery, 2000, (CUevent))                                                               \
  X(cuEventElapsedTime, 2000, (float*, CUevent, CUevent))                                        \
  X(cuEventDestroy, 4000, (CUevent))                                                             \
  X(cuMemcpyAsync, 4000, (CUdeviceptr, CUdeviceptr, size_t, CUstream))                           \
  X(cuMemcpy2DAsync, 3020, (const CUmemcpy2D*, CUstream))                                        \
  X(cuMemcpy3DAsync, 3020, (const CUmemcpy3D*, CUstream))                                        \
  X(cuMemsetD8Async, 3020, (CUdeviceptr, unsigned char, size_t, CUstream))                       \
  X(cuMemHostRegister, 6050, (void*, size_t, unsigned))                                          \
  X(cuMemHostUnregister, 4000, (void*))                                                          \
  X(cuMemHostGetDevicePointer, 3020, (CUdeviceptr*, void*, unsigned))                            \
  X(cuModuleLoadData, 2010, (CUmodule*, const void*))                                            \
  X(cuModuleUnload, 2000, (CUmodule))                                                            \
  X(cuModuleGetFunction, 2000, (CUfunction*, CUmodule, const char*))                             \
  X(cuLaunchKernel, 4000,                                                                        \
    (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, \
     void**, void**))                                                                            \
  X(cuDeviceGetPCIBusId, 4010, (char*, int, CUdevice))                                           \
  X(cuGetErrorName, 6000, (CUresult, const char**))                                              \
  X(cuGetErrorString, 6000, (CUresult, const char**))

// What the project does without where the driver lacks it (null then).
#define OFFCORE_CUDA_OPTIONAL_TABLE(X)                                                             \
  X(cuMemcpyBatchAsync, 13000,                                                                     \
    (CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t, CUstream)) \
  X(cuCtxRecordEvent, 12050, (CUcontext, CUevent))                                                 \
  X(cuUserObjectCreate, 11030, (CUuserObject*, void*, CUhostFn, unsigned, unsigned))               \
  X(cuUserObjectRelease, 11030, (CUuserObject, unsigned))                                          \
  X(cuGraphRetainUserObject, 11030, (CUgraph, CUuserObject, unsigned, unsigned))

class Driver : public OfProcess {
 public:
  // Opens and initialises the driver, once in a process. Throws unavailable, saying what is
  // missing (and is tried again when OFFCORE_LIBCUDA names another library).
  static const Driver& open();
  explicit Driver(const std::string& path);  // by open() only
  // The driver, once open. Both throw invalid in a child of a process that had opened it.
  static const Driver& get();

  int version() const { return version_; }  // 13000 for 13.0
  int devices() const { return devices_; }

#define OFFCORE_CUDA_MEMBER(name, version, parameters) CUresult(*name) parameters = nullptr;
  OFFCORE_CUDA_TABLE(OFFCORE_CUDA_MEMBER)
  OFFCORE_CUDA_OPTIONAL_TABLE(OFFCORE_CUDA_MEMBER)
#undef OFFCORE_CUDA_MEMBER

 private:
  void resolve(void* library);

  int version_ = 0;
  int devices_ = 0;
};

// Throws memory or driver, with the driver's own name and words for the result.
[[noreturn]] void fail_result(CUresult result, std::string_view what);
inline void check(CUresult result, std::string_view what) {
  if (result != kSuccess) fail_result(result, what);
}

// While some stream is being captured, the driver refuses calls that could disturb it, also to
// other threads, and spoils the capture. Ours never touch a captured stream by accident, so they
// may be made. Inside another one it calls nothing.
class CaptureGuard {
 public:
  CaptureGuard() : outermost_(!inside_) {
    if (outermost_) exchange();
    inside_ = true;
  }
  ~CaptureGuard() {
    if (!outermost_) return;
    exchange();
    inside_ = false;
  }
  CaptureGuard(const CaptureGuard&) = delete;
  CaptureGuard& operator=(const CaptureGuard&) = delete;

 private:
  void exchange() { Driver::get().cuThreadExchangeStreamCaptureMode(&mode_); }
  static inline thread_local bool inside_ = false;
  const bool outermost_;
  int mode_ = kCaptureRelaxed;  // then the caller's
};

// What is called under a guard: the driver refuses nothing that only enqueues, whatever is being
// captured, nor questions for a stream's capture.
enum class Under : uint8_t { any, enqueuing };

// Makes a context current and puts the caller's back. Inside another one of the same context it
// calls nothing, and where the context is the caller's own it pushes nothing.
class ContextGuard {
 public:
  explicit ContextGuard(CUcontext context, Under calls = Under::any) : outer_(innermost_) {
    if (calls == Under::any) relaxed_.emplace();
    if (context == outer_) return;
    CUcontext callers = nullptr;
    Driver::get().cuCtxGetCurrent(&callers);
    pushed_ = callers != context;
    if (pushed_) check(Driver::get().cuCtxPushCurrent(context), "cuCtxPushCurrent");
    innermost_ = context;
  }
  ~ContextGuard() {
    innermost_ = outer_;
    if (!pushed_) return;
    CUcontext popped = nullptr;
    Driver::get().cuCtxPopCurrent(&popped);
  }
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  static inline thread_local CUcontext innermost_ = nullptr;  // of this thread's
  CUcontext outer_;
  bool pushed_ = false;
  std::optional<CaptureGuard> relaxed_;
};

std::string device_name(int ordinal);
int attribute(int ordinal, Attribute which);

}  // namespace offcore::cuda
