#include "tests/fakes/cuda/symbols.h"

#include <algorithm>
#include <cstring>

#include "tests/fakes/cuda/settings.h"

// Name, symbol, and the first driver that has this form; later forms of a name come later.
#define ENTRY_POINTS(X)                                                          \
  X(cuInit, cuInit, 2000)                                                        \
  X(cuDriverGetVersion, cuDriverGetVersion, 2020)                                \
  X(cuDeviceGetCount, cuDeviceGetCount, 2000)                                    \
  X(cuDeviceGet, cuDeviceGet, 2000)                                              \
  X(cuDeviceGetName, cuDeviceGetName, 2000)                                      \
  X(cuDeviceGetUuid, cuDeviceGetUuid, 9020)                                      \
  X(cuDeviceGetUuid, cuDeviceGetUuid_v2, 11040)                                  \
  X(cuDeviceGetAttribute, cuDeviceGetAttribute, 2000)                            \
  X(cuDeviceCanAccessPeer, cuDeviceCanAccessPeer, 4000)                          \
  X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000)                    \
  X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, 11000)              \
  X(cuCtxGetCurrent, cuCtxGetCurrent, 4000)                                      \
  X(cuCtxSetCurrent, cuCtxSetCurrent, 4000)                                      \
  X(cuCtxPushCurrent, cuCtxPushCurrent_v2, 4000)                                 \
  X(cuCtxPopCurrent, cuCtxPopCurrent_v2, 4000)                                   \
  X(cuCtxEnablePeerAccess, cuCtxEnablePeerAccess, 4000)                          \
  X(cuCtxSynchronize, cuCtxSynchronize, 2000)                                    \
  X(cuCtxRecordEvent, cuCtxRecordEvent, 12050)                                   \
  X(cuMemAlloc, cuMemAlloc_v2, 3020)                                             \
  X(cuMemFree, cuMemFree_v2, 3020)                                               \
  X(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity, 10020)         \
  X(cuMemCreate, cuMemCreate, 10020)                                             \
  X(cuMemRelease, cuMemRelease, 10020)                                           \
  X(cuMemAddressReserve, cuMemAddressReserve, 10020)                             \
  X(cuMemAddressFree, cuMemAddressFree, 10020)                                   \
  X(cuMemMap, cuMemMap, 10020)                                                   \
  X(cuMemUnmap, cuMemUnmap, 10020)                                               \
  X(cuMemSetAccess, cuMemSetAccess, 10020)                                       \
  X(cuMemExportToShareableHandle, cuMemExportToShareableHandle, 10020)           \
  X(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle, 10020)       \
  X(cuMemRetainAllocationHandle, cuMemRetainAllocationHandle, 11000)             \
  X(cuMemGetAddressRange, cuMemGetAddressRange_v2, 3020)                         \
  X(cuMemAllocManaged, cuMemAllocManaged, 6000)                                  \
  X(cuMemAllocAsync, cuMemAllocAsync, 11020)                                     \
  X(cuIpcGetMemHandle, cuIpcGetMemHandle, 4010)                                  \
  X(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2, 11000)                            \
  X(cuIpcCloseMemHandle, cuIpcCloseMemHandle, 4010)                              \
  X(cuMemGetInfo, cuMemGetInfo_v2, 3020)                                         \
  X(cuPointerGetAttribute, cuPointerGetAttribute, 4000)                          \
  X(cuStreamCreateWithPriority, cuStreamCreateWithPriority, 5050)                \
  X(cuStreamDestroy, cuStreamDestroy_v2, 4000)                                   \
  X(cuStreamSynchronize, cuStreamSynchronize, 2000)                              \
  X(cuStreamQuery, cuStreamQuery, 2000)                                          \
  X(cuStreamGetCtx, cuStreamGetCtx, 9020)                                        \
  X(cuStreamGetCtx, cuStreamGetCtx_v2, 12050)                                    \
  X(cuStreamIsCapturing, cuStreamIsCapturing, 10000)                             \
  X(cuStreamGetCaptureInfo, cuStreamGetCaptureInfo, 10010)                       \
  X(cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_v2, 11030)                    \
  X(cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_v3, 12030)                    \
  X(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, 10010) \
  X(cuStreamWaitEvent, cuStreamWaitEvent, 3020)                                  \
  X(cuStreamWaitValue32, cuStreamWaitValue32_v2, 11070)                          \
  X(cuStreamWriteValue32, cuStreamWriteValue32_v2, 11070)                        \
  X(cuStreamBatchMemOp, cuStreamBatchMemOp_v2, 11070)                            \
  X(cuEventCreate, cuEventCreate, 2000)                                          \
  X(cuEventRecord, cuEventRecord, 2000)                                          \
  X(cuEventQuery, cuEventQuery, 2000)                                            \
  X(cuEventSynchronize, cuEventSynchronize, 2000)                                \
  X(cuEventElapsedTime, cuEventElapsedTime, 2000)                                \
  X(cuEventElapsedTime, cuEventElapsedTime_v2, 12080)                            \
  X(cuEventDestroy, cuEventDestroy_v2, 4000)                                     \
  X(cuMemcpyAsync, cuMemcpyAsync, 4000)                                          \
  X(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, 3020)                               \
  X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, 3020)                               \
  X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, 3020)                               \
  X(cuMemcpyDtoH, cuMemcpyDtoH_v2, 3020)                                         \
  X(cuMemcpyHtoD, cuMemcpyHtoD_v2, 3020)                                         \
  X(cuMemcpy2DAsync, cuMemcpy2DAsync_v2, 3020)                                   \
  X(cuMemcpy3DAsync, cuMemcpy3DAsync_v2, 3020)                                   \
  X(cuMemcpyBatchAsync, cuMemcpyBatchAsync, 12080)                               \
  X(cuMemcpyBatchAsync, cuMemcpyBatchAsync_v2, 13000)                            \
  X(cuMemsetD8Async, cuMemsetD8Async, 3020)                                      \
  X(cuMemsetD32Async, cuMemsetD32Async, 3020)                                    \
  X(cuMemHostRegister, cuMemHostRegister_v2, 6050)                               \
  X(cuMemHostUnregister, cuMemHostUnregister, 4000)                              \
  X(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2, 3020)               \
  X(cuModuleLoadData, cuModuleLoadData, 2010)                                    \
  X(cuModuleUnload, cuModuleUnload, 2000)                                        \
  X(cuModuleGetFunction, cuModuleGetFunction, 2000)                              \
  X(cuFuncGetParamInfo, cuFuncGetParamInfo, 12040)                               \
  X(cuLaunchKernel, cuLaunchKernel, 4000)                                        \
  X(cuDeviceGetPCIBusId, cuDeviceGetPCIBusId, 4010)                              \
  X(cuGetErrorName, cuGetErrorName, 6000)                                        \
  X(cuGetErrorString, cuGetErrorString, 6000)                                    \
  X(cuGetProcAddress, cuGetProcAddress_v2, 12000)                                \
  X(cuStreamBeginCapture, cuStreamBeginCapture_v2, 10010)                        \
  X(cuStreamEndCapture, cuStreamEndCapture, 10000)                               \
  X(cuGraphInstantiateWithFlags, cuGraphInstantiateWithFlags, 11040)             \
  X(cuGraphLaunch, cuGraphLaunch, 10000)                                         \
  X(cuGraphDestroy, cuGraphDestroy, 10000)                                       \
  X(cuGraphExecDestroy, cuGraphExecDestroy, 10000)                               \
  X(cuGraphRetainUserObject, cuGraphRetainUserObject, 11030)                     \
  X(cuUserObjectCreate, cuUserObjectCreate, 11030)                               \
  X(cuUserObjectRelease, cuUserObjectRelease, 11030)

#define DECLARE(name, symbol, since) extern "C" void symbol();
namespace entry_points {  // their types are their definitions' affair
ENTRY_POINTS(DECLARE)
}  // namespace entry_points

namespace fakecuda {
namespace {

struct Symbol {
  const char* name;
  void (*function)();
  int since;
};

#define ROW(name, symbol, since) {#name, entry_points::symbol, since},
constexpr Symbol kSymbols[] = {ENTRY_POINTS(ROW)};

}  // namespace

int oldest_driver(const char* name) {
  for (const Symbol& symbol : kSymbols) {
    if (std::strcmp(symbol.name, name) == 0) return symbol.since;
  }
  return 0;
}

Found find_symbol(const char* name, int version, int driver) {
  Found found;
  if (std::ranges::count(settings().lacks, name)) return found;
  for (const Symbol& symbol : kSymbols) {
    if (std::strcmp(symbol.name, name) != 0 || symbol.since > driver) continue;
    found.known = true;
    if (symbol.since <= version) found.function = reinterpret_cast<void*>(symbol.function);
  }
  return found;
}

}  // namespace fakecuda
