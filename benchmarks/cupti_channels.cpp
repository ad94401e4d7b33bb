// Records which hardware channel every copy and fill of a process takes, and every kernel.
//
// The driver loads it (CUDA_INJECTION64_PATH) and calls InitializeInjection. It appends JSON lines
// to cupti.jsonl in the working directory: copies ("memcpy"), fills ("memset") and kernels, and the
// marks that the program sets between them by cupti_mark. A copy on an asynchronous copy engine has
// the channel type "engine"; one that SMs do has "compute". After cupti_calls it records the calls
// of CUDA's functions by all threads ("call") in place of copies and fills. Built by gpu_proof.py,
// which reads it.
#include <cupti.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <mutex>

namespace {

constexpr size_t kBufferBytes = 1 << 20;

FILE* out = nullptr;
std::mutex mutex;

const char* name_of(CUpti_ChannelType type) {
  if (type == CUPTI_CHANNEL_TYPE_ASYNC_MEMCPY) return "engine";
  return type == CUPTI_CHANNEL_TYPE_COMPUTE ? "compute" : "unknown";
}

void complain(const char* what, CUptiResult result) {
  const char* words = "?";
  cuptiGetResultString(result, &words);
  std::fprintf(stderr, "cupti_channels: %s: %s\n", what, words);
}

// Newer CUPTI appends to a record; what is read here stays where it is.
template <typename Record>
void write_transfer(const char* kind, const Record& record) {
  std::fprintf(out,
               "{\"kind\": \"%s\", \"device\": %u, \"stream\": %u, \"bytes\": %llu, "
               "\"channel\": \"%s\", \"channel_id\": %u}\n",
               kind, record.deviceId, record.streamId,
               static_cast<unsigned long long>(record.bytes), name_of(record.channelType),
               record.channelID);
}

void write_call(CUpti_CallbackDomain domain, const CUpti_ActivityAPI& record) {
  const char* name = "?";
  cuptiGetCallbackName(domain, record.cbid, &name);
  std::fprintf(out, "{\"kind\": \"call\", \"name\": \"%s\", \"start\": %llu}\n", name,
               static_cast<unsigned long long>(record.start));
}

void write_record(const CUpti_Activity* record) {
  switch (record->kind) {
    case CUPTI_ACTIVITY_KIND_MEMCPY:
      return write_transfer("memcpy", *reinterpret_cast<const CUpti_ActivityMemcpy5*>(record));
    case CUPTI_ACTIVITY_KIND_MEMCPY2:
      return write_transfer("memcpy", *reinterpret_cast<const CUpti_ActivityMemcpyPtoP4*>(record));
    case CUPTI_ACTIVITY_KIND_MEMSET:
      return write_transfer("memset", *reinterpret_cast<const CUpti_ActivityMemset4*>(record));
    case CUPTI_ACTIVITY_KIND_KERNEL:
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
      const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel9*>(record);
      std::fprintf(out,
                   "{\"kind\": \"kernel\", \"device\": %u, \"stream\": %u, \"name\": \"%s\", "
                   "\"start\": %llu, \"end\": %llu}\n",
                   kernel->deviceId, kernel->streamId, kernel->name,
                   static_cast<unsigned long long>(kernel->start),
                   static_cast<unsigned long long>(kernel->end));
      return;
    }
    case CUPTI_ACTIVITY_KIND_DRIVER:
      return write_call(CUPTI_CB_DOMAIN_DRIVER_API,
                        *reinterpret_cast<const CUpti_ActivityAPI*>(record));
    case CUPTI_ACTIVITY_KIND_RUNTIME:
      return write_call(CUPTI_CB_DOMAIN_RUNTIME_API,
                        *reinterpret_cast<const CUpti_ActivityAPI*>(record));
    default:
      return;
  }
}

void CUPTIAPI give_buffer(uint8_t** buffer, size_t* bytes, size_t* records_max) {
  *bytes = kBufferBytes;
  *records_max = 0;
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, kBufferBytes));
}

void CUPTIAPI take_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid_bytes) {
  CUpti_Activity* record = nullptr;
  const std::lock_guard lock(mutex);
  while (cuptiActivityGetNextRecord(buffer, valid_bytes, &record) == CUPTI_SUCCESS) {
    write_record(record);
  }
  size_t lost = 0;
  if (cuptiActivityGetNumDroppedRecords(nullptr, 0, &lost) == CUPTI_SUCCESS && lost > 0) {
    std::fprintf(out, "{\"kind\": \"lost\", \"count\": %zu}\n", lost);
  }
  std::free(buffer);
}

template <typename Function>
Function driver(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, name));
}

// CUPTI knows that a record is complete once somebody has waited for its device.
bool wait_for_devices() {
  const auto count = driver<CUresult (*)(int*)>("cuDeviceGetCount");
  const auto retain = driver<CUresult (*)(CUcontext*, CUdevice)>("cuDevicePrimaryCtxRetain");
  const auto release = driver<CUresult (*)(CUdevice)>("cuDevicePrimaryCtxRelease_v2");
  const auto push = driver<CUresult (*)(CUcontext)>("cuCtxPushCurrent_v2");
  const auto pop = driver<CUresult (*)(CUcontext*)>("cuCtxPopCurrent_v2");
  const auto wait = driver<CUresult (*)()>("cuCtxSynchronize");
  if (!count || !retain || !release || !push || !pop || !wait) return false;
  int devices = 0;
  bool waited = count(&devices) == CUDA_SUCCESS;
  for (CUdevice device = 0; device < devices; ++device) {
    CUcontext context = nullptr;
    waited = waited && retain(&context, device) == CUDA_SUCCESS;
    if (!waited) break;
    waited = push(context) == CUDA_SUCCESS && wait() == CUDA_SUCCESS;
    pop(&context);
    release(device);
  }
  return waited;
}

bool succeeded(const char* what, CUptiResult result) {
  if (result != CUPTI_SUCCESS) complain(what, result);
  return result == CUPTI_SUCCESS;
}

}  // namespace

// Before there is a context.
extern "C" __attribute__((visibility("default"))) int cupti_calls() {
  bool good = out != nullptr;
  for (const CUpti_ActivityKind kind :
       {CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMCPY2, CUPTI_ACTIVITY_KIND_MEMSET}) {
    good &= succeeded("cuptiActivityDisable", cuptiActivityDisable(kind));
  }
  for (const CUpti_ActivityKind kind : {CUPTI_ACTIVITY_KIND_DRIVER, CUPTI_ACTIVITY_KIND_RUNTIME}) {
    good &= succeeded("cuptiActivityEnable", cuptiActivityEnable(kind));
  }
  return good ? 0 : 1;
}

// By the clock of the records; 0: there is none.
extern "C" __attribute__((visibility("default"))) uint64_t cupti_now() {
  uint64_t now = 0;
  return succeeded("cuptiGetTimestamp", cuptiGetTimestamp(&now)) ? now : 0;
}

// Writes what has been recorded so far, then the mark: the records after it belong to it.
extern "C" __attribute__((visibility("default"))) int cupti_mark(const char* name) {
  if (out == nullptr || !wait_for_devices()) return 1;
  const CUptiResult result = cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
  const bool flushed = succeeded("cuptiActivityFlushAll", result);
  const std::lock_guard lock(mutex);
  std::fprintf(out, "{\"kind\": \"mark\", \"name\": \"%s\"}\n", name);
  std::fflush(out);
  return flushed ? 0 : 1;
}

extern "C" __attribute__((visibility("default"))) int InitializeInjection() {
  out = std::fopen("cupti.jsonl", "w");
  if (out == nullptr) return 0;
  succeeded("cuptiActivityRegisterCallbacks",
            cuptiActivityRegisterCallbacks(give_buffer, take_buffer));
  for (const CUpti_ActivityKind kind :
       {CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMCPY2, CUPTI_ACTIVITY_KIND_MEMSET,
        CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL}) {
    succeeded("cuptiActivityEnable", cuptiActivityEnable(kind));
  }
  std::fprintf(out, "{\"kind\": \"ready\"}\n");
  return 1;
}
