// Through the HSA runtime: user-mode SDMA rings where it has them, else its batch copy.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <optional>
#include <tuple>

#include "core/backend/sdma/hsa.h"
#include "core/backend/sdma/way.h"
#include "core/base/error.h"

namespace offcore::sdma {
namespace {

constexpr uint32_t kRingBytes = 64 << 10;

// A queue of the runtime's and the ring in it.
class UserQueue {
 public:
  UserQueue(hsa::Agent agent, uint32_t engine, std::atomic<hsa::Status>& failed) {
    const hsa::Runtime& runtime = hsa::Runtime::get();
    hsa::QueueDescriptor wanted{.queue_size_bytes = kRingBytes,
                                .callback = note_failure,
                                .callback_data = &failed,
                                .sdma_engine_id = engine};
    hsa::check(runtime.hsa_amd_queue_create(agent, &wanted, 1),
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
  ~UserQueue() { hsa::Runtime::get().hsa_queue_destroy(queue_); }
  UserQueue(const UserQueue&) = delete;
  Ring& ring() { return *ring_; }

 private:
  static void note_failure(hsa::Status status, hsa::Queue*, void* failed) {
    static_cast<std::atomic<hsa::Status>*>(failed)->store(status);
  }

  hsa::Queue* queue_ = nullptr;
  std::optional<Ring> ring_;
};

class HsaTicket final : public Ticket {
 public:
  explicit HsaTicket(size_t copies) {
    hsa::check(
        hsa::Runtime::get().hsa_signal_create(static_cast<int64_t>(copies), 0, nullptr, &signal),
        "cannot create a signal");
  }
  ~HsaTicket() override { hsa::Runtime::get().hsa_signal_destroy(signal); }
  bool done() override {
    const int64_t left = hsa::Runtime::get().hsa_signal_load_scacquire(signal);
    if (left < 0) fail(Code::driver, "a batch of copies has failed on the engines");
    return left == 0;
  }

  hsa::Signal signal;
};

class HsaWay final : public Way {
 public:
  HsaWay(const Machine& machine, Rank ranks)
      : runtime_(hsa::Runtime::get()),
        ranks_(ranks),
        engines_host_(machine.engines_host),
        queues_(runtime_.gpus()[0].name.starts_with("gfx94") && runtime_.has_queues()) {
    hsa::check(runtime_.hsa_system_get_info(hsa::SystemInfo::timestamp_frequency, &frequency_),
               "the clock's frequency cannot be had");
  }

  std::string_view name() const override { return queues_ ? "queues" : "batch_copy"; }
  Share allocate(Rank rank, uint64_t bytes) override {
    if (rank >= ranks_) fail(Code::invalid, "there is no rank ", rank);
    return allocate_from(runtime_.gpus()[rank].pool, rank, bytes);
  }
  Share allocate_host(uint64_t bytes) override {
    return allocate_from(runtime_.host_pool(), 0, bytes);
  }

  Pinned pin(std::byte* data, uint64_t bytes) override {
    if (own_->hold(data)) return {.address = reinterpret_cast<uint64_t>(data)};
    void* seen = nullptr;
    hsa::check(runtime_.hsa_amd_memory_lock(data, bytes, nullptr, 0, &seen),
               cat("memory of the caller's (", bytes, " bytes) cannot be pinned"));
    return {.address = reinterpret_cast<uint64_t>(seen),
            .owner = std::shared_ptr<void>(
                data, [](void* memory) { hsa::Runtime::get().hsa_amd_memory_unlock(memory); })};
  }

  // Peers' engines come behind the host's; queues beyond the engines share them.
  bool has_rings() const override { return queues_; }
  Ring& ring(uint32_t group, Rank rank, uint16_t queue) override {
    std::unique_ptr<UserQueue>& place = rings_[{group, rank, queue}];
    if (place == nullptr) {
      const hsa::Agent agent = runtime_.gpus()[rank].agent;
      uint32_t engines = 0;
      hsa::check(runtime_.hsa_agent_get_info(agent, hsa::AgentInfo::sdma_engines, &engines),
                 "the number of SDMA engines cannot be had");
      const uint32_t first = engines_host_ < engines ? engines_host_ : 0;
      const uint32_t engine = first + queue % std::max(1u, engines - first);
      place = std::make_unique<UserQueue>(agent, engine, failed_);
    }
    return place->ring();
  }

  void drop_ring(uint32_t group, Rank rank, uint16_t queue) override {
    rings_.erase({group, rank, queue});
  }

  std::string failure() const override {
    const hsa::Status status = failed_.load();
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

  std::unique_ptr<Ticket> copy(Rank rank, std::span<const Piece> pieces) override {
    auto ticket = std::make_unique<HsaTicket>(pieces.size());
    // Copies between two places of the host's are this rank's GPU's to make.
    const auto agent_of = [&](Rank place) {
      return runtime_.gpus()[place == kHostRank ? rank : place].agent;
    };
    std::vector<hsa::CopyOp> ops;
    for (const Piece& piece : pieces) {
      ops.push_back({.type = piece.swap ? hsa::kOpSwap : hsa::kOpLinear,
                     .completion_signal = ticket->signal,
                     .src = reinterpret_cast<void*>(piece.src),
                     .src_agent = agent_of(piece.src_rank),
                     .dst_agent = agent_of(piece.dst_rank),
                     .dst = reinterpret_cast<void*>(piece.dst),
                     .size = piece.bytes,
                     .dst_size = piece.swap ? piece.bytes : 0});
    }
    hsa::check(runtime_.hsa_amd_memory_async_batch_copy(
                   ops.data(), static_cast<uint32_t>(ops.size()), 0, nullptr),
               cat("a batch of ", ops.size(), " copies was refused"));
    return ticket;
  }

 private:
  Share allocate_from(hsa::MemoryPool pool, Rank rank, uint64_t bytes) {
    Share share{.rank = rank, .bytes = bytes};
    if (bytes == 0) return share;
    void* data = nullptr;
    hsa::check(runtime_.hsa_amd_memory_pool_allocate(pool, bytes, 0, &data),
               cat("cannot allocate ", bytes, " bytes for rank ", rank));
    const std::vector<hsa::Agent>& agents = runtime_.agents();
    const hsa::Status allowed = runtime_.hsa_amd_agents_allow_access(
        static_cast<uint32_t>(agents.size()), agents.data(), nullptr, data);
    if (allowed != hsa::kSuccess) {
      runtime_.hsa_amd_memory_pool_free(data);
      hsa::check(allowed, "all GPUs and the host have to reach a window (large BAR)");
    }
    std::memset(data, 0, bytes);
    share.data = static_cast<std::byte*>(data);
    own_->add(share.data, bytes);
    share.owner = std::shared_ptr<void>(data, [own = own_](void* memory) {
      own->remove(static_cast<std::byte*>(memory));
      hsa::Runtime::get().hsa_amd_memory_pool_free(memory);
    });
    return share;
  }

  const hsa::Runtime& runtime_;
  const Rank ranks_;
  const uint32_t engines_host_;
  const bool queues_;
  uint64_t frequency_ = 1;
  std::atomic<hsa::Status> failed_{hsa::kSuccess};
  std::shared_ptr<Ranges> own_ = std::make_shared<Ranges>();
  std::map<std::tuple<uint32_t, Rank, uint16_t>, std::unique_ptr<UserQueue>> rings_;
};

}  // namespace

std::unique_ptr<Way> make_hsa_way(const Machine& machine, Rank ranks) {
  return std::make_unique<HsaWay>(machine, ranks);
}

}  // namespace offcore::sdma
