#include "tests/fakes/cuda/memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>
#include <mutex>
#include <tuple>

#include "tests/fakes/cuda/entry.h"
#include "tests/fakes/cuda/settings.h"

namespace fakecuda {
namespace {

constexpr uint64_t kMagic = 0x6675'6461'6b65'6d31;
constexpr uint64_t kTrailerBytes = 4096;
constexpr uint64_t kHeapBytes = uint64_t{64} << 30;  // addresses, reserved at once

struct Used {
  std::mutex mutex;
  std::map<int, uint64_t> bytes;  // by physical device
  uint64_t allocations = 0;       // imported ones too
  std::map<ino_t, std::weak_ptr<Allocation::View>> views;
};

Used& used() {
  static Used* const value = new Used;
  return *value;
}

bool overlaps(const std::map<DevicePtr, uint64_t>& ranges, DevicePtr start, uint64_t bytes) {
  const auto after = ranges.lower_bound(start + bytes);
  return after != ranges.begin() && std::prev(after)->first + std::prev(after)->second > start;
}

// Whether the CPU has something mapped at every page of the range.
bool is_host_memory(DevicePtr start, uint64_t bytes) {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const DevicePtr first = start / page * page, end = (start + bytes + page - 1) / page * page;
  std::vector<unsigned char> pages((end - first) / page);
  return mincore(reinterpret_cast<void*>(first), end - first, pages.data()) == 0;
}

DevicePtr find_room(uint64_t bytes, uint64_t align, DevicePtr hint) {
  void* const wish = reinterpret_cast<void*>(hint / align * align);
  void* room =
      mmap(wish, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  require(room != MAP_FAILED, kOutOfMemory);
  const auto begin = reinterpret_cast<DevicePtr>(room);
  const DevicePtr start = (begin + align - 1) / align * align;
  if (start > begin) munmap(room, start - begin);
  const uint64_t rest = align - (start - begin);
  if (rest > 0) munmap(reinterpret_cast<void*>(start + bytes), rest);
  return start;
}

}  // namespace

static std::atomic<uint64_t> numbers{0};

uint64_t Allocation::made() { return numbers; }

Allocation::Allocation(int fd, uint64_t bytes, bool owned)
    : fd_(fd), bytes_(bytes), number_(++numbers), owned_(owned) {
  struct stat file{};
  fstat(fd, &file);
  const std::lock_guard lock(used().mutex);
  std::weak_ptr<View>& known = used().views[file.st_ino];
  view_ = known.lock();
  if (view_ == nullptr) {
    void* const data = mmap(nullptr, bytes + kTrailerBytes, PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (data == MAP_FAILED) {
      close(fd);
      throw Failure{kOutOfMemory};
    }
    view_ = std::make_shared<View>(static_cast<std::byte*>(data), bytes + kTrailerBytes);
    known = view_;
  }
  trailer_ = reinterpret_cast<Trailer*>(data() + bytes);
  ++used().allocations;
}

std::shared_ptr<Allocation> Allocation::create(int device, uint64_t bytes, int handle_types) {
  {
    const std::lock_guard lock(used().mutex);
    uint64_t& taken = used().bytes[device];
    require(bytes <= settings().memory_bytes - taken, kOutOfMemory);
    taken += bytes;
  }
  const auto give_back = [&](Result code) {
    const std::lock_guard lock(used().mutex);
    used().bytes[device] -= bytes;
    throw Failure{code};
  };
  const int fd = memfd_create("device memory", MFD_CLOEXEC);
  if (fd < 0) give_back(kOperatingSystem);
  if (ftruncate(fd, static_cast<off_t>(bytes + kTrailerBytes)) != 0) {
    close(fd);
    give_back(kOutOfMemory);
  }
  std::shared_ptr<Allocation> made;
  try {
    made.reset(new Allocation(fd, bytes, true));
  } catch (const Failure& failure) {
    give_back(failure.code);
  }
  made->trailer_->bytes = bytes;
  made->trailer_->device = device;
  made->trailer_->handle_types = handle_types;
  static std::atomic<uint32_t> number{0};
  made->trailer_->serial = static_cast<uint64_t>(getpid()) << 32 | ++number;
  made->trailer_->magic = kMagic;
  return made;
}

std::shared_ptr<Allocation> Allocation::import(int fd) {
  struct stat file{};
  require(fstat(fd, &file) == 0 && S_ISREG(file.st_mode), kInvalidValue);
  const auto bytes = static_cast<uint64_t>(file.st_size);
  require(bytes > kTrailerBytes, kInvalidValue);
  Trailer trailer{};
  const auto at = static_cast<off_t>(bytes - kTrailerBytes);
  static_assert(offsetof(Trailer, changes) == 24);
  require(pread(fd, &trailer, 24, at) == 24 && trailer.magic == kMagic, kInvalidValue);
  require(trailer.bytes == bytes - kTrailerBytes, kInvalidValue);
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  require(own >= 0, kOperatingSystem);
  return std::shared_ptr<Allocation>(new Allocation(own, trailer.bytes, false));
}

Allocation::View::~View() { munmap(data, bytes); }

Allocation::~Allocation() {
  const int device = trailer_->device;
  close(fd_);
  const std::lock_guard lock(used().mutex);
  view_.reset();
  std::erase_if(used().views, [](const auto& entry) { return entry.second.expired(); });
  --used().allocations;
  if (owned_) used().bytes[device] -= bytes_;
}

int Allocation::duplicate_fd() const {
  const int copy = fcntl(fd_, F_DUPFD_CLOEXEC, 0);
  require(copy >= 0, kOperatingSystem);
  return copy;
}

void Allocation::changed() {
  const Hidden hidden;
  // Pairs with wait_for_change(): either the sleeper sees the bytes, or this sees the sleeper.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (trailer_->sleepers.load() == 0) return;
  trailer_->changes.fetch_add(1);
  syscall(SYS_futex, &trailer_->changes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Allocation::sleep(uint32_t seen, int64_t timeout_ns) {
  const timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  syscall(SYS_futex, &trailer_->changes, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

uint64_t device_bytes_used(int physical_device) {
  const std::lock_guard lock(used().mutex);
  return used().bytes[physical_device];
}

uint64_t live_allocations() {
  const std::lock_guard lock(used().mutex);
  return used().allocations;
}

// Before anything is reserved: what cuMemAlloc gives lies above it (H100, driver 580).
AddressSpace::AddressSpace()
    : behind_(find_room(kHeapBytes, kGranularity, 0)), end_(behind_ + kHeapBytes) {}

DevicePtr AddressSpace::reserve(uint64_t bytes, uint64_t alignment, DevicePtr hint) {
  const DevicePtr start = find_room(bytes, std::max(alignment, kGranularity), hint);
  const std::unique_lock lock(mutex_);
  reservations_.emplace(start, bytes);
  return start;
}

void AddressSpace::free(DevicePtr start, uint64_t bytes) {
  const std::unique_lock lock(mutex_);
  const auto found = reservations_.find(start);
  require(found != reservations_.end() && found->second == bytes, kInvalidValue);
  const auto mapped = mappings_.lower_bound(start);
  require(mapped == mappings_.end() || mapped->first >= start + bytes, kInvalidValue);
  reservations_.erase(found);
  munmap(reinterpret_cast<void*>(start), bytes);
}

std::optional<std::pair<DevicePtr, uint64_t>> AddressSpace::range_at(
    const std::map<DevicePtr, uint64_t>& ranges, DevicePtr address) const {
  auto found = ranges.upper_bound(address);
  if (found == ranges.begin()) return std::nullopt;
  --found;
  if (address - found->first >= found->second) return std::nullopt;
  return *found;
}

AddressSpace::Mappings::const_iterator AddressSpace::mapping_at(DevicePtr address) const {
  auto found = mappings_.upper_bound(address);
  if (found == mappings_.begin()) return mappings_.end();
  --found;
  return address - found->first < found->second.bytes ? found : mappings_.end();
}

void AddressSpace::map(DevicePtr start, uint64_t bytes, std::shared_ptr<Allocation> allocation) {
  const std::unique_lock lock(mutex_);
  const auto reservation = range_at(reservations_, start);
  require(reservation && start + bytes <= reservation->first + reservation->second, kInvalidValue);
  const auto next = mappings_.lower_bound(start);
  require(mapping_at(start) == mappings_.end(), kInvalidValue);
  require(next == mappings_.end() || next->first >= start + bytes, kInvalidValue);
  mappings_.emplace(start, Mapping{bytes, std::move(allocation), {}, Origin::kMapped, ++buffers_});
}

DevicePtr AddressSpace::allocate(std::shared_ptr<Allocation> allocation, Origin origin,
                                 int reader) {
  const uint64_t bytes = allocation->bytes();
  const std::lock_guard heap(heap_mutex_);
  if (end_ - behind_ < bytes) {
    behind_ = find_room(std::max(bytes, kHeapBytes), kGranularity, 0);
    end_ = behind_ + std::max(bytes, kHeapBytes);
  }
  const std::unique_lock lock(mutex_);
  const auto again = freed_.find(bytes);
  const DevicePtr start = again == freed_.end() ? behind_ : again->second;
  if (again == freed_.end()) {
    behind_ += bytes;
  } else {
    freed_.erase(again);
  }
  mappings_.emplace(
      start,
      Mapping{bytes, std::move(allocation), {{reader, kAccessReadWrite}}, origin, ++buffers_});
  return start;
}

void AddressSpace::free_allocated(DevicePtr start, bool opened) {
  Mappings::node_type freed;  // after the lock
  const std::unique_lock lock(mutex_);
  const auto found = mappings_.find(start);
  require(found != mappings_.end() && found->second.origin != Origin::kMapped, kInvalidValue);
  require((found->second.origin == Origin::kOpened) == opened, kInvalidValue);
  freed_.emplace(found->second.bytes, start);
  freed = mappings_.extract(found);
}

// The mappings that fill the range exactly, without a gap.
std::vector<AddressSpace::Mappings::iterator> AddressSpace::whole_mappings(DevicePtr start,
                                                                           uint64_t bytes) {
  std::vector<Mappings::iterator> found;
  DevicePtr at = start;
  while (at < start + bytes) {
    const auto mapping = mappings_.find(at);
    require(mapping != mappings_.end() && mapping->second.origin == Origin::kMapped, kInvalidValue);
    found.push_back(mapping);
    at += mapping->second.bytes;
  }
  require(bytes > 0 && at == start + bytes, kInvalidValue);
  return found;
}

void AddressSpace::unmap(DevicePtr start, uint64_t bytes) {
  std::vector<std::shared_ptr<Allocation>> freed;  // after the lock
  const std::unique_lock lock(mutex_);
  for (const auto mapping : whole_mappings(start, bytes)) {
    freed.push_back(std::move(mapping->second.allocation));
    mappings_.erase(mapping);
  }
}

void AddressSpace::set_access(DevicePtr start, uint64_t bytes, const AccessDesc* rights,
                              size_t count) {
  const std::unique_lock lock(mutex_);
  const auto mappings = whole_mappings(start, bytes);
  for (size_t i = 0; i < count; ++i) {
    const int device = settings().devices[static_cast<size_t>(rights[i].location.id)];
    for (const auto mapping : mappings) {
      const int owner = mapping->second.allocation->device();
      const bool peers = owner == device || owner == kHost || settings().peers(owner, device);
      require(peers || rights[i].flags == kAccessNone, kPeerAccessUnsupported);
    }
    for (const auto mapping : mappings) mapping->second.access[device] = rights[i].flags;
  }
}

void AddressSpace::open_to_peer(int device, int owner) {
  const std::unique_lock lock(mutex_);
  peers_.emplace(device, owner);
}

int AddressSpace::access_of(const Mapping& mapping, int device) const {
  const auto right = mapping.access.find(device);
  if (right != mapping.access.end()) return right->second;
  const bool peer = mapping.origin == Origin::kAllocated &&
                    peers_.contains({device, mapping.allocation->device()});
  return peer ? kAccessReadWrite : kAccessNone;
}

int AddressSpace::access_of(DevicePtr address, int device) const {
  const std::shared_lock lock(mutex_);
  const auto mapping = mapping_at(address);
  return mapping == mappings_.end() ? kAccessNone : access_of(mapping->second, device);
}

void AddressSpace::register_host(DevicePtr start, uint64_t bytes) {
  const std::unique_lock lock(mutex_);
  require(!overlaps(registrations_, start, bytes), kHostMemoryAlreadyRegistered);
  require(!overlaps(reservations_, start, bytes) && is_host_memory(start, bytes), kInvalidValue);
  uint64_t pinned = bytes;
  for (const auto& [at, own] : registrations_) pinned += own;
  require(pinned <= settings().pinned_bytes, kOutOfMemory);
  registrations_.emplace(start, bytes);
}

void AddressSpace::unregister_host(DevicePtr start) {
  const std::unique_lock lock(mutex_);
  require(registrations_.erase(start) == 1, kHostMemoryNotRegistered);
}

PointerFacts AddressSpace::facts(DevicePtr address) const {
  const std::shared_lock lock(mutex_);
  if (const auto mapping = mapping_at(address); mapping != mappings_.end()) {
    const auto& [start, what] = *mapping;
    PointerFacts facts{Kind::kMapped, start,       what.bytes, what.allocation,
                       what.origin,   what.buffer, start,      what.bytes};
    const bool mapped = what.origin == Origin::kMapped;
    if (const auto range = range_at(reservations_, address); range && mapped) {
      std::tie(facts.range_start, facts.range_bytes) = *range;
    }
    return facts;
  }
  const auto as_a_whole = [](Kind kind, const auto& range) {
    const auto& [start, bytes] = range;
    return PointerFacts{kind, start, bytes, nullptr, Origin::kMapped, 0, start, bytes};
  };
  if (const auto range = range_at(reservations_, address)) {
    return as_a_whole(Kind::kReserved, *range);
  }
  if (const auto range = range_at(registrations_, address)) {
    return as_a_whole(Kind::kRegistered, *range);
  }
  return {};
}

bool AddressSpace::reachable(DevicePtr address, uint64_t bytes, int device, bool write) const {
  std::vector<Piece> found;
  return pieces(address, bytes, device, write, false, found) && found.size() == 1;
}

bool AddressSpace::pieces(DevicePtr address, uint64_t bytes, int device, bool write, bool host,
                          std::vector<Piece>& out) const {
  const std::shared_lock lock(mutex_);
  for (uint64_t done = 0; done < bytes;) {
    const DevicePtr at = address + done;
    const uint64_t left = bytes - done;
    uint64_t got = left;
    if (const auto mapping = mapping_at(at); mapping != mappings_.end()) {
      const auto& [start, what] = *mapping;
      const int needed = write ? kAccessReadWrite : kAccessRead;
      if ((access_of(what, device) & needed) != needed) return false;
      got = std::min<uint64_t>(left, start + what.bytes - at);
      out.push_back({what.allocation, what.allocation->data() + (at - start), got});
    } else if (const auto range = range_at(registrations_, at)) {
      got = std::min<uint64_t>(left, range->first + range->second - at);
      out.push_back({nullptr, reinterpret_cast<std::byte*>(at), got});
    } else if (host && !range_at(reservations_, at)) {
      out.push_back({nullptr, reinterpret_cast<std::byte*>(at), left});
    } else {
      return false;
    }
    done += got;
  }
  return true;
}

uint64_t AddressSpace::mappings() const {
  const std::shared_lock lock(mutex_);
  return mappings_.size();
}

uint64_t AddressSpace::reservations() const {
  const std::shared_lock lock(mutex_);
  return reservations_.size();
}

uint64_t AddressSpace::registrations() const {
  const std::shared_lock lock(mutex_);
  return registrations_.size();
}

AddressSpace& addresses() {
  static AddressSpace* const value = new AddressSpace;  // outlives the streams' threads
  return *value;
}

}  // namespace fakecuda
