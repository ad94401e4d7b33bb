#include "core/backend/sdma/hsa.h"

#include "core/backend/driver_library.h"
#include "core/base/env.h"

namespace offcore::hsa {
namespace {

DriverLibrary<HsaRuntime> library_once;

}  // namespace

HsaRuntime::HsaRuntime(const std::string& path) : OfProcess("the HSA runtime") {
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
    fail(Code::unavailable, env("OFFCORE_LIBHSA"), " is not a usable HSA runtime: it lacks ",
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

const HsaRuntime& HsaRuntime::open() { return library_once.open(env("OFFCORE_LIBHSA")); }
const HsaRuntime& HsaRuntime::get() { return library_once.get("the HSA runtime"); }

void check(HsaStatus status, std::string_view what) {
  if (status == kSuccess) return;
  const char* text = nullptr;
  HsaRuntime::get().hsa_status_string(status, &text);
  fail(status == kOutOfResources ? Code::memory : Code::driver, what, ": ",
       text != nullptr ? text : "unknown error", " (", status, ")");
}

}  // namespace offcore::hsa
