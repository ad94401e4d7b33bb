// The stand-in HSA runtime: GPUs whose memory is this process's and whose SDMA queues are emulated
// engines (studies/sdma/engine.h), which one thread runs in turn.
//
// It keeps the runtime's rules and is strict where they leave room: engines reach an allocation
// only once all agents were allowed to, pinned memory lies at another address for them,
// a descriptor's reserved bytes are 0, a batch's signal begins as the number of its copies.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "studies/sdma/engine.h"
#include "core/backend/sdma/hsa.h"

namespace fakehsa {

using offcore::hsa::CopyOp;
using offcore::hsa::HsaQueue;
using offcore::hsa::HsaSignal;
using offcore::hsa::HsaStatus;
using offcore::hsa::QueueDescriptor;

inline constexpr HsaStatus kOk = 0;
inline constexpr HsaStatus kError = 0x1000;
inline constexpr HsaStatus kInvalidArgument = 0x1001;
inline constexpr HsaStatus kInvalidQueueCreation = 0x1002;
inline constexpr HsaStatus kInvalidAgent = 0x1004;
inline constexpr HsaStatus kOutOfResources = 0x1008;
inline constexpr HsaStatus kNotInitialized = 0x100B;

inline constexpr uint64_t kCpu = 1;  // its agent
inline constexpr uint32_t kHostEngines = 2;
inline constexpr uint32_t kPeerEngines = 14;

// A queue of a GPU's and the engine behind it.
struct UserQueue {
  HsaQueue queue;
  std::vector<uint32_t> dwords;
  uint64_t rptr = 0;
  uint64_t wptr = 0;
  uint64_t doorbell = 0;
  std::unique_ptr<offcore::sdma::Engine> engine;
  void (*callback)(HsaStatus, HsaQueue*, void*) = nullptr;
  void* callback_data = nullptr;
  bool told = false;
  bool stopped = false;
};

class Machine {
 public:
  static Machine& get();

  uint64_t gpus() const { return gpus_; }
  const std::string& name() const { return name_; }
  void count(const char* function);
  uint64_t calls(const std::string& function);
  uint64_t done(const std::string& what);
  uint64_t made_on(uint32_t engine);

  HsaStatus allocate(uint64_t bytes, uint64_t agent, void** data);
  HsaStatus release(void* data);
  HsaStatus allow(const void* data);
  HsaStatus lock(void* data, uint64_t bytes, void** seen);
  HsaStatus unlock(void* data);

  HsaStatus create(QueueDescriptor& wanted);
  HsaStatus destroy(HsaQueue* queue);
  UserQueue* find(HsaQueue* queue);
  HsaStatus batch(const CopyOp* ops, uint32_t count);
  HsaSignal make_signal(int64_t value);
  HsaStatus forget(HsaSignal signal);

 private:
  Machine();
  void serve();
  bool sweep();
  bool copy_one();
  bool allowed(const CopyOp& op, const CopyOp& first) const;
  uint64_t agent_of(const void* address) const;
  void start();

  // The mutex for a caller, before whom the engines' thread steps back.
  class Turn {
   public:
    explicit Turn(Machine& machine) {
      ++machine.callers_;
      lock_ = std::unique_lock(machine.mutex_);
      --machine.callers_;
    }

   private:
    std::unique_lock<std::mutex> lock_;
  };
  struct Allocation {
    uint64_t bytes = 0;
    uint64_t agent = 0;
    bool allowed = false;
  };
  struct Locked {
    uint32_t count = 0;
    std::vector<uint64_t> addresses;
  };

  std::mutex mutex_;
  std::condition_variable work_;
  std::atomic<int> callers_{0};
  uint64_t gpus_ = 8;
  std::string name_ = "gfx942";
  uint64_t seed_ = 1;
  bool refuses_queues_ = false;
  uint64_t fault_ = UINT64_MAX;   // an engine stops that has fetched so many packets, one in all
  uint64_t refuse_ = UINT64_MAX;  // the batches' copies from this one on, of the first that long
  std::map<std::string, uint64_t> calls_;
  std::map<std::string, uint64_t> done_;
  std::map<uint32_t, uint64_t> made_on_;
  offcore::sdma::EngineMemory memory_;
  std::map<void*, Allocation> allocations_;
  std::map<void*, Locked> locked_;
  std::map<uint64_t, std::unique_ptr<std::atomic<int64_t>>> signals_;
  std::vector<std::function<void()>> late_;  // what is told of queues that are no more
  uint64_t next_address_ = uint64_t{1} << 46;
  std::vector<std::unique_ptr<UserQueue>> queues_;
  std::vector<CopyOp> copies_;  // in no order
  uint64_t draws_ = 0;
  bool serving_ = false;
};

}  // namespace fakehsa
