#include "tests/fakes/hsa/runtime.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "core/base/error.h"

namespace fakehsa {
namespace {

constexpr uint32_t kEngines = kHostEngines + kPeerEngines;
constexpr uint64_t kPacketsATurn = 16;
constexpr auto kEager = std::chrono::microseconds(200);
constexpr auto kPause = std::chrono::microseconds(50);

std::string setting(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : fallback;
}

bool zero(const void* data, size_t bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  return std::all_of(at, at + bytes, [](unsigned char byte) { return byte == 0; });
}

}  // namespace

Machine& Machine::get() {
  static Machine* const machine = new Machine();
  return *machine;
}

Machine::Machine()
    : gpus_(std::strtoull(setting("OFFCORE_FAKE_HSA_GPUS", "8").c_str(), nullptr, 10)),
      name_(setting("OFFCORE_FAKE_HSA_NAME", "gfx942")),
      seed_(std::strtoull(setting("OFFCORE_FAKE_HSA_SEED", "1").c_str(), nullptr, 10)),
      refuses_queues_(setting("OFFCORE_FAKE_HSA_NO_QUEUES", "") == "1"),
      fault_(std::strtoull(setting("OFFCORE_FAKE_HSA_FAULT", "18446744073709551615").c_str(),
                           nullptr, 10)),
      refuse_(std::strtoull(setting("OFFCORE_FAKE_HSA_REFUSE", "18446744073709551615").c_str(),
                            nullptr, 10)) {}

void Machine::count(const char* function) {
  const Turn lock(*this);
  ++calls_[function];
}

uint64_t Machine::calls(const std::string& function) {
  const Turn lock(*this);
  return calls_[function];
}

uint64_t Machine::done(const std::string& what) {
  const Turn lock(*this);
  uint64_t sum = done_[what];
  for (const auto& queue : queues_) {
    const offcore::sdma::EngineCounts& counts = queue->engine->counts();
    sum += what == "packets" ? counts.packets
           : what == "moves" ? counts.moves
           : what == "laps"  ? counts.laps
                             : 0;
  }
  return what == "queues" ? queues_.size() : sum;
}

uint64_t Machine::made_on(uint32_t engine) {
  const Turn lock(*this);
  return made_on_[engine];
}

HsaStatus Machine::allocate(uint64_t bytes, uint64_t agent, void** data) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return kOutOfResources;
  std::memset(memory, 0xA5, bytes);  // nobody promises zeros
  const Turn lock(*this);
  allocations_[memory] = {.bytes = bytes, .agent = agent};
  *data = memory;
  return kOk;
}

HsaStatus Machine::release(void* data) {
  const Turn lock(*this);
  const auto found = allocations_.find(data);
  if (found == allocations_.end()) return kInvalidArgument;
  if (found->second.allowed) memory_.remove(reinterpret_cast<uint64_t>(data));
  munmap(data, found->second.bytes);
  allocations_.erase(found);
  return kOk;
}

HsaStatus Machine::allow(const void* data) {
  const Turn lock(*this);
  const auto found = allocations_.find(const_cast<void*>(data));
  if (found == allocations_.end()) return kInvalidArgument;
  if (found->second.allowed) return kOk;
  found->second.allowed = true;
  memory_.add(reinterpret_cast<uint64_t>(data), static_cast<std::byte*>(found->first),
              found->second.bytes);
  return kOk;
}

HsaStatus Machine::lock(void* data, uint64_t bytes, void** seen) {
  if (data == nullptr || bytes == 0) return kInvalidArgument;
  const Turn held(*this);
  // As a page's address modulo its size: what is aligned stays aligned.
  const uint64_t address = next_address_ + reinterpret_cast<uint64_t>(data) % 4096;
  next_address_ += (bytes + 3 * 4096) / 4096 * 4096;
  memory_.add(address, static_cast<std::byte*>(data), bytes);
  Locked& locked = locked_[data];
  ++locked.count;
  locked.addresses.push_back(address);
  *seen = reinterpret_cast<void*>(address);
  return kOk;
}

HsaStatus Machine::unlock(void* data) {
  const Turn held(*this);
  const auto found = locked_.find(data);
  if (found == locked_.end()) return kInvalidArgument;
  if (--found->second.count > 0) return kOk;
  for (const uint64_t address : found->second.addresses) memory_.remove(address);
  locked_.erase(found);
  return kOk;
}

HsaStatus Machine::create(QueueDescriptor& wanted) {
  const uint32_t size = wanted.queue_size_bytes;
  const bool valid = wanted.version == 1 && wanted.flags == 0 && wanted.priority <= 2 &&
                     wanted.traffic_class == 0 && size > 0 && (size & (size - 1)) == 0 &&
                     zero(wanted.reserved_header, sizeof wanted.reserved_header) &&
                     zero(wanted.reserved_engine, sizeof wanted.reserved_engine) &&
                     zero(wanted.reserved, sizeof wanted.reserved);
  if (!valid) return kInvalidArgument;
  const bool any = wanted.sdma_engine_id == offcore::hsa::kAnyEngine;
  if (refuses_queues_ || wanted.engine_type != offcore::hsa::kEngineSdma ||
      (!any && wanted.sdma_engine_id >= kEngines)) {
    return kInvalidQueueCreation;
  }
  const Turn lock(*this);
  auto made = std::make_unique<UserQueue>();
  made->dwords.assign(size / 4, 0xFFFFFFFF);
  made->queue = {.type = 1, .base_address = made->dwords.data(), .size = size};
  made->callback = wanted.callback;
  made->callback_data = wanted.callback_data;
  const offcore::sdma::RingMemory ring{.dwords = made->dwords,
                                       .rptr = &made->rptr,
                                       .wptr = &made->wptr,
                                       .doorbell = &made->doorbell};
  made->engine = std::make_unique<offcore::sdma::Engine>(
      ring, memory_, offcore::sdma::EngineOptions{.seed = seed_ == 0 ? 0 : seed_ + queues_.size()});
  wanted.queue = &made->queue;
  queues_.push_back(std::move(made));
  ++made_on_[wanted.sdma_engine_id];
  start();
  return kOk;
}

HsaStatus Machine::destroy(HsaQueue* queue) {
  const Turn lock(*this);
  const auto found = std::find_if(queues_.begin(), queues_.end(),
                                  [&](const auto& one) { return &one->queue == queue; });
  if (found == queues_.end()) return kInvalidArgument;
  const offcore::sdma::EngineCounts& counts = (*found)->engine->counts();
  done_["packets"] += counts.packets;
  done_["moves"] += counts.moves;
  done_["laps"] += counts.laps;
  if ((*found)->told && (*found)->callback != nullptr) {  // a queue's end is told, too, and late
    late_.push_back([callback = (*found)->callback, data = (*found)->callback_data] {
      callback(kError, nullptr, data);
    });
  }
  queues_.erase(found);
  return kOk;
}

UserQueue* Machine::find(HsaQueue* queue) {
  const Turn lock(*this);
  for (const auto& one : queues_) {
    if (&one->queue == queue) return one.get();
  }
  return nullptr;
}

// Whose memory it is; what was not allocated here is the host's.
uint64_t Machine::agent_of(const void* address) const {
  const auto after = allocations_.upper_bound(const_cast<void*>(address));
  if (after == allocations_.begin()) return kCpu;
  const auto& [begin, allocation] = *std::prev(after);
  return address < static_cast<std::byte*>(begin) + allocation.bytes ? allocation.agent : kCpu;
}

bool Machine::allowed(const CopyOp& op, const CopyOp& first) const {
  const bool swap = op.type == offcore::hsa::kOpSwap;
  const bool form = op.version == 1 && op.type != 1 && op.type <= 2 && op.num_entries == 0 &&
                    op.completion_signal.handle == first.completion_signal.handle && op.size > 0 &&
                    op.dst_size == (swap ? op.size : 0) && zero(op.wait, sizeof op.wait) &&
                    zero(op.signal, sizeof op.signal) && op.reserved == 0;
  const auto dst = reinterpret_cast<uint64_t>(op.dst);
  const auto src = reinterpret_cast<uint64_t>(op.src);
  const bool aligned = !swap || (dst | src) % 64 == 0;
  // The agents are those whose memory it is; within the host a GPU stands for one of the two.
  const bool within_host = agent_of(op.dst) == kCpu && agent_of(op.src) == kCpu;
  const bool agents = within_host ? (op.dst_agent.handle == kCpu) != (op.src_agent.handle == kCpu)
                                  : op.dst_agent.handle == agent_of(op.dst) &&
                                        op.src_agent.handle == agent_of(op.src);
  return form && aligned && agents && memory_.find(dst, op.size) != nullptr &&
         memory_.find(src, op.size) != nullptr;
}

// What is refused is refused alone: the copies before it are made.
HsaStatus Machine::batch(const CopyOp* ops, uint32_t count) {
  if (ops == nullptr || count == 0) return kInvalidArgument;
  auto* signal = reinterpret_cast<std::atomic<int64_t>*>(ops[0].completion_signal.handle);
  const Turn lock(*this);
  for (uint32_t i = 0; i < count; ++i) {
    if (!allowed(ops[i], ops[0])) return kInvalidArgument;
  }
  if (signal == nullptr || signal->load() != count) return kInvalidArgument;
  const bool refused = count > refuse_;
  const uint64_t taken = refused ? std::exchange(refuse_, UINT64_MAX) : count;
  copies_.insert(copies_.end(), ops, ops + taken);
  start();
  return refused ? kOutOfResources : kOk;
}

HsaSignal Machine::make_signal(int64_t value) {
  const Turn lock(*this);
  auto made = std::make_unique<std::atomic<int64_t>>(value);
  const auto handle = reinterpret_cast<uint64_t>(made.get());
  signals_[handle] = std::move(made);
  return {handle};
}

// Copies that are to count down a signal keep it.
HsaStatus Machine::forget(HsaSignal signal) {
  const Turn lock(*this);
  const bool wanted = std::any_of(copies_.begin(), copies_.end(), [&](const CopyOp& op) {
    return op.completion_signal.handle == signal.handle;
  });
  if (!wanted) return signals_.erase(signal.handle) == 1 ? kOk : kInvalidArgument;
  std::fprintf(stderr, "fake HSA: a signal was destroyed that copies under way count down\n");
  std::abort();
}

void Machine::start() {
  if (!serving_) std::thread([this] { serve(); }).detach();  // it lives as long as the process
  serving_ = true;
  work_.notify_one();
}

void Machine::serve() {
  std::unique_lock lock(mutex_);
  auto moved_at = std::chrono::steady_clock::now();
  while (true) {
    const bool moved = sweep();
    const auto now = std::chrono::steady_clock::now();
    if (moved) moved_at = now;
    if (queues_.empty() && copies_.empty()) {
      work_.wait(lock);
    } else if (now - moved_at < kEager) {
      lock.unlock();
      do sched_yield();
      while (callers_.load() > 0);  // they come first
      lock.lock();
    } else {
      work_.wait_for(lock, kPause);
    }
  }
}

bool Machine::sweep() {
  bool moved = copy_one();
  for (const auto& tell : std::exchange(late_, {})) tell();
  for (const auto& queue : queues_) {
    using State = offcore::sdma::Engine::EngineState;
    const uint64_t before = queue->engine->counts().packets;
    if (before >= fault_) {
      fault_ = UINT64_MAX;
      queue->stopped = true;
    }
    const State state = queue->stopped ? State::faulted : queue->engine->run(kPacketsATurn);
    moved |= queue->engine->counts().packets != before;
    if (state != State::faulted || queue->told) continue;
    queue->told = true;
    const std::string why = queue->stopped ? "as asked" : queue->engine->fault();
    std::fprintf(stderr, "fake HSA: an engine stopped: %s\n", why.c_str());
    if (queue->callback != nullptr) queue->callback(kError, &queue->queue, queue->callback_data);
  }
  return moved;
}

// Does one of the batches' copies, any.
bool Machine::copy_one() {
  if (copies_.empty()) return false;
  const size_t pick = seed_ == 0 ? 0 : (seed_ * 7919 + ++draws_ * 104729) % copies_.size();
  const CopyOp op = copies_[pick];
  copies_.erase(copies_.begin() + static_cast<ptrdiff_t>(pick));
  std::byte* dst = memory_.find(reinterpret_cast<uint64_t>(op.dst), op.size);
  std::byte* src = memory_.find(reinterpret_cast<uint64_t>(op.src), op.size);
  auto* signal = reinterpret_cast<std::atomic<int64_t>*>(op.completion_signal.handle);
  if (dst == nullptr || src == nullptr) {
    signal->store(-1);
    return true;
  }
  if (op.type == offcore::hsa::kOpSwap) {
    std::vector<std::byte> kept(dst, dst + op.size);
    std::memcpy(dst, src, op.size);
    std::memcpy(src, kept.data(), op.size);
  } else {
    std::memmove(dst, src, op.size);
  }
  ++done_["batched"];
  signal->fetch_sub(1);
  return true;
}

}  // namespace fakehsa
