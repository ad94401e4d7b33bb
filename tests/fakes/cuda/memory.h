// Memory as the driver manages it: physical allocations in memory files, addresses that they are
// mapped at, and host memory that was registered.
//
// An address of the stand-in is reserved but never readable by the CPU, as on a machine whose GPU
// has memory of its own: engines reach the bytes through the table of mappings and a view of the
// file of their own. So a wild copy is an error code and no crash, and a CPU access is a crash.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "tests/fakes/cuda/abi.h"
#include "tests/fakes/cuda/seen.h"

namespace fakecuda {

inline constexpr uint64_t kGranularity = uint64_t{2} << 20;
inline constexpr int kHost = -1;  // whose memory it may be besides a device's

// At the end of each memory file, seen by every process that imported it.
struct Trailer {
  uint64_t magic;
  uint64_t bytes;
  int32_t device;  // its physical number, or kHost
  int32_t handle_types;
  std::atomic<uint32_t> changes;   // counts writes, while there are sleepers
  std::atomic<uint32_t> sleepers;  // waits for a change
  uint64_t serial;                 // no other memory's, in any process
};

class Allocation {
 public:
  // Where the CPU finds the file: once in a process, however often it was imported.
  struct View {
    std::byte* data;
    uint64_t bytes;
    ~View();
  };
  static std::shared_ptr<Allocation> create(int device, uint64_t bytes, int handle_types);
  static std::shared_ptr<Allocation> import(int fd);
  ~Allocation();
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  int duplicate_fd() const;  // the caller's to close
  uint64_t bytes() const { return bytes_; }
  int device() const { return trailer_->device; }
  int handle_types() const { return trailer_->handle_types; }
  std::byte* data() const { return view_->data; }
  int fd() const { return fd_; }
  uint64_t serial() const { return trailer_->serial; }
  uint64_t number() const { return number_; }  // of this process's, as they were made
  static uint64_t made();                      // so many until now
  std::atomic<MemoryHandle> handle{0};         // as cuMemCreate gave it; 0: nobody was given any
  void changed();                              // wakes who waits for a change, in all processes
  // Sleeps until something was written, unless `holds` already.
  template <typename Condition>
  void wait_for_change(Condition&& holds, int64_t timeout_ns) {
    const Hidden hidden;
    trailer_->sleepers.fetch_add(1);
    const uint32_t seen = trailer_->changes;
    if (!holds()) sleep(seen, timeout_ns);
    trailer_->sleepers.fetch_sub(1);
  }

 private:
  Allocation(int fd, uint64_t bytes, bool owned);
  void sleep(uint32_t seen, int64_t timeout_ns);
  int fd_;
  uint64_t bytes_;
  const uint64_t number_;
  bool owned_;  // counted against the memory of its device
  std::shared_ptr<View> view_;
  Trailer* trailer_ = nullptr;
};

uint64_t device_bytes_used(int physical_device);
uint64_t live_allocations();

// A contiguous piece of what a range of addresses means.
struct Piece {
  std::shared_ptr<Allocation> allocation;  // null: host memory
  std::byte* data = nullptr;
  uint64_t bytes = 0;
};

// Sleeps until something was written there, unless `holds` already. The engines of all processes
// tell of their writes. The CPU tells nobody: for host memory it is a nap, twice as long each time.
template <typename Condition>
void wait_for_change(Piece piece, Condition&& holds, int64_t timeout_ns, int64_t& nap_ns) {
  if (piece.allocation) return piece.allocation->wait_for_change(holds, timeout_ns);
  std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(nap_ns, timeout_ns)));
  nap_ns = std::min<int64_t>(2 * nap_ns, 500'000);
}

constexpr int64_t kFirstNapNs = 5'000;
constexpr int64_t kChangeNs = 20'000'000;  // then whoever waits looks for an error too

enum class Kind { kUnknown, kReserved, kMapped, kRegistered };

// Who made a mapping: its owner, by cuMemMap; or the driver, for memory of cuMemAlloc, of
// cuMemAllocAsync, of cuMemAllocManaged, or of another process.
enum class Origin { kMapped, kAllocated, kPool, kManaged, kOpened };

struct PointerFacts {
  Kind kind = Kind::kUnknown;
  DevicePtr start = 0;
  uint64_t bytes = 0;
  std::shared_ptr<Allocation> allocation;
  Origin origin = Origin::kMapped;
  uint64_t buffer = 0;  // its number: each mapping has another one
  // What the driver calls the range: all addresses that were reserved together, mapped or not; else
  // the allocation or registration.
  DevicePtr range_start = 0;
  uint64_t range_bytes = 0;
};

class AddressSpace {
 public:
  AddressSpace();
  DevicePtr reserve(uint64_t bytes, uint64_t alignment, DevicePtr hint);
  void free(DevicePtr start, uint64_t bytes);
  void map(DevicePtr start, uint64_t bytes, std::shared_ptr<Allocation> allocation);
  void unmap(DevicePtr start, uint64_t bytes);
  // As cuMemAlloc: an address for the device whose memory it is. They follow each other, so that
  // allocations of equal size are at equal steps, as they often are.
  DevicePtr allocate(std::shared_ptr<Allocation> allocation, Origin origin, int reader);
  void free_allocated(DevicePtr start, bool opened = false);
  void set_access(DevicePtr start, uint64_t bytes, const AccessDesc* rights, size_t count);
  // What cuMemAlloc gave of the owner's memory is open to that device too.
  void open_to_peer(int device, int owner);
  int access_of(DevicePtr address, int device) const;
  void register_host(DevicePtr start, uint64_t bytes);
  void unregister_host(DevicePtr start);

  PointerFacts facts(DevicePtr address) const;
  // Whether `device` may touch the bytes, all of one mapping or registration.
  bool reachable(DevicePtr address, uint64_t bytes, int device, bool write) const;
  // The pieces that `device` reaches at the addresses; pageable host memory counts where `host`.
  // False: some byte is out of its reach.
  bool pieces(DevicePtr address, uint64_t bytes, int device, bool write, bool host,
              std::vector<Piece>& out) const;
  uint64_t mappings() const;
  uint64_t reservations() const;
  uint64_t registrations() const;

 private:
  struct Mapping {
    uint64_t bytes;
    std::shared_ptr<Allocation> allocation;
    std::map<int, int> access;  // by physical device
    Origin origin = Origin::kMapped;
    uint64_t buffer = 0;
  };
  using Mappings = std::map<DevicePtr, Mapping>;
  Mappings::const_iterator mapping_at(DevicePtr address) const;
  std::vector<Mappings::iterator> whole_mappings(DevicePtr start, uint64_t bytes);
  std::optional<std::pair<DevicePtr, uint64_t>> range_at(
      const std::map<DevicePtr, uint64_t>& ranges, DevicePtr address) const;

  int access_of(const Mapping& mapping, int device) const;

  std::set<std::pair<int, int>> peers_;  // who reaches whose
  uint64_t buffers_ = 0;                 // so far
  mutable std::shared_mutex mutex_;
  std::map<DevicePtr, uint64_t> reservations_;
  std::map<DevicePtr, uint64_t> registrations_;
  Mappings mappings_;
  std::multimap<uint64_t, DevicePtr> freed_;  // by size: other memory gets these addresses
  std::mutex heap_mutex_;                     // of the two below
  DevicePtr behind_;                          // where the next plain allocation would lie
  DevicePtr end_;
};

AddressSpace& addresses();

}  // namespace fakecuda
