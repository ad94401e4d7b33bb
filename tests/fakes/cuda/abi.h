// The driver's C ABI as far as the stand-in speaks it: types laid out as the driver's own, declared
// by hand so that no vendor header is needed.
#pragma once
#include <cstddef>
#include <cstdint>

#define FAKE_API extern "C" __attribute__((visibility("default")))

namespace fakecuda {

using Result = int;
using Device = int;
using DevicePtr = unsigned long long;
using MemoryHandle = unsigned long long;

// Opaque to callers: numbers that are never used twice, so that a stale handle is always noticed.
using ContextHandle = struct ContextTag*;
using StreamHandle = struct StreamTag*;
using EventHandle = struct EventTag*;
using GraphHandle = struct GraphTag*;
using GraphExecHandle = struct GraphExecTag*;
using UserObjectHandle = struct UserObjectTag*;
using HostFunction = void (*)(void*);

enum : Result {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kCallRequiresNewerDriver = 36,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kAlreadyMapped = 208,
  kPeerAccessUnsupported = 217,
  kInvalidPtx = 218,
  kOperatingSystem = 304,
  kInvalidHandle = 400,
  kIllegalState = 401,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kPeerAccessAlready = 704,
  kContextIsDestroyed = 709,
  kHostMemoryAlreadyRegistered = 712,
  kHostMemoryNotRegistered = 713,
  kNotPermitted = 800,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureMerge = 902,
  kCaptureUnmatched = 903,
  kCaptureUnjoined = 904,
  kCaptureIsolation = 905,
  kCaptureImplicit = 906,
  kCapturedEvent = 907,
  kCaptureWrongThread = 908,
  kUnknown = 999,
};

struct Uuid {
  unsigned char bytes[16];
};

struct IpcHandle {
  char bytes[64];
};

enum : int { kLocationDevice = 1, kLocationNumaNode = 3 };
enum : int { kHandleNone = 0, kHandleFd = 1 };
enum : int { kAccessNone = 0, kAccessRead = 1, kAccessReadWrite = 3 };

struct Location {
  int type;
  int id;
};

struct AllocationProp {
  int type;
  int requested_handle_types;
  Location location;
  void* win32_meta_data;
  struct {
    unsigned char compression_type;
    unsigned char rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
static_assert(sizeof(AllocationProp) == 32);

struct AccessDesc {
  Location location;
  int flags;
};
static_assert(sizeof(AccessDesc) == 12);

enum : int { kMemoryHost = 1, kMemoryDevice = 2, kMemoryArray = 3, kMemoryUnified = 4 };

struct Memcpy2D {
  size_t src_x, src_y;
  int src_type;
  const void* src_host;
  DevicePtr src_device;
  void* src_array;
  size_t src_pitch;
  size_t dst_x, dst_y;
  int dst_type;
  void* dst_host;
  DevicePtr dst_device;
  void* dst_array;
  size_t dst_pitch;
  size_t width, height;
};
static_assert(sizeof(Memcpy2D) == 128);

struct Memcpy3D {
  size_t src_x, src_y, src_z, src_lod;
  int src_type;
  const void* src_host;
  DevicePtr src_device;
  void* src_array;
  void* reserved0;
  size_t src_pitch, src_height;
  size_t dst_x, dst_y, dst_z, dst_lod;
  int dst_type;
  void* dst_host;
  DevicePtr dst_device;
  void* dst_array;
  void* reserved1;
  size_t dst_pitch, dst_height;
  size_t width, height, depth;
};
static_assert(sizeof(Memcpy3D) == 200);

enum : int { kOrderStream = 1, kOrderDuringCall = 2, kOrderAny = 3 };
enum : unsigned { kOverlapWithCompute = 1 };

struct CopyAttributes {
  int src_order;
  Location src_hint, dst_hint;
  unsigned flags;
};
static_assert(sizeof(CopyAttributes) == 24);

enum : int {
  kOpWait32 = 1,
  kOpWrite32 = 2,
  kOpFlush = 3,
  kOpWait64 = 4,
  kOpWrite64 = 5,
  kOpBarrier = 6,
};
enum : unsigned { kWaitGeq = 0, kWaitEq = 1, kWaitAnd = 2, kWaitNor = 3, kWaitFlush = 1u << 30 };
enum : unsigned { kWriteDefault = 0, kWriteNoBarrier = 1 };

// One member of the driver's union: waits and writes are laid out alike.
struct MemOp {
  int operation;
  DevicePtr address;
  uint64_t value;  // the low half, where the operation is of 32 bits
  unsigned flags;
  DevicePtr alias;
  uint64_t unused;
};
static_assert(sizeof(MemOp) == 48 && offsetof(MemOp, flags) == 24);

enum : unsigned { kStreamNonBlocking = 1 };
enum : unsigned { kEventBlockingSync = 1, kEventDisableTiming = 2, kEventInterprocess = 4 };
enum : int { kCaptureGlobal = 0, kCaptureThreadLocal = 1, kCaptureRelaxed = 2 };
enum : unsigned { kNoDestructorSync = 1 };
enum : unsigned { kUserObjectMove = 1 };
enum : int { kCaptureNone = 0, kCaptureActive = 1, kCaptureStatusInvalidated = 2 };

}  // namespace fakecuda
