// The functions of NCCL up to 2.31: with each name once more behind a p, all that a libnccl.so.2
// exports.
#pragma once

// clang-format off
// What api.cpp defines.
#define OFFCORE_NCCL_OWN(X) \
  X(ncclAllGather) X(ncclAllReduce) X(ncclAlltoAll) X(ncclBcast) X(ncclBroadcast) \
  X(ncclCommAbort) X(ncclCommDestroy) X(ncclCommFinalize) X(ncclCommGetAsyncError) \
  X(ncclCommRevoke) X(ncclCommShrink) X(ncclCommWindowDeregister) X(ncclCommWindowRegister) \
  X(ncclGather) X(ncclGetErrorString) X(ncclGetLastError) X(ncclGroupEnd) \
  X(ncclGroupSimulateEnd) X(ncclGroupStart) X(ncclReduce) X(ncclReduceScatter) X(ncclScatter)

// What is passed on as it comes, whatever its parameters.
#define OFFCORE_NCCL_FORWARDED(X) \
  X(ncclAllGatherConfig) X(ncclAllReduceConfig) X(ncclAlltoAllConfig) X(ncclBroadcastConfig) \
  X(ncclCommCount) X(ncclCommCuDevice) X(ncclCommDeregister) X(ncclCommGetUniqueId) \
  X(ncclCommGrow) X(ncclCommInitAll) X(ncclCommInitRank) X(ncclCommInitRankConfig) \
  X(ncclCommInitRankScalable) X(ncclCommMemStats) X(ncclCommQueryProperties) X(ncclCommRegister) \
  X(ncclCommResume) X(ncclCommSplit) X(ncclCommSuspend) X(ncclCommUserRank) \
  X(ncclDevCommCreate) X(ncclDevCommDestroy) X(ncclGatherConfig) X(ncclGetLsaDevicePointer) \
  X(ncclGetLsaMultimemDevicePointer) X(ncclGetMultimemDevicePointer) X(ncclGetPeerDevicePointer) \
  X(ncclGetUniqueId) X(ncclGetVersion) X(ncclGinBarrierCreateRequirement) \
  X(ncclGinInboxA2ACreateRequirement) X(ncclGinOutboxCreateRequirement) X(ncclLLA2ACalcSlots) \
  X(ncclLLA2ACreateRequirement) X(ncclLsaBarrierCreateRequirement) X(ncclMemAlloc) \
  X(ncclMemFree) X(ncclParamBind) X(ncclParamDumpAll) X(ncclParamGet) \
  X(ncclParamGetAllParameterKeys) X(ncclParamGetI16) X(ncclParamGetI32) X(ncclParamGetI64) \
  X(ncclParamGetI8) X(ncclParamGetParameter) X(ncclParamGetStr) X(ncclParamGetU16) \
  X(ncclParamGetU32) X(ncclParamGetU64) X(ncclParamGetU8) X(ncclPutSignal) \
  X(ncclRecv) X(ncclRedOpCreatePreMulSum) X(ncclRedOpDestroy) X(ncclReduceConfig) \
  X(ncclReduceScatterConfig) X(ncclResetDebugInit) X(ncclScatterConfig) X(ncclSend) \
  X(ncclSignal) X(ncclTeamLsa) X(ncclTeamRail) \
  X(ncclTeamRankToLsa) X(ncclTeamRankToWorld) X(ncclTeamWorld) X(ncclWaitSignal) \
  X(ncclWinGetUserPtr)
// clang-format on
