#include "core/backend/cuda/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "core/backend/cuda/facts.h"
#include "core/backend/cuda/pointer_info.h"

namespace offcore::cuda {
namespace {

constexpr auto kLeaveLimit = std::chrono::seconds(2);
constexpr uint64_t kTrialBytes = 8192;   // of each rank's memory, for each rank: what it is sent
constexpr uint64_t kTrialSource = 4096;  // from here on: what it sends

CUmemAllocationProp properties(int ordinal) {
  return {.type = kMemoryPinned,
          .handle_types = kPosixDescriptor,
          .location = {.type = kLocationDevice, .id = ordinal}};
}

uint64_t granule(const CUmemAllocationProp& wanted) {
  size_t bytes = 0;
  check(Driver::get().cuMemGetAllocationGranularity(&bytes, &wanted, 0),
        "cuMemGetAllocationGranularity");
  return bytes;
}

// Pinned memory that nobody has. The driver takes it back only when the whole device is idle, and
// holds the caller until then: for ever where a program is armed or work waits for what never
// comes. So a thread gives it back, nobody waits long for that, and beside armed programs nothing
// is given back: whoever asks for as much gets it, as it is from then on.
class PinnedCache {
 public:
  struct PinnedBlock {
    void* data;
    uint64_t bytes;
    std::shared_ptr<const PrimaryContext> context;
    std::shared_ptr<void> owner = nullptr;  // null: this process maps it for itself
  };

  void keep(bool more) {
    std::unique_lock lock(mutex_);
    parked_ += more ? 1 : -1;
    if (parked_ == 0 && !blocks_.empty()) serve();
    // One that is on its way back is to be through before the program is armed.
    if (more) changed_.wait_for(lock, kLeaveLimit, [&] { return !leaving_; });
  }

  void give(PinnedBlock block) {
    std::unique_lock lock(mutex_);
    blocks_.push_back(std::move(block));
    // Where one has been late it waits for the device, and so would this one.
    if (parked_ > 0 || !serve() || late_) return;
    late_ = !changed_.wait_for(lock, kLeaveLimit, [&] { return blocks_.empty() && !leaving_; });
  }

  // Zeroed; null: there is none.
  void* take(const PrimaryContext& context, uint64_t bytes) {
    void* data = nullptr;
    {
      const std::scoped_lock lock(mutex_);
      const auto found =
          std::find_if(blocks_.begin(), blocks_.end(), [&](const PinnedBlock& block) {
            return !block.owner && block.bytes == bytes && block.context.get() == &context;
          });
      if (parked_ == 0 || found == blocks_.end()) return nullptr;
      data = found->data;
      blocks_.erase(found);
    }
    std::memset(data, 0, bytes);
    return data;
  }

 private:
  bool serve() {
    try {
      if (!started_) std::thread([this] { run(); }).detach();
      started_ = true;
    } catch (const std::system_error&) {  // no thread can be had: the memory stays
    }
    changed_.notify_all();
    return started_;
  }

  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return parked_ == 0 && !blocks_.empty(); });
      std::optional<PinnedBlock> block = std::move(blocks_.front());
      blocks_.pop_front();
      leaving_ = true;
      lock.unlock();
      try {
        const ContextGuard current(block->context->handle());
        check(Driver::get().cuMemHostUnregister(block->data), "cuMemHostUnregister");
        if (!block->owner) munmap(block->data, block->bytes);
      } catch (const Error&) {
        // The GPU has failed, or the driver is going. What is registered still stays mapped: its
        // addresses must be nobody else's.
        if (block->owner) keep_for_good(std::move(block->owner));
      }
      block.reset();
      lock.lock();
      leaving_ = false;
      late_ = late_ && !blocks_.empty();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  size_t parked_ = 0;
  bool started_ = false;
  bool leaving_ = false;  // one is being given back
  bool late_ = false;
  std::deque<PinnedBlock> blocks_;
};

PinnedCache& pinned_cache() {
  static PinnedCache* const value =
      new PinnedCache;  // memory may be let go of while the process ends
  return *value;
}

}  // namespace

std::shared_ptr<Allocation> Allocation::create(const GpuContext& gpu, uint64_t bytes,
                                               bool exported) {
  const Driver& driver = Driver::get();
  const ContextGuard current = gpu.current();
  const CUmemAllocationProp wanted = properties(gpu.device());
  if (bytes > uint64_t{1} << 46) fail(Code::memory, bytes, " bytes are more than any GPU has");
  std::shared_ptr<Allocation> part(new Allocation(gpu.context(), rounded(bytes, granule(wanted))));
  const CUresult result = driver.cuMemCreate(&part->handle_, part->bytes_, &wanted, 0);
  if (result == kOutOfMemory) {
    size_t free = 0;
    size_t total = 0;
    driver.cuMemGetInfo(&free, &total);
    fail(Code::memory, "cannot allocate ", part->bytes_, " bytes on device ", gpu.device(), ": ",
         free, " of ", total, " bytes are free; use smaller windows or free other memory");
  }
  check(result, "cuMemCreate");
  if (exported) part->fd_ = part->shared();
  return part;
}

std::shared_ptr<Allocation> Allocation::create_host(const GpuContext& gpu, uint64_t bytes) {
  const ContextGuard current = gpu.current();
  const CUmemAllocationProp wanted{
      .type = kMemoryPinned,
      .location = {.type = kLocationNumaNode,
                   .id = std::max(0, numa_node(pci_address(gpu.device())))}};
  std::shared_ptr<Allocation> part(new Allocation(gpu.context(), rounded(bytes, granule(wanted))));
  check(Driver::get().cuMemCreate(&part->handle_, part->bytes_, &wanted, 0),
        "cuMemCreate of host memory");
  return part;
}

std::shared_ptr<Allocation> Allocation::import(std::shared_ptr<const PrimaryContext> context,
                                               uint64_t bytes, int fd) {
  Descriptor owned(fd);
  const ContextGuard current(context->handle());
  const uint64_t whole = rounded(bytes, granule(properties(context->ordinal())));
  std::shared_ptr<Allocation> part(new Allocation(std::move(context), whole));
  check(Driver::get().cuMemImportFromShareableHandle(
            &part->handle_, reinterpret_cast<void*>(static_cast<intptr_t>(fd)), kPosixDescriptor),
        "cuMemImportFromShareableHandle");
  return part;
}

std::shared_ptr<Allocation> Allocation::find(const GpuContext& gpu, CUdeviceptr address,
                                             CUdeviceptr& begin) {
  const Driver& driver = Driver::get();
  const ContextGuard current = gpu.current();
  CUmemHandle handle = 0;
  const CUresult result =
      driver.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(address));
  if (result != kSuccess) return nullptr;
  std::shared_ptr<Allocation> found(new Allocation(gpu.context(), 0));
  found->handle_ = handle;
  size_t bytes = 0;
  check(driver.cuMemGetAddressRange(&begin, &bytes, address), "cuMemGetAddressRange");
  found->bytes_ = bytes;
  return found;
}

// As long as this one holds its handle no other memory has that.
bool Allocation::lies_at(CUdeviceptr address) const {
  const Driver& driver = Driver::get();
  const ContextGuard current(context_->handle());
  CUmemHandle handle = 0;
  if (driver.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(address)) != kSuccess) {
    return false;
  }
  check(driver.cuMemRelease(handle), "cuMemRelease");
  return handle == handle_;
}

Descriptor Allocation::shared() const {
  const ContextGuard current(context_->handle());
  int fd = -1;
  const CUresult result =
      Driver::get().cuMemExportToShareableHandle(&fd, handle_, kPosixDescriptor, 0);
  if (refused(result)) {
    fail(Code::unsupported,
         "the memory was created without a POSIX file descriptor "
         "(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), so that other processes cannot map it");
  }
  check(result, "cuMemExportToShareableHandle");
  return Descriptor(fd);
}

Allocation::~Allocation() {
  const CaptureGuard relaxed;
  if (handle_ != 0) Driver::get().cuMemRelease(handle_);
}

AddressRange::AddressRange(std::shared_ptr<const PrimaryContext> context, uint64_t bytes)
    : context_(std::move(context)), bytes_(bytes) {
  const ContextGuard current(context_->handle());
  check(Driver::get().cuMemAddressReserve(&base_, bytes_, 0, 0, 0),
        cat("cuMemAddressReserve of ", bytes_, " bytes"));
}

AddressRange::~AddressRange() {
  const ContextGuard current(context_->handle());
  for (const auto& [offset, part] : mapped_) {
    Driver::get().cuMemUnmap(base_ + offset, part->bytes());
  }
  Driver::get().cuMemAddressFree(base_, bytes_);
}

void AddressRange::map(uint64_t offset, std::shared_ptr<const Allocation> part) {
  const ContextGuard current(context_->handle());
  check(Driver::get().cuMemMap(base_ + offset, part->bytes(), 0, part->handle(), 0), "cuMemMap");
  mapped_.emplace(offset, std::move(part));
}

void AddressRange::map(uint64_t offset, const RankMemory& memory) {
  for (const auto& allocation : memory.allocations) {
    map(offset, allocation);
    offset += allocation->bytes();
  }
}

void AddressRange::open(std::span<const std::shared_ptr<LocalGpu>> devices) {
  std::set<int> ordinals;
  for (const auto& device : devices) ordinals.insert(device->ordinal());
  open(std::vector(ordinals.begin(), ordinals.end()));
}

void AddressRange::open(std::span<const int> ordinals, uint64_t from) {
  std::vector<CUmemAccessDesc> access;
  for (int ordinal : ordinals) {
    access.push_back(
        {.location = {.type = kLocationDevice, .id = ordinal}, .flags = kAccessReadWrite});
  }
  const ContextGuard current(context_->handle());
  for (const auto& [offset, part] : mapped_) {
    if (offset < from) continue;
    check(Driver::get().cuMemSetAccess(base_ + offset, part->bytes(), access.data(), access.size()),
          "cuMemSetAccess (have the GPUs peer access to each other?)");
  }
}

void AddressRange::unmap() {
  const ContextGuard current(context_->handle());
  for (const auto& [offset, part] : mapped_) {
    check(Driver::get().cuMemUnmap(base_ + offset, part->bytes()), "cuMemUnmap");
  }
  mapped_.clear();
}

void AddressRange::unmap(uint64_t offset) {
  const auto found = mapped_.find(offset);
  const ContextGuard current(context_->handle());
  check(Driver::get().cuMemUnmap(base_ + offset, found->second->bytes()), "cuMemUnmap");
  mapped_.erase(found);
}

std::optional<uint64_t> AddressRange::room(uint64_t bytes) const {
  uint64_t free = 0;
  for (const auto& [offset, part] : mapped_) {
    if (offset - free >= bytes) return free;
    free = offset + part->bytes();
  }
  return bytes_ - free >= bytes ? std::optional(free) : std::nullopt;
}

uint64_t RankMemory::bytes() const {
  uint64_t bytes = 0;
  for (const auto& allocation : allocations) bytes += allocation->bytes();
  return bytes;
}

StrideLayout StrideLayout::of(std::span<const RankMemory> parts) {
  StrideLayout layout;
  for (const RankMemory& part : parts) {
    layout.lead = std::max(layout.lead, part.head);
    layout.possible = layout.possible && part.head % kGranule == parts[0].head % kGranule;
  }
  for (const RankMemory& part : parts) {
    layout.extent = std::max(layout.extent, layout.lead - part.head + part.bytes());
  }
  return layout;
}

PeerMapping::PeerMapping(std::vector<RankMemory> parts,
                         std::span<const std::shared_ptr<LocalGpu>> local)
    : parts_(std::move(parts)),
      layout_(StrideLayout::of(parts_)),
      stride_(layout_.stride()),
      laps_(local.front()->gpu().context(), 2 * parts_.size() * stride_) {
  for (const auto& device : local) {
    repeated_[device->rank()] =
        std::make_unique<AddressRange>(device->gpu().context(), parts_.size() * stride_);
  }
  map(local);
}

void PeerMapping::map(std::span<const std::shared_ptr<LocalGpu>> local) {
  const auto place = [&](uint32_t k, const RankMemory& part) {
    return k * stride_ + layout_.lead - part.head;
  };
  for (uint32_t k = 0; k < 2u * ranks(); ++k) {
    const RankMemory& part = parts_[k % ranks()];
    laps_.map(place(k, part), part);
  }
  laps_.open(local);
  for (const auto& device : local) {
    AddressRange& range = *repeated_[device->rank()];
    const RankMemory& own = parts_[device->rank()];
    for (Rank k = 0; k < ranks(); ++k) range.map(place(k, own), own);
    range.open({&device, 1});
  }
  const ContextGuard current = local.front()->current();
  ordinals_.assign(ranks(), -1);
  for (Rank rank = 0; rank < ranks(); ++rank) {
    Driver::get().cuPointerGetAttribute(&ordinals_[rank], kPointerOrdinal, part(rank));
  }
}

std::shared_ptr<const Allocation> PeerMapping::part_elsewhere(int ordinal) const {
  for (Rank rank = 0; rank < ranks(); ++rank) {
    if (ordinals_[rank] >= 0 && ordinals_[rank] != ordinal) return parts_[rank].allocations[0];
  }
  return nullptr;
}

CUdeviceptr PeerMapping::repeated(Rank rank) const {
  const auto found = repeated_.find(rank);
  return found == repeated_.end() ? 0 : found->second->base() + layout_.lead;
}

bool PeerMapping::try_strided(std::span<const std::shared_ptr<LocalGpu>> local) const {
  const uint32_t peers = ranks() - 1u;
  if (peers < 2) return true;  // no copy has more than one row
  const uint64_t chunk = (kTrialBytes - kTrialSource) / ranks() / 4 * 4;
  if (ranks() * kTrialBytes > layout_.extent || chunk == 0) return false;
  bool works = true;
  for (const auto& device : local) {
    const Rank own = device->rank();
    const uint64_t at = own * kTrialBytes;
    std::vector<uint8_t> data(ranks() * chunk);
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(1 + i * 7 + i / 251);
    const uint64_t source = at + kTrialSource;
    device->gpu().copy(reinterpret_cast<void*>(part(own) + source), data.data(), data.size());
    const StridedCopy fan{.dst = part(own + 1u) + at,
                          .dst_pitch = stride_,
                          .src = part(own) + source,
                          .src_pitch = chunk,
                          .bytes = chunk,
                          .rows = peers};
    StridedCopy bcst = fan;
    bcst.src = repeated(own) + source;
    bcst.src_pitch = stride_;
    for (const bool same : {false, true}) {
      if (!same && stride_ > kPitchMax)
        continue;  // a copy of such rows has wide steps on both sides
      works = device->gpu().copy(same ? bcst : fan) && works;
      for (uint32_t row = 0; row < peers; ++row) {
        std::vector<uint8_t> got(chunk);
        device->gpu().copy(got.data(), reinterpret_cast<void*>(fan.dst + row * stride_), chunk);
        const auto sent = data.begin() + static_cast<ptrdiff_t>(same ? 0 : row * chunk);
        works = works && std::equal(got.begin(), got.end(), sent);
      }
    }
    const std::vector<uint8_t> zeros(data.size());
    device->gpu().copy(reinterpret_cast<void*>(part(own) + source), zeros.data(), zeros.size());
    for (uint32_t row = 0; row < peers; ++row) {
      device->gpu().copy(reinterpret_cast<void*>(fan.dst + row * stride_), zeros.data(), chunk);
    }
  }
  return works;
}

void PeerMapping::blank(std::span<const std::shared_ptr<LocalGpu>> local) {
  // One allocation stands in for all parts.
  const std::shared_ptr<const Allocation> blank =
      Allocation::create(local.front()->gpu(), layout_.extent, false);
  laps_.unmap();
  for (auto& [rank, range] : repeated_) range->unmap();
  std::fill(parts_.begin(), parts_.end(), RankMemory{{blank}, layout_.lead});
  map(local);
}

void MappingTable::add(const PeerMapping& mapping) {
  const std::unique_lock lock(mutex_);
  mappings_[mapping.base()] = &mapping;
}

void MappingTable::remove(const PeerMapping& mapping) {
  const std::unique_lock lock(mutex_);
  mappings_.erase(mapping.base());
}

const PeerMapping* MappingTable::find(const void* address) const {
  const auto at = reinterpret_cast<CUdeviceptr>(address);
  const std::shared_lock lock(mutex_);
  auto found = mappings_.upper_bound(at);
  if (found == mappings_.begin()) return nullptr;
  const PeerMapping* mapping = (--found)->second;
  return at - mapping->base() < mapping->bytes() ? mapping : nullptr;
}

std::shared_ptr<void> allocate_pinned(std::shared_ptr<const PrimaryContext> context,
                                      uint64_t bytes) {
  const uint64_t whole = rounded(bytes, static_cast<uint64_t>(sysconf(_SC_PAGESIZE)));
  const auto owned = [&](void* pinned) {
    return std::shared_ptr<void>(
        pinned, [context, whole](void* own) { pinned_cache().give({own, whole, context}); });
  };
  if (void* spare = pinned_cache().take(*context, whole); spare != nullptr) return owned(spare);
  void* data = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) fail_errno(Code::memory, cat("cannot map ", whole, " bytes"));
  // Fewer pages to register, and for the GPU to look up. A kernel without large pages refuses.
  madvise(data, whole, MADV_HUGEPAGE);
  // Near the GPU, where the kernel lets us: a container may forbid it, and doctor says so.
  const int node = numa_node(pci_address(context->ordinal()));
  if (node >= 0) prefer_node(data, whole, node);
  const ContextGuard current(context->handle());
  const CUresult result =
      Driver::get().cuMemHostRegister(data, whole, kHostPortable | kHostDeviceMap);
  if (result != kSuccess) {
    munmap(data, whole);
    check(result, cat("cuMemHostRegister of ", whole, " bytes"));
  }
  return owned(data);
}

std::shared_ptr<void> register_pinned(std::shared_ptr<const PrimaryContext> context,
                                      std::byte* data, uint64_t bytes, std::shared_ptr<void> keep) {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t before = reinterpret_cast<uint64_t>(data) % page;
  std::byte* const first = data - before;
  const uint64_t whole = rounded(before + bytes, page);
  const ContextGuard current(context->handle());
  const CUresult result =
      Driver::get().cuMemHostRegister(first, whole, kHostPortable | kHostDeviceMap);
  if (result == kAlreadyRegistered) {
    for (const std::byte* byte : {data, data + bytes - 1}) {
      const auto at = reinterpret_cast<uint64_t>(byte);
      if (attribute_of<int>(at, kPointerMemoryType) == kHostMemoryType) continue;
      fail(Code::driver, "a part of ", bytes,
           " bytes of host memory is registered already: registrations are of whole pages");
    }
    return keep;
  }
  check(result, cat("cuMemHostRegister of ", whole, " bytes"));
  return {first, [context, whole, keep = std::move(keep)](void* own) {
            pinned_cache().give({own, whole, context, keep});
          }};
}

void keep_pinned(bool more) { pinned_cache().keep(more); }

}  // namespace offcore::cuda
