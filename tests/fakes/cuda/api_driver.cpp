// Entry points for looking up entry points, for error texts, and those that only the stand-in has:
// fakecuda_*, by which tests ask what was done and what is left.
#include <cstring>

#include "tests/fakes/cuda/entry.h"
#include "tests/fakes/cuda/graph.h"
#include "tests/fakes/cuda/memory.h"
#include "tests/fakes/cuda/settings.h"
#include "tests/fakes/cuda/symbols.h"
#include "tests/fakes/cuda/transfer.h"
#include "tests/fakes/cuda/user_object.h"

// Error codes and what they mean.
#define ERRORS(X)                                                                                  \
  X(0, CUDA_SUCCESS, "no error")                                                                   \
  X(1, CUDA_ERROR_INVALID_VALUE, "invalid argument")                                               \
  X(2, CUDA_ERROR_OUT_OF_MEMORY, "out of memory")                                                  \
  X(3, CUDA_ERROR_NOT_INITIALIZED, "initialization error")                                         \
  X(36, CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER,                                                     \
    "API call is not supported in the installed driver")                                           \
  X(100, CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")                               \
  X(101, CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal")                                      \
  X(201, CUDA_ERROR_INVALID_CONTEXT, "invalid device context")                                     \
  X(208, CUDA_ERROR_ALREADY_MAPPED, "resource already mapped")                                     \
  X(217, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these devices") \
  X(218, CUDA_ERROR_INVALID_PTX, "a PTX JIT compilation failed")                                   \
  X(304, CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS")      \
  X(400, CUDA_ERROR_INVALID_HANDLE, "invalid resource handle")                                     \
  X(401, CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state")       \
  X(500, CUDA_ERROR_NOT_FOUND, "named symbol not found")                                           \
  X(600, CUDA_ERROR_NOT_READY, "device not ready")                                                 \
  X(700, CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered")                   \
  X(709, CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed")                                  \
  X(712, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "memory is already registered")                \
  X(713, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "memory has not been registered")                  \
  X(800, CUDA_ERROR_NOT_PERMITTED, "operation not permitted")                                      \
  X(801, CUDA_ERROR_NOT_SUPPORTED, "operation not supported")                                      \
  X(900, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "not permitted when stream is capturing")          \
  X(901, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "failed due to a previous error during capture")   \
  X(902, CUDA_ERROR_STREAM_CAPTURE_MERGE, "would join two separate captures")                      \
  X(903, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the stream it began in")   \
  X(904, CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work")                 \
  X(905, CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work")             \
  X(906, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "would make the default stream depend on a capture")  \
  X(907, CUDA_ERROR_CAPTURED_EVENT, "event was last recorded in a capturing stream")               \
  X(908, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "capture was begun by another thread")            \
  X(999, CUDA_ERROR_UNKNOWN, "unknown error")

namespace fakecuda {
namespace {

struct ErrorText {
  Result code;
  const char *name, *meaning;
};

#define ERROR_ROW(code, name, meaning) {code, #name, meaning},
constexpr ErrorText kErrors[] = {ERRORS(ERROR_ROW)};

const ErrorText* error_text(Result code) {
  for (const ErrorText& error : kErrors) {
    if (error.code == code) return &error;
  }
  return nullptr;
}

enum : int { kFound = 0, kSymbolNotFound = 1, kVersionNotSufficient = 2 };

}  // namespace

// As documented: what is not there is a null function and a status, but no failure.
FAKE_API Result cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags,
                                    int* status) {
  const auto body = [&] {
    require(name != nullptr && function != nullptr && flags <= 1, kInvalidValue);
    *function = nullptr;
    require(version <= settings().driver, kInvalidValue);
    const Found found = find_symbol(name, version, settings().driver);
    *function = found.function;
    const int why_not = found.known ? kVersionNotSufficient : kSymbolNotFound;
    if (status) *status = found.function ? kFound : why_not;
  };
  return enter("cuGetProcAddress", body, When::kAlways);
}

FAKE_API Result cuGetErrorName(Result code, const char** text) {
  if (!text) return kInvalidValue;
  const ErrorText* error = error_text(code);
  *text = error ? error->name : nullptr;
  return error ? kSuccess : kInvalidValue;
}

FAKE_API Result cuGetErrorString(Result code, const char** text) {
  if (!text) return kInvalidValue;
  const ErrorText* error = error_text(code);
  *text = error ? error->meaning : nullptr;
  return error ? kSuccess : kInvalidValue;
}

// How often an entry point was called, by its name without a version.
FAKE_API uint64_t fakecuda_calls(const char* name) { return calls_of(name); }

// What engines have done so far.
FAKE_API uint64_t fakecuda_done(const char* what) {
  const Tally& all = tally();
  const struct {
    const char* name;
    uint64_t count;
  } rows[] = {{"plain", all.plain},
              {"strided", all.strided},
              {"batched", all.batched},
              {"same_device", all.same_device},
              {"crossed", all.crossed},
              {"fills", all.fills},
              {"rows", all.rows},
              {"bytes", all.bytes},
              {"waits", all.waits},
              {"writes", all.writes},
              {"late_writes", all.late_writes},
              {"to_host_engine", all.to_host_engine},
              {"from_host_engine", all.from_host_engine}};
  for (const auto& row : rows) {
    if (std::strcmp(row.name, what) == 0) return row.count;
  }
  return UINT64_MAX;
}

// Engines for copies to and from the host are busy with others' copies, until told otherwise.
FAKE_API void fakecuda_hold_host_engines(int held) { hold_host_engines(held != 0); }

// What exists now: a leak is what is left when all should be gone.
FAKE_API uint64_t fakecuda_live(const char* what) {
  const struct {
    const char* name;
    uint64_t count;
  } rows[] = {{"allocations", live_allocations()},
              {"mappings", addresses().mappings()},
              {"reservations", addresses().reservations()},
              {"registrations", addresses().registrations()},
              {"contexts", contexts().size()},
              {"streams", streams().size()},
              {"events", events().size()},
              {"graphs", live_graphs()},
              {"user_objects", live_user_objects()}};
  for (const auto& row : rows) {
    if (std::strcmp(row.name, what) == 0) return row.count;
  }
  return UINT64_MAX;
}

}  // namespace fakecuda
