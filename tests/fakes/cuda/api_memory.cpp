// Entry points for memory: virtual memory management, registered host memory, facts on pointers.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "tests/fakes/cuda/memory.h"
#include "tests/fakes/cuda/settings.h"
#include "tests/fakes/cuda/stream.h"

namespace fakecuda {
namespace {

// The handles of physical memory: each as often as it was given out or retained, and the same one
// again for memory that is mapped but that nobody holds any more.
class Handles {
 public:
  MemoryHandle add(std::shared_ptr<Allocation> allocation) {
    const std::lock_guard lock(mutex_);
    next_ += 16;
    allocation->handle = next_;
    held_.emplace(next_, Held{std::move(allocation), 1});
    return next_;
  }
  MemoryHandle retain(std::shared_ptr<Allocation> allocation) {
    const std::lock_guard lock(mutex_);
    const MemoryHandle handle = allocation->handle;
    ++held_.try_emplace(handle, Held{std::move(allocation), 0}).first->second.times;
    return handle;
  }
  std::shared_ptr<Allocation> find(MemoryHandle handle) const {
    const std::lock_guard lock(mutex_);
    const auto found = held_.find(handle);
    require(found != held_.end(), kInvalidValue);
    return found->second.allocation;
  }
  void release(MemoryHandle handle) {
    std::shared_ptr<Allocation> last;  // goes without the mutex
    const std::lock_guard lock(mutex_);
    const auto found = held_.find(handle);
    require(found != held_.end(), kInvalidValue);
    if (--found->second.times > 0) return;
    last = std::move(found->second.allocation);
    held_.erase(found);
  }

 private:
  struct Held {
    std::shared_ptr<Allocation> allocation;
    uint64_t times;
  };
  mutable std::mutex mutex_;
  std::map<MemoryHandle, Held> held_;
  MemoryHandle next_ = MemoryHandle{4} << 40;
};

Handles& allocations() {
  static auto* const value = new Handles;
  return *value;
}

DevicePtr allocate(size_t bytes, Origin origin) {
  const int device = current_context()->physical;
  const uint64_t whole = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  return addresses().allocate(Allocation::create(device, whole, kHandleNone), origin, device);
}

// What a handle of IPC says; any process of the machine may open it.
struct IpcName {
  uint64_t magic;
  int64_t process;
  int64_t fd;
  uint64_t serial;
};
static_assert(sizeof(IpcName) <= sizeof(IpcHandle));
constexpr uint64_t kIpcMagic = 0x6675'6461'6970'6331;

// What this process has opened, by memory and device.
struct Opened {
  std::mutex mutex;
  std::map<std::pair<uint64_t, int>, std::pair<DevicePtr, uint64_t>> times;
};
Opened& opened() {
  static auto* const value = new Opened;
  return *value;
}

std::shared_ptr<Allocation> open_named(const IpcName& name) {
  require(name.magic == kIpcMagic, kInvalidValue);
  const std::string path =
      "/proc/" + std::to_string(name.process) + "/fd/" + std::to_string(name.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  require(fd >= 0, kInvalidValue);  // its owner has freed it
  try {
    auto allocation = Allocation::import(fd);
    close(fd);
    require(allocation->serial() == name.serial, kInvalidValue);
    return allocation;
  } catch (const Failure&) {
    close(fd);
    throw;
  }
}

// What memory can be made of: pinned memory of a visible device, private or shared by descriptor,
// or private one of the host's only NUMA node.
int checked_device(const AllocationProp* prop) {
  require(prop != nullptr && prop->type == 1, kInvalidValue);
  if (prop->location.type == kLocationNumaNode) {
    require(prop->location.id == 0, kInvalidDevice);
    require(prop->requested_handle_types == kHandleNone, kNotSupported);
    return kHost;
  }
  require(prop->location.type == kLocationDevice, kNotSupported);
  const auto& devices = settings().devices;
  const int id = prop->location.id;
  require(id >= 0 && static_cast<size_t>(id) < devices.size(), kInvalidDevice);
  const int types = prop->requested_handle_types;
  require(types == kHandleNone || types == kHandleFd, kNotSupported);
  return devices[static_cast<size_t>(id)];
}

bool is_multiple(uint64_t value) { return value % kGranularity == 0; }

// Large ranges lie below all other memory (H200, driver 580).
DevicePtr low_hint(uint64_t bytes) {
  constexpr uint64_t kLarge = uint64_t{1} << 30;
  static std::atomic<DevicePtr> next{uint64_t{12} << 30};
  return bytes < kLarge ? 0 : next.fetch_add(bytes + kLarge);
}

}  // namespace

FAKE_API Result cuMemGetAllocationGranularity(size_t* bytes, const AllocationProp* prop,
                                              int option) {
  return enter("cuMemGetAllocationGranularity", [&] {
    require(bytes != nullptr && (option == 0 || option == 1), kInvalidValue);
    checked_device(prop);
    *bytes = kGranularity;
  });
}

FAKE_API Result cuMemCreate(MemoryHandle* handle, size_t bytes, const AllocationProp* prop,
                            unsigned long long flags) {
  return enter("cuMemCreate", [&] {
    require(handle != nullptr && flags == 0, kInvalidValue);
    const int device = checked_device(prop);
    require(bytes > 0 && is_multiple(bytes), kInvalidValue);
    *handle = allocations().add(Allocation::create(device, bytes, prop->requested_handle_types));
  });
}

FAKE_API Result cuMemRelease(MemoryHandle handle) {
  return enter("cuMemRelease", [&] { allocations().release(handle); });
}

FAKE_API Result cuMemAlloc_v2(DevicePtr* start, size_t bytes) {
  return enter("cuMemAlloc", [&] {
    require(start != nullptr && bytes > 0, kInvalidValue);
    *start = allocate(bytes, Origin::kAllocated);
  });
}

FAKE_API Result cuMemAllocManaged(DevicePtr* start, size_t bytes, unsigned flags) {
  return enter("cuMemAllocManaged", [&] {
    require(start != nullptr && bytes > 0 && flags == 1, kInvalidValue);
    *start = allocate(bytes, Origin::kManaged);
  });
}

// Of the device's default pool, which is its own and no other process's.
FAKE_API Result cuMemAllocAsync(DevicePtr* start, size_t bytes, StreamHandle) {
  return enter("cuMemAllocAsync", [&] {
    require(start != nullptr && bytes > 0, kInvalidValue);
    *start = allocate(bytes, Origin::kPool);
  });
}

FAKE_API Result cuMemGetAddressRange_v2(DevicePtr* start, size_t* bytes, DevicePtr address) {
  return enter("cuMemGetAddressRange", [&] {
    current_context();
    const auto facts = addresses().facts(address);
    require(facts.kind == Kind::kMapped, kNotFound);
    if (start != nullptr) *start = facts.start;
    if (bytes != nullptr) *bytes = facts.bytes;
  });
}

FAKE_API Result cuMemRetainAllocationHandle(MemoryHandle* handle, void* address) {
  return enter("cuMemRetainAllocationHandle", [&] {
    const auto facts = addresses().facts(reinterpret_cast<DevicePtr>(address));
    const bool mapped = facts.kind == Kind::kMapped && facts.origin == Origin::kMapped;
    require(handle != nullptr && mapped, kInvalidValue);
    *handle = allocations().retain(facts.allocation);
  });
}

// Of the beginning of what cuMemAlloc gave, and of nothing else.
FAKE_API Result cuIpcGetMemHandle(IpcHandle* handle, DevicePtr address) {
  return enter("cuIpcGetMemHandle", [&] {
    current_context();
    const auto facts = addresses().facts(address);
    require(handle != nullptr && facts.kind == Kind::kMapped, kInvalidValue);
    require(facts.origin == Origin::kAllocated && facts.start == address, kInvalidValue);
    const IpcName name{kIpcMagic, getpid(), facts.allocation->fd(), facts.allocation->serial()};
    std::memcpy(handle->bytes, &name, sizeof name);
  });
}

FAKE_API Result cuIpcOpenMemHandle_v2(DevicePtr* start, IpcHandle handle, unsigned flags) {
  return enter("cuIpcOpenMemHandle", [&] {
    const int device = current_context()->physical;
    require(start != nullptr && flags == 1, kInvalidValue);
    IpcName name{};
    std::memcpy(&name, handle.bytes, sizeof name);
    require(name.process != getpid(), kInvalidContext);  // only in another process
    const std::lock_guard lock(opened().mutex);
    auto [known, first] = opened().times.try_emplace({name.serial, device});
    if (first) {
      try {
        auto allocation = open_named(name);
        const int owner = allocation->device();
        require(owner == device || settings().peers(owner, device), kPeerAccessUnsupported);
        known->second = {addresses().allocate(std::move(allocation), Origin::kOpened, device), 0};
      } catch (const Failure&) {
        opened().times.erase(known);
        throw;
      }
    }
    ++known->second.second;
    *start = known->second.first;
  });
}

FAKE_API Result cuIpcCloseMemHandle(DevicePtr start) {
  return enter("cuIpcCloseMemHandle", [&] {
    const std::lock_guard lock(opened().mutex);
    auto& times = opened().times;
    const auto found = std::find_if(times.begin(), times.end(),
                                    [&](const auto& entry) { return entry.second.first == start; });
    require(found != times.end(), kInvalidValue);
    if (--found->second.second > 0) return;
    times.erase(found);
    addresses().free_allocated(start, true);
  });
}

FAKE_API Result cuMemFree_v2(DevicePtr start) {
  return enter("cuMemFree", [&] { addresses().free_allocated(start); });
}

FAKE_API Result cuMemAddressReserve(DevicePtr* start, size_t bytes, size_t alignment,
                                    DevicePtr hint, unsigned long long flags) {
  return enter("cuMemAddressReserve", [&] {
    require(start != nullptr && flags == 0, kInvalidValue);
    require(bytes > 0 && is_multiple(bytes), kInvalidValue);
    require(alignment == 0 || std::has_single_bit(alignment), kInvalidValue);
    *start = addresses().reserve(bytes, alignment, hint != 0 ? hint : low_hint(bytes));
  });
}

FAKE_API Result cuMemAddressFree(DevicePtr start, size_t bytes) {
  return enter("cuMemAddressFree", [&] { addresses().free(start, bytes); });
}

FAKE_API Result cuMemMap(DevicePtr start, size_t bytes, size_t offset, MemoryHandle handle,
                         unsigned long long flags) {
  return enter("cuMemMap", [&] {
    require(flags == 0 && offset == 0 && bytes > 0, kInvalidValue);
    require(is_multiple(start) && is_multiple(bytes), kInvalidValue);
    auto allocation = allocations().find(handle);
    require(bytes <= allocation->bytes(), kInvalidValue);
    addresses().map(start, bytes, std::move(allocation));
  });
}

FAKE_API Result cuMemUnmap(DevicePtr start, size_t bytes) {
  return enter("cuMemUnmap", [&] { addresses().unmap(start, bytes); });
}

FAKE_API Result cuMemSetAccess(DevicePtr start, size_t bytes, const AccessDesc* rights,
                               size_t count) {
  return enter("cuMemSetAccess", [&] {
    require(rights != nullptr && count > 0, kInvalidValue);
    for (size_t i = 0; i < count; ++i) {
      const auto& [location, flags] = rights[i];
      require(location.type == kLocationDevice, kInvalidValue);
      const auto visible = static_cast<int>(settings().devices.size());
      require(location.id >= 0 && location.id < visible, kInvalidDevice);
      require(flags == kAccessNone || flags == kAccessRead || flags == kAccessReadWrite,
              kInvalidValue);
    }
    addresses().set_access(start, bytes, rights, count);
  });
}

FAKE_API Result cuMemExportToShareableHandle(void* shared, MemoryHandle handle, int type,
                                             unsigned long long flags) {
  return enter("cuMemExportToShareableHandle", [&] {
    require(shared != nullptr && flags == 0, kInvalidValue);
    const auto allocation = allocations().find(handle);
    require(type == kHandleFd && (allocation->handle_types() & kHandleFd), kInvalidValue);
    *static_cast<int*>(shared) = allocation->duplicate_fd();
  });
}

FAKE_API Result cuMemImportFromShareableHandle(MemoryHandle* handle, void* shared, int type) {
  return enter("cuMemImportFromShareableHandle", [&] {
    require(handle != nullptr && type == kHandleFd, kInvalidValue);
    const auto fd = static_cast<int>(reinterpret_cast<uintptr_t>(shared));
    *handle = allocations().add(Allocation::import(fd));
  });
}

FAKE_API Result cuMemHostRegister_v2(void* start, size_t bytes, unsigned flags) {
  return enter("cuMemHostRegister", [&] {
    current_context();
    require(start != nullptr && bytes > 0 && flags < 16, kInvalidValue);
    addresses().register_host(reinterpret_cast<DevicePtr>(start), bytes);
  });
}

FAKE_API Result cuMemHostUnregister(void* start) {
  return enter("cuMemHostUnregister", [&] {
    const auto context = current_context();
    require(start != nullptr, kInvalidValue);
    // As the driver does (2 x H200, driver 580): it returns once the whole device is idle.
    for (const auto& stream : streams().all()) {
      if (stream->context() != context) continue;
      try {
        stream->synchronize();
      } catch (const Failure&) {  // it is destroyed just now
      }
    }
    addresses().unregister_host(reinterpret_cast<DevicePtr>(start));
  });
}

FAKE_API Result cuMemHostGetDevicePointer_v2(DevicePtr* device, void* host, unsigned flags) {
  return enter("cuMemHostGetDevicePointer", [&] {
    current_context();
    require(device != nullptr && flags == 0, kInvalidValue);
    const auto address = reinterpret_cast<DevicePtr>(host);
    require(addresses().facts(address).kind == Kind::kRegistered, kInvalidValue);
    *device = address;
  });
}

FAKE_API Result cuPointerGetAttribute(void* value, int attribute, DevicePtr address) {
  return enter("cuPointerGetAttribute", [&] {
    current_context();
    require(value != nullptr, kInvalidValue);
    const auto facts = addresses().facts(address);
    const bool device = facts.kind == Kind::kMapped;
    require(device || facts.kind == Kind::kRegistered, kInvalidValue);
    const auto& devices = settings().devices;
    const auto ordinal = [&] {
      if (!device) return 0;
      for (size_t i = 0; i < devices.size(); ++i) {
        if (devices[i] == facts.allocation->device()) return static_cast<int>(i);
      }
      return -1;
    };
    switch (attribute) {
      case 2:  // memory type
        *static_cast<int*>(value) = device ? kMemoryDevice : kMemoryHost;
        return;
      case 3:  // device pointer
        *static_cast<DevicePtr*>(value) = address;
        return;
      case 4:  // host pointer
        require(!device, kInvalidValue);
        *static_cast<DevicePtr*>(value) = address;
        return;
      case 7:  // the buffer's number
        *static_cast<uint64_t*>(value) = facts.buffer;
        return;
      case 8:  // managed
        *static_cast<unsigned*>(value) = device && facts.origin == Origin::kManaged;
        return;
      case 9:  // device ordinal
        *static_cast<int*>(value) = ordinal();
        return;
      case 10:  // as cuMemAlloc gives it
        *static_cast<int*>(value) = device && facts.origin == Origin::kAllocated;
        return;
      case 11:  // start of the range
        *static_cast<DevicePtr*>(value) = facts.range_start;
        return;
      case 12:  // its size
        *static_cast<size_t*>(value) = facts.range_bytes;
        return;
      case 13:  // mapped
        *static_cast<unsigned*>(value) = 1;
        return;
      case 14:  // kinds of handles that can be exported
        *static_cast<uint64_t*>(value) =
            device ? static_cast<uint64_t>(facts.allocation->handle_types()) : 0;
        return;
      case 16:  // what the current device may do there
        *static_cast<int*>(value) = addresses().access_of(address, current_context()->physical);
        return;
      default:
        throw Failure{kNotSupported};
    }
  });
}

namespace {

// Memory as a kernel of a test sees it: through the table of mappings, or the host's.
std::byte* seen_by_kernel(DevicePtr address, uint64_t bytes) {
  const auto facts = addresses().facts(address);
  if (facts.kind == Kind::kRegistered) return reinterpret_cast<std::byte*>(address);
  if (facts.kind != Kind::kMapped) return nullptr;
  const uint64_t offset = address - facts.start;
  return offset + bytes <= facts.bytes ? facts.allocation->data() + offset : nullptr;
}

void tell_changed(DevicePtr address) {
  if (const auto allocation = addresses().facts(address).allocation) allocation->changed();
}

}  // namespace

// What a running kernel would do to a word, or the CPU to one of registered host memory.
FAKE_API int fakecuda_store32(DevicePtr address, uint32_t value) {
  std::byte* const word = seen_by_kernel(address, 4);
  if (!word) return -1;
  __atomic_store_n(reinterpret_cast<uint32_t*>(word), value, __ATOMIC_RELEASE);
  tell_changed(address);
  return 0;
}

// Where the CPU finds what a running kernel would reach there: device memory of one allocation.
// Whoever stores by that wakes no stream that waits for it, but by fakecuda_changed.
FAKE_API void* fakecuda_memory(DevicePtr address, uint64_t bytes) {
  return seen_by_kernel(address, bytes);
}

FAKE_API int fakecuda_changed(DevicePtr address) {
  if (!seen_by_kernel(address, 1)) return -1;
  tell_changed(address);
  return 0;
}

FAKE_API int fakecuda_load32(DevicePtr address, uint32_t* value) {
  std::byte* const word = seen_by_kernel(address, 4);
  if (!word) return -1;
  *value = __atomic_load_n(reinterpret_cast<uint32_t*>(word), __ATOMIC_ACQUIRE);
  return 0;
}

}  // namespace fakecuda
