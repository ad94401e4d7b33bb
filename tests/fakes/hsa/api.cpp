// The runtime's C entry points, as core/backend/sdma/hsa.h declares them, and what only this one
// has.
#include <chrono>
#include <cstring>

#include "tests/fakes/hsa/runtime.h"

namespace {

using namespace offcore::hsa;
using fakehsa::Machine;

using fakehsa::kCpu;
constexpr uint64_t kFirstGpu = 100;

bool initialized = false;

bool is_gpu(Agent agent) {
  return agent.handle >= kFirstGpu && agent.handle < kFirstGpu + Machine::get().gpus();
}
bool known(Agent agent) { return agent.handle == kCpu || is_gpu(agent); }

template <typename Value>
void give(void* place, Value value) {
  std::memcpy(place, &value, sizeof value);
}

std::atomic<int64_t>* value_of(HsaSignal signal) {
  return reinterpret_cast<std::atomic<int64_t>*>(signal.handle);
}

}  // namespace

extern "C" {

HsaStatus hsa_init() {
  Machine::get().count("hsa_init");
  initialized = true;
  return kSuccess;
}

HsaStatus hsa_status_string(HsaStatus status, const char** text) {
  *text = status == fakehsa::kInvalidArgument        ? "one of the arguments is invalid"
          : status == fakehsa::kInvalidQueueCreation ? "the queue could not be created"
          : status == fakehsa::kOutOfResources       ? "out of resources"
                                                     : "a generic error";
  return kSuccess;
}

HsaStatus hsa_iterate_agents(HsaStatus (*visit)(Agent, void*), void* data) {
  if (!initialized) return fakehsa::kNotInitialized;
  HsaStatus status = visit({kCpu}, data);
  for (uint64_t i = 0; i < Machine::get().gpus() && status == kSuccess; ++i) {
    status = visit({kFirstGpu + i}, data);
  }
  return status;
}

HsaStatus hsa_agent_get_info(Agent agent, AgentInfo which, void* value) {
  if (!known(agent)) return fakehsa::kInvalidAgent;
  switch (which) {
    case AgentInfo::name:
      std::strncpy(static_cast<char*>(value), is_gpu(agent) ? Machine::get().name().c_str() : "cpu",
                   64);
      return kSuccess;
    case AgentInfo::device:
      give<uint32_t>(value, is_gpu(agent) ? kDeviceGpu : kDeviceCpu);
      return kSuccess;
    case AgentInfo::sdma_engines_host:
      give<uint32_t>(value, fakehsa::kHostEngines);
      return kSuccess;
    case AgentInfo::sdma_engines_peer:
      give<uint32_t>(value, fakehsa::kPeerEngines);
      return kSuccess;
  }
  return fakehsa::kInvalidArgument;
}

HsaStatus hsa_system_get_info(SystemInfo which, void* value) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  give<uint64_t>(value, which == SystemInfo::timestamp ? static_cast<uint64_t>(ns) : 1'000'000'000);
  return kSuccess;
}

HsaStatus hsa_amd_agent_iterate_memory_pools(Agent agent, HsaStatus (*visit)(MemoryPool, void*),
                                             void* data) {
  if (!known(agent)) return fakehsa::kInvalidAgent;
  return visit({agent.handle}, data);
}

HsaStatus hsa_amd_memory_pool_get_info(MemoryPool pool, PoolInfo which, void* value) {
  if (which == PoolInfo::segment) give<uint32_t>(value, kSegmentGlobal);
  if (which == PoolInfo::alloc_allowed) give<bool>(value, true);
  if (which == PoolInfo::global_flags) {
    give<uint32_t>(value, pool.handle == kCpu ? kFineGrained : kCoarseGrained);
  }
  return kSuccess;
}

HsaStatus hsa_amd_memory_pool_allocate(MemoryPool pool, size_t bytes, uint32_t flags, void** data) {
  Machine::get().count("hsa_amd_memory_pool_allocate");
  return flags != 0 ? fakehsa::kInvalidArgument : Machine::get().allocate(bytes, pool.handle, data);
}

HsaStatus hsa_amd_memory_pool_free(void* data) { return Machine::get().release(data); }

HsaStatus hsa_amd_agents_allow_access(uint32_t count, const Agent*, const uint32_t* flags,
                                      const void* data) {
  if (count != 1 + Machine::get().gpus() || flags != nullptr) return fakehsa::kInvalidArgument;
  return Machine::get().allow(data);
}

HsaStatus hsa_amd_memory_lock(void* data, size_t bytes, Agent*, int, void** seen) {
  Machine::get().count("hsa_amd_memory_lock");
  return Machine::get().lock(data, bytes, seen);
}

HsaStatus hsa_amd_memory_unlock(void* data) {
  Machine::get().count("hsa_amd_memory_unlock");
  return Machine::get().unlock(data);
}

HsaStatus hsa_amd_profiling_convert_tick_to_system_domain(Agent, uint64_t ticks, uint64_t* at) {
  *at = ticks * static_cast<uint64_t>(offcore::sdma::kTickNs);
  return kSuccess;
}

HsaStatus hsa_signal_create(int64_t value, uint32_t, const Agent*, HsaSignal* signal) {
  *signal = Machine::get().make_signal(value);
  return kSuccess;
}

HsaStatus hsa_signal_destroy(HsaSignal signal) { return Machine::get().forget(signal); }

int64_t hsa_signal_load_scacquire(HsaSignal signal) { return value_of(signal)->load(); }

HsaStatus hsa_queue_destroy(HsaQueue* queue) {
  Machine::get().count("hsa_queue_destroy");
  return Machine::get().destroy(queue);
}

HsaStatus hsa_amd_queue_create(Agent agent, QueueDescriptor* wanted, uint32_t count) {
  Machine::get().count("hsa_amd_queue_create");
  if (!is_gpu(agent)) return fakehsa::kInvalidAgent;
  if (wanted == nullptr || count == 0) return fakehsa::kInvalidArgument;
  for (uint32_t i = 0; i < count; ++i) {
    wanted[i].queue = nullptr;
    if (const HsaStatus status = Machine::get().create(wanted[i]); status != kSuccess)
      return status;
  }
  return kSuccess;
}

HsaStatus hsa_amd_queue_get_info(HsaQueue* queue, QueueInfo which, void* value) {
  fakehsa::UserQueue* found = Machine::get().find(queue);
  if (found == nullptr) return fakehsa::kInvalidArgument;
  const uint64_t* pointer = which == QueueInfo::read_pointer    ? &found->rptr
                            : which == QueueInfo::write_pointer ? &found->wptr
                            : which == QueueInfo::doorbell      ? &found->doorbell
                                                                : nullptr;
  if (pointer == nullptr) return fakehsa::kInvalidArgument;
  give(value, reinterpret_cast<uint64_t>(pointer));
  return kSuccess;
}

HsaStatus hsa_amd_memory_async_batch_copy(const CopyOp* ops, uint32_t count, uint32_t waits,
                                          const HsaSignal*) {
  Machine::get().count("hsa_amd_memory_async_batch_copy");
  return waits != 0 ? fakehsa::kInvalidArgument : Machine::get().batch(ops, count);
}

// How often a function was called; what engines did: packets, moves, laps, queues, batched; how
// many queues were made on an engine, of any GPU.
uint64_t fakehsa_calls(const char* function) { return Machine::get().calls(function); }
uint64_t fakehsa_done(const char* what) { return Machine::get().done(what); }
uint64_t fakehsa_made_on(uint32_t engine) { return Machine::get().made_on(engine); }

}  // extern "C"
