// AMD's HSA runtime, opened at run time: the one place that knows its names and layouts.
//
// The tables below are the whole surface. Types are declared here by hand, as the runtime's public
// headers (interface 1.31) lay them out, so that nothing needs them. What `optional` names comes
// with newer runtimes only: hsa_amd_queue_create with interface 1.26 (its queues' pointers with
// 1.31), the batch copy with 1.17. None of this has run on AMD's hardware yet.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/error.h"
#include "core/base/fork.h"

namespace offcore::hsa {

using HsaStatus = uint32_t;
struct Agent {
  uint64_t handle = 0;
};
struct MemoryPool {
  uint64_t handle = 0;
};
struct HsaSignal {
  uint64_t handle = 0;
};

inline constexpr HsaStatus kSuccess = 0;
inline constexpr HsaStatus kStopIterating = 1;  // HSA_STATUS_INFO_BREAK
inline constexpr HsaStatus kOutOfResources = 0x1008;

enum class SystemInfo : uint32_t { timestamp = 2, timestamp_frequency = 3 };
// The engines' ids run over both kinds, those for peers (xGMI) behind those for the host.
enum class AgentInfo : uint32_t {
  name = 0,
  device = 17,
  sdma_engines_host = 0xA10A,
  sdma_engines_peer = 0xA10B
};
inline constexpr uint32_t kDeviceCpu = 0;
inline constexpr uint32_t kDeviceGpu = 1;
enum class PoolInfo : uint32_t { segment = 0, global_flags = 1, alloc_allowed = 5 };
inline constexpr uint32_t kSegmentGlobal = 0;
inline constexpr uint32_t kFineGrained = 2;
inline constexpr uint32_t kCoarseGrained = 4;
enum class QueueInfo : uint32_t { doorbell = 1, read_pointer = 15, write_pointer = 16 };

struct HsaQueue {
  uint32_t type = 0;
  uint32_t features = 0;
  void* base_address = nullptr;
  HsaSignal doorbell_signal;
  uint32_t size = 0;  // bytes, of SDMA queues
  uint32_t reserved = 0;
  uint64_t id = 0;
};
static_assert(sizeof(HsaQueue) == 40);

inline constexpr uint16_t kQueueDescriptorVersion = 1;
inline constexpr uint8_t kEngineSdma = 1;
inline constexpr uint32_t kPriorityNormal = 1;
inline constexpr uint32_t kAnyEngine = UINT32_MAX;

// hsa_amd_queue_create_desc_t
struct QueueDescriptor {
  uint16_t version = kQueueDescriptorVersion;
  uint16_t flags = 0;  // the ring in system memory
  uint8_t engine_type = kEngineSdma;
  uint8_t reserved_header[3] = {};
  uint32_t queue_size_bytes = 0;
  uint32_t priority = kPriorityNormal;
  void (*callback)(HsaStatus, HsaQueue*, void*) = nullptr;
  void* callback_data = nullptr;
  HsaQueue* queue = nullptr;
  uint32_t sdma_engine_id = kAnyEngine;
  uint32_t reserved_engine[7] = {};
  uint32_t traffic_class = 0;
  uint8_t reserved[20] = {};
};
static_assert(sizeof(QueueDescriptor) == 96 && offsetof(QueueDescriptor, queue) == 32 &&
              offsetof(QueueDescriptor, sdma_engine_id) == 40 &&
              offsetof(QueueDescriptor, traffic_class) == 72);

// hsa_amd_memory_copy_op_t. All ops of a batch share one completion signal, whose value begins as
// their number.
inline constexpr uint16_t kOpLinear = 0;
inline constexpr uint16_t kOpSwap = 2;
struct CopyOp {
  uint16_t version = 1;
  uint16_t type = kOpLinear;
  uint16_t num_entries = 0;  // one copy; lists begin at 1
  uint16_t traffic_class = 0;
  HsaSignal completion_signal;
  void* src = nullptr;
  Agent src_agent;
  Agent dst_agent;
  void* dst = nullptr;
  size_t size = 0;
  size_t dst_size = 0;  // of swaps
  uint64_t wait[4] = {};
  uint64_t signal[3] = {};
  uint64_t reserved = 0;
};
static_assert(sizeof(CopyOp) == 128 && offsetof(CopyOp, size) == 48);

// name, what it returns, parameters
#define OFFCORE_HSA_TABLE(X)                                                                  \
  X(hsa_init, HsaStatus, ())                                                                  \
  X(hsa_status_string, HsaStatus, (HsaStatus, const char**))                                  \
  X(hsa_iterate_agents, HsaStatus, (HsaStatus (*)(Agent, void*), void*))                      \
  X(hsa_agent_get_info, HsaStatus, (Agent, AgentInfo, void*))                                 \
  X(hsa_system_get_info, HsaStatus, (SystemInfo, void*))                                      \
  X(hsa_amd_agent_iterate_memory_pools, HsaStatus,                                            \
    (Agent, HsaStatus (*)(MemoryPool, void*), void*))                                         \
  X(hsa_amd_memory_pool_get_info, HsaStatus, (MemoryPool, PoolInfo, void*))                   \
  X(hsa_amd_memory_pool_allocate, HsaStatus, (MemoryPool, size_t, uint32_t, void**))          \
  X(hsa_amd_memory_pool_free, HsaStatus, (void*))                                             \
  X(hsa_amd_agents_allow_access, HsaStatus,                                                   \
    (uint32_t, const Agent*, const uint32_t*, const void*))                                   \
  X(hsa_amd_memory_lock, HsaStatus, (void*, size_t, Agent*, int, void**))                     \
  X(hsa_amd_memory_unlock, HsaStatus, (void*))                                                \
  X(hsa_amd_profiling_convert_tick_to_system_domain, HsaStatus, (Agent, uint64_t, uint64_t*)) \
  X(hsa_signal_create, HsaStatus, (int64_t, uint32_t, const Agent*, HsaSignal*))              \
  X(hsa_signal_destroy, HsaStatus, (HsaSignal))                                               \
  X(hsa_signal_load_scacquire, int64_t, (HsaSignal))                                          \
  X(hsa_queue_destroy, HsaStatus, (HsaQueue*))

// Null where the runtime is older.
#define OFFCORE_HSA_OPTIONAL_TABLE(X)                                     \
  X(hsa_amd_queue_create, HsaStatus, (Agent, QueueDescriptor*, uint32_t)) \
  X(hsa_amd_queue_get_info, HsaStatus, (HsaQueue*, QueueInfo, void*))     \
  X(hsa_amd_memory_async_batch_copy, HsaStatus,                           \
    (const CopyOp*, uint32_t, uint32_t, const HsaSignal*))

struct Gpu {
  Agent agent;
  std::string name;  // "gfx942"
  MemoryPool pool;   // coarse-grained memory of its own
  uint32_t engines_host = 0;
  uint32_t engines_peer = 0;  // 0: all are engines_host

  // Only these engines' swaps are known.
  bool has_swaps() const { return name.starts_with("gfx94") || name.starts_with("gfx95"); }
  // Those that the packets here are of.
  bool has_packets() const { return name.starts_with("gfx94"); }
};

class HsaRuntime : public OfProcess {
 public:
  // Opens and initialises the runtime, once in a process. Throws unavailable, saying what is
  // missing.
  static const HsaRuntime& open();
  explicit HsaRuntime(const std::string& path);  // by open() only
  // The runtime, once open. Both throw invalid in a child of a process that had opened it.
  static const HsaRuntime& get();

  const std::vector<Gpu>& gpus() const { return gpus_; }
  const std::vector<Agent>& agents() const { return agents_; }  // all, CPUs too
  MemoryPool host_pool() const { return host_pool_; }           // fine-grained host memory
  Agent host() const { return host_; }                          // whose memory that is
  bool has_queues() const { return hsa_amd_queue_create != nullptr && hsa_amd_queue_get_info; }
  bool has_batch_copy() const { return hsa_amd_memory_async_batch_copy != nullptr; }

#define OFFCORE_HSA_MEMBER(name, returns, parameters) returns(*name) parameters = nullptr;
  OFFCORE_HSA_TABLE(OFFCORE_HSA_MEMBER)
  OFFCORE_HSA_OPTIONAL_TABLE(OFFCORE_HSA_MEMBER)
#undef OFFCORE_HSA_MEMBER

 private:
  void resolve(void* library);
  void find_agents();
  MemoryPool find_pool(Agent agent, uint32_t flag) const;

  std::vector<Gpu> gpus_;
  std::vector<Agent> agents_;
  Agent host_;
  MemoryPool host_pool_;
};

// Throws memory or driver, with the runtime's own text.
void check(HsaStatus status, std::string_view what);

}  // namespace offcore::hsa
