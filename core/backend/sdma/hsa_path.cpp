// Through the HSA runtime: user-mode SDMA rings where it has them, else its batch copy.
#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>

#include "core/backend/sdma/hsa.h"
#include "core/backend/sdma/submit_path.h"
#include "core/base/clock.h"
#include "core/base/error.h"

namespace offcore::sdma {
namespace {

constexpr uint32_t kRingBytes = 64 << 10;

// A queue of the runtime's and the ring in it.
class UserQueue {
 public:
  UserQueue(const hsa::Gpu& gpu, uint32_t engine, std::atomic<hsa::HsaStatus>& failed) {
    const hsa::HsaRuntime& runtime = hsa::HsaRuntime::get();
    hsa::QueueDescriptor wanted{.queue_size_bytes = kRingBytes,
                                .callback = note_failure,
                                .callback_data = &failed,
                                .sdma_engine_id = engine};
    hsa::check(runtime.hsa_amd_queue_create(gpu.agent, &wanted, 1),
               cat("cannot create a queue on SDMA engine ", engine));
    queue_ = wanted.queue;
    try {
      const auto pointer = [&](hsa::QueueInfo which) {
        uint64_t address = 0;
        hsa::check(runtime.hsa_amd_queue_get_info(queue_, which, &address),
                   "the queue's pointers cannot be had");
        return reinterpret_cast<uint64_t*>(address);
      };
      ring_.emplace(
          RingMemory{.dwords = {static_cast<uint32_t*>(queue_->base_address), queue_->size / 4},
                     .rptr = pointer(hsa::QueueInfo::read_pointer),
                     .wptr = pointer(hsa::QueueInfo::write_pointer),
                     .doorbell = pointer(hsa::QueueInfo::doorbell)});
    } catch (...) {
      runtime.hsa_queue_destroy(queue_);
      throw;
    }
  }
  ~UserQueue() { hsa::HsaRuntime::get().hsa_queue_destroy(queue_); }
  UserQueue(const UserQueue&) = delete;
  PacketRing& ring() { return *ring_; }

 private:
  static void note_failure(hsa::HsaStatus status, hsa::HsaQueue*, void* failed) {
    static_cast<std::atomic<hsa::HsaStatus>*>(failed)->store(status);
  }

  hsa::HsaQueue* queue_ = nullptr;
  std::optional<PacketRing> ring_;
};

// Queues beyond the engines of their kind share them.
uint32_t engine_of(const hsa::Gpu& gpu, uint16_t queue, bool host) {
  const bool front = host || gpu.engines_peer == 0;
  const uint32_t count = front ? gpu.engines_host : gpu.engines_peer;
  if (count == 0) return hsa::kAnyEngine;
  return (front ? 0 : gpu.engines_host) + queue % count;
}

// What the runtime has told of queues that failed. It may tell after a queue's end, so each path's
// word lives as long as the process.
std::atomic<hsa::HsaStatus>& new_word() {
  static std::mutex mutex;
  static auto* const words = new std::deque<std::atomic<hsa::HsaStatus>>;
  const std::lock_guard lock(mutex);
  return words->emplace_back(hsa::kSuccess);
}

// A refusal rolls nothing back and does not tell how many copies were begun: they have ended once
// the signal has not changed for so long.
constexpr int64_t kQuietNs = 1'000'000'000;

class HsaTicket final : public Ticket {
 public:
  explicit HsaTicket(size_t copies) {
    hsa::check(
        hsa::HsaRuntime::get().hsa_signal_create(static_cast<int64_t>(copies), 0, nullptr, &signal),
        "cannot create a signal");
  }
  // A signal that copies may still count down is left to them.
  ~HsaTicket() override {
    if (left() == 0) hsa::HsaRuntime::get().hsa_signal_destroy(signal);
  }
  void refuse(const Error& why) {
    refused_ = why;
    seen_ = left();
    seen_ns_ = now_ns();
  }
  bool done() override {
    const int64_t now_left = left();
    if (now_left < 0) fail(Code::driver, "a batch of copies has failed on the engines");
    if (!refused_) return now_left == 0;
    if (std::exchange(seen_, now_left) != now_left) seen_ns_ = now_ns();
    if (now_left > 0 && now_ns() - seen_ns_ < kQuietNs) return false;
    throw *refused_;
  }

  hsa::HsaSignal signal;

 private:
  int64_t left() const { return hsa::HsaRuntime::get().hsa_signal_load_scacquire(signal); }

  std::optional<Error> refused_;
  int64_t seen_ = 0;
  int64_t seen_ns_ = 0;
};

class HsaPath final : public SubmitPath {
 public:
  HsaPath(Rank ranks, bool queues)
      : runtime_(hsa::HsaRuntime::get()), ranks_(ranks), queues_(queues) {
    hsa::check(runtime_.hsa_system_get_info(hsa::SystemInfo::timestamp_frequency, &frequency_),
               "the clock's frequency cannot be had");
  }

  std::string_view name() const override { return queues_ ? "queues" : "batch_copy"; }
  Share allocate(Rank rank, uint64_t bytes) override {
    if (rank >= ranks_) fail(Code::invalid, "there is no rank ", rank);
    return allocate_from(runtime_.gpus()[rank].pool, rank, bytes);
  }
  Share allocate_host(uint64_t bytes) override {
    return allocate_from(runtime_.host_pool(), kHostRank, bytes);
  }

  bool has_rings() const override { return queues_; }
  bool swaps() const override { return runtime_.gpus()[0].has_swaps(); }
  PacketRing& ring(uint32_t group, Rank rank, uint16_t queue, bool host) override {
    std::unique_ptr<UserQueue>& place = rings_[{group, rank, queue, host}];
    if (place == nullptr) {
      const hsa::Gpu& gpu = runtime_.gpus()[rank];
      place = std::make_unique<UserQueue>(gpu, engine_of(gpu, queue, host), failed_);
    }
    return place->ring();
  }

  void drop_ring(uint32_t group, Rank rank, uint16_t queue) override {
    for (const bool host : {false, true}) rings_.erase({group, rank, queue, host});
  }

  std::string failure() const override {
    const hsa::HsaStatus status = failed_.load();
    if (status == hsa::kSuccess) return {};
    const char* text = nullptr;
    runtime_.hsa_status_string(status, &text);
    return cat("an SDMA queue has failed: ", text != nullptr ? text : "unknown error", " (", status,
               ")");
  }

  uint64_t engine_time() const override {
    uint64_t now = 0;
    runtime_.hsa_system_get_info(hsa::SystemInfo::timestamp, &now);
    return now;
  }

  int64_t since_ns(Rank rank, uint64_t ticks, uint64_t time) const override {
    uint64_t at = 0;
    hsa::check(runtime_.hsa_amd_profiling_convert_tick_to_system_domain(runtime_.gpus()[rank].agent,
                                                                        ticks, &at),
               "a timestamp cannot be converted");
    const double since = static_cast<double>(static_cast<int64_t>(at - time));
    return static_cast<int64_t>(since * 1e9 / static_cast<double>(frequency_));
  }

  std::unique_ptr<Ticket> copy(Rank rank, std::span<const BatchCopy> pieces) override {
    auto ticket = std::make_unique<HsaTicket>(pieces.size());
    const auto agent_of = [&](Rank place) {
      return place == kHostRank ? runtime_.host() : runtime_.gpus()[place].agent;
    };
    std::vector<hsa::CopyOp> ops;
    for (const BatchCopy& piece : pieces) {
      // Copies between two places of the host's are this rank's GPU's to make.
      const bool within_host = piece.src_rank == kHostRank && piece.dst_rank == kHostRank;
      ops.push_back({.type = piece.swap ? hsa::kOpSwap : hsa::kOpLinear,
                     .completion_signal = ticket->signal,
                     .src = reinterpret_cast<void*>(piece.src),
                     .src_agent = agent_of(piece.src_rank),
                     .dst_agent = agent_of(within_host ? rank : piece.dst_rank),
                     .dst = reinterpret_cast<void*>(piece.dst),
                     .size = piece.bytes,
                     .dst_size = piece.swap ? piece.bytes : 0});
    }
    try {
      hsa::check(runtime_.hsa_amd_memory_async_batch_copy(
                     ops.data(), static_cast<uint32_t>(ops.size()), 0, nullptr),
                 cat("a batch of ", ops.size(), " copies was refused"));
    } catch (const Error& error) {
      ticket->refuse(error);
    }
    return ticket;
  }

 private:
  Pinned pin_callers(std::byte* data, uint64_t bytes) override {
    void* seen = nullptr;
    hsa::check(runtime_.hsa_amd_memory_lock(data, bytes, nullptr, 0, &seen),
               cat("memory of the caller's (", bytes, " bytes) cannot be pinned"));
    return {.address = reinterpret_cast<uint64_t>(seen),
            .owner = std::shared_ptr<void>(
                data, [](void* memory) { hsa::HsaRuntime::get().hsa_amd_memory_unlock(memory); })};
  }

  Share allocate_from(hsa::MemoryPool pool, Rank place, uint64_t bytes) {
    const auto release = [](void* own) { hsa::HsaRuntime::get().hsa_amd_memory_pool_free(own); };
    if (bytes == 0) return keep(place, 0, nullptr, release);
    void* data = nullptr;
    hsa::check(runtime_.hsa_amd_memory_pool_allocate(pool, bytes, 0, &data),
               cat("cannot allocate ", bytes, " bytes for rank ", place == kHostRank ? 0 : place));
    const std::vector<hsa::Agent>& agents = runtime_.agents();
    const hsa::HsaStatus allowed = runtime_.hsa_amd_agents_allow_access(
        static_cast<uint32_t>(agents.size()), agents.data(), nullptr, data);
    if (allowed != hsa::kSuccess) {
      release(data);
      hsa::check(allowed, "all GPUs and the host have to reach a window (large BAR)");
    }
    return keep(place, bytes, data, release);
  }

  const hsa::HsaRuntime& runtime_;
  const Rank ranks_;
  const bool queues_;
  uint64_t frequency_ = 1;
  std::atomic<hsa::HsaStatus>& failed_ = new_word();
  std::map<std::tuple<uint32_t, Rank, uint16_t, bool>, std::unique_ptr<UserQueue>> rings_;
};

}  // namespace

// The symbol alone tells little: older drivers of the kernel refuse such queues.
std::string why_no_queues() {
  const hsa::HsaRuntime& runtime = hsa::HsaRuntime::get();
  const hsa::Gpu& gpu = runtime.gpus()[0];
  if (!runtime.has_queues()) return "this HSA runtime lacks hsa_amd_queue_create";
  if (!gpu.has_packets()) return cat("no packets of ", gpu.name, " are known");
  try {
    static std::atomic<hsa::HsaStatus>& failed = new_word();
    UserQueue(gpu, engine_of(gpu, 0, false), failed);
    return {};
  } catch (const Error& error) {
    return error.message();
  }
}

std::unique_ptr<SubmitPath> make_hsa_path(Rank ranks, bool queues) {
  return std::make_unique<HsaPath>(ranks, queues);
}

}  // namespace offcore::sdma
