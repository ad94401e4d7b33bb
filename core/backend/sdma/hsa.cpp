#include "core/backend/sdma/hsa.h"

#include <dlfcn.h>

#include <memory>
#include <mutex>
#include <optional>

#include "core/base/env.h"

namespace offcore::hsa {
namespace {

// What open() has come to.
struct OpenedRuntime {
  std::mutex mutex;
  std::string path;
  std::unique_ptr<HsaRuntime> runtime;
  std::optional<Error> error;
};

PerProcess<OpenedRuntime> opened_once;
const HsaRuntime* current = nullptr;  // a child of who has opened it sees that too

template <typename Function>
Function symbol(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

HsaRuntime::HsaRuntime() : OfProcess("the HSA runtime") {
  const std::string path = env("OFFCORE_LIBHSA");
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    fail(Code::unavailable, "AMD's HSA runtime cannot be opened (", dlerror(),
         "); install ROCm, or point OFFCORE_LIBHSA at its libhsa-runtime64.so.1");
  }
  resolve(library);
  const HsaStatus status = hsa_init();
  if (status != kSuccess) {
    fail(Code::unavailable, "AMD's HSA runtime does not start: hsa_init gives ", status,
         " (no GPU, or /dev/kfd may not be used: see rocminfo)");
  }
  find_agents();
  if (gpus_.empty()) fail(Code::unavailable, "no AMD GPU is visible (see ROCR_VISIBLE_DEVICES)");
}

void HsaRuntime::resolve(void* library) {
  std::string missing;
#define OFFCORE_HSA_FIND(name, returns, parameters)     \
  name = symbol<returns(*) parameters>(library, #name); \
  if (name == nullptr) missing += cat(missing.empty() ? "" : ", ", #name);
  OFFCORE_HSA_TABLE(OFFCORE_HSA_FIND)
#undef OFFCORE_HSA_FIND
  if (!missing.empty()) {
    fail(Code::unavailable, env("OFFCORE_LIBHSA"), " is no HSA runtime that can be used: it lacks ",
         missing);
  }
#define OFFCORE_HSA_FIND(name, returns, parameters) \
  name = symbol<returns(*) parameters>(library, #name);
  OFFCORE_HSA_OPTIONAL_TABLE(OFFCORE_HSA_FIND)
#undef OFFCORE_HSA_FIND
}

void HsaRuntime::find_agents() {
  hsa_iterate_agents(
      [](Agent agent, void* found) {
        static_cast<std::vector<Agent>*>(found)->push_back(agent);
        return kSuccess;
      },
      &agents_);
  for (const Agent agent : agents_) {
    uint32_t device = UINT32_MAX;
    hsa_agent_get_info(agent, AgentInfo::device, &device);
    if (device == kDeviceCpu && host_pool_.handle == 0) {
      host_ = agent;
      host_pool_ = find_pool(agent, kFineGrained);
    }
    if (device != kDeviceGpu) continue;
    char name[64] = "";
    hsa_agent_get_info(agent, AgentInfo::name, name);
    Gpu gpu{.agent = agent, .name = name, .pool = find_pool(agent, kCoarseGrained)};
    hsa_agent_get_info(agent, AgentInfo::sdma_engines_host, &gpu.engines_host);
    hsa_agent_get_info(agent, AgentInfo::sdma_engines_peer, &gpu.engines_peer);
    gpus_.push_back(std::move(gpu));
  }
}

// The agent's first pool of this grain that may be allocated from; a null handle where it has none.
MemoryPool HsaRuntime::find_pool(Agent agent, uint32_t flag) const {
  struct Search {
    const HsaRuntime* runtime;
    uint32_t flag;
    MemoryPool found;
  } search{this, flag, {}};
  hsa_amd_agent_iterate_memory_pools(
      agent,
      [](MemoryPool pool, void* data) {
        Search& wanted = *static_cast<Search*>(data);
        uint32_t segment = UINT32_MAX;
        uint32_t flags = 0;
        bool allowed = false;
        const HsaRuntime& runtime = *wanted.runtime;
        runtime.hsa_amd_memory_pool_get_info(pool, PoolInfo::segment, &segment);
        runtime.hsa_amd_memory_pool_get_info(pool, PoolInfo::global_flags, &flags);
        runtime.hsa_amd_memory_pool_get_info(pool, PoolInfo::alloc_allowed, &allowed);
        if (segment != kSegmentGlobal || !allowed || (flags & wanted.flag) == 0) return kSuccess;
        wanted.found = pool;
        return kStopIterating;
      },
      &search);
  return search.found;
}

const HsaRuntime& HsaRuntime::open() {
  const std::string path = env("OFFCORE_LIBHSA");
  if (current != nullptr) current->check_here();
  OpenedRuntime& opened = opened_once.get();
  const std::scoped_lock lock(opened.mutex);
  if (opened.path == path) {
    if (opened.error) throw *opened.error;
    return *opened.runtime;
  }
  if (opened.runtime != nullptr) {
    fail(Code::unavailable, "this process has opened ", opened.path, " already, and not ", path);
  }
  opened.path = path;
  opened.error.reset();
  try {
    opened.runtime.reset(new HsaRuntime());
  } catch (const Error& error) {
    opened.error = error;
    throw;
  }
  current = opened.runtime.get();
  return *current;
}

const HsaRuntime& HsaRuntime::get() {
  if (current == nullptr) fail(Code::driver, "the HSA runtime has not been opened");
  current->check_here();
  return *current;
}

void check(HsaStatus status, std::string_view what) {
  if (status == kSuccess) return;
  const char* text = nullptr;
  HsaRuntime::get().hsa_status_string(status, &text);
  fail(status == kOutOfResources ? Code::memory : Code::driver, what, ": ",
       text != nullptr ? text : "unknown error", " (", status, ")");
}

}  // namespace offcore::hsa
