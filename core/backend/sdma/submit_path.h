// How bytes get to the copy engines of AMD GPUs: memory that the engines reach, and either rings of
// their own or calls of AMD's runtimes. Three paths, the first that is there is taken:
//
//   queues      user-mode SDMA rings (hsa_amd_queue_create); waits and signals are packets
//   batch_copy  hsa_amd_memory_async_batch_copy; the host waits and signals between batches
//   hip_batch   hipMemcpyBatchAsync, likewise, in calls of at most 8192 copies
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/backend/backend.h"
#include "core/backend/sdma/packet_ring.h"

namespace offcore::sdma {

// Ranges of memory that a path has allocated itself: what needs no pinning. `place` is the rank on
// whose GPU it lies, or kHostRank.
class RangeTable {
 public:
  void add(const std::byte* data, uint64_t bytes, Rank place) {
    const std::lock_guard lock(mutex_);
    ranges_[data] = {bytes, place};
  }
  void remove(const std::byte* data) {
    const std::lock_guard lock(mutex_);
    ranges_.erase(data);
  }
  std::optional<Rank> place_of(const std::byte* data) const {
    const std::lock_guard lock(mutex_);
    const auto after = ranges_.upper_bound(data);
    if (after == ranges_.begin()) return std::nullopt;
    const auto& [begin, range] = *std::prev(after);
    return data < begin + range.bytes ? std::optional(range.place) : std::nullopt;
  }

 private:
  struct OwnedRange {
    uint64_t bytes = 0;
    Rank place = kHostRank;
  };
  mutable std::mutex mutex_;
  std::map<const std::byte*, OwnedRange> ranges_;
};

// One copy or swap of a batch, with the ranks whose memory it is (kHostRank: the host's).
struct BatchCopy {
  uint64_t dst = 0;
  uint64_t src = 0;
  uint64_t bytes = 0;
  Rank dst_rank = 0;
  Rank src_rank = 0;
  bool swap = false;
};

// A batch under way.
class Ticket {
 public:
  virtual ~Ticket() = default;
  // Throws driver, or memory, where it has failed or was refused in part: in the end, because until
  // then copies that were not refused may still be under way.
  virtual bool done() = 0;
};

class SubmitPath {
 public:
  virtual ~SubmitPath() = default;
  virtual std::string_view name() const = 0;
  virtual Share allocate(Rank rank, uint64_t bytes) = 0;
  virtual Share allocate_host(uint64_t bytes) = 0;

  // Where engines see this memory of the process's, as long as the owner lives, and whose it is.
  struct Pinned {
    uint64_t address = 0;
    Rank place = kHostRank;
    std::shared_ptr<void> owner;
  };
  Pinned pin(std::byte* data, uint64_t bytes);

  virtual bool has_rings() const { return false; }
  // The ring of a queue of a group's (a lane's, or a prelaunched program's) whose copies are to and
  // from the host, or between ranks; its only producer is the caller.
  virtual PacketRing& ring(uint32_t group, Rank rank, uint16_t queue, bool host);
  // Ends that queue's rings, whatever they hold; the next ones are new.
  virtual void drop_ring(uint32_t, Rank, uint16_t) {}
  // What the runtime has told of an engine that has failed; empty: nothing.
  virtual std::string failure() const { return {}; }
  // A time of the engines' clock, and how long after it a timestamp's ticks are.
  virtual uint64_t engine_time() const { return 0; }
  virtual int64_t since_ns(Rank, uint64_t, uint64_t) const { return 0; }

  // Where there are no rings: begins a batch, unordered. At most one call at a time.
  virtual std::unique_ptr<Ticket> copy(Rank rank, std::span<const BatchCopy> pieces);
  virtual bool swaps() const { return true; }

 protected:
  // Memory that the path has allocated (null: of 0 bytes), zeroed by way of the large BAR.
  Share keep(Rank place, uint64_t bytes, void* data, void (*release)(void*));
  virtual Pinned pin_callers(std::byte* data, uint64_t bytes) = 0;  // memory that is not

 private:
  std::shared_ptr<RangeTable> own_ = std::make_shared<RangeTable>();
};

// The best path there is for `ranks` ranks, rank r on GPU r. Throws unavailable.
std::unique_ptr<SubmitPath> open_path(Rank ranks);

// What open_path would find: how many GPUs, their name, the path, and why none of those before it;
// or throws unavailable.
std::string path_summary();

// Why the runtime, which is open, gives no rings; empty: it does, one has been made to see.
std::string why_no_queues();

std::unique_ptr<SubmitPath> make_hsa_path(Rank ranks, bool queues);
std::unique_ptr<SubmitPath> make_hip_path(Rank ranks);

}  // namespace offcore::sdma
