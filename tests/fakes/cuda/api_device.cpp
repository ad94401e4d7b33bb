// Entry points for the driver, its devices and their primary contexts.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "tests/fakes/cuda/graph.h"
#include "tests/fakes/cuda/memory.h"
#include "tests/fakes/cuda/settings.h"
#include "tests/fakes/cuda/stream.h"

namespace fakecuda {
namespace {

struct Primary {
  std::shared_ptr<Context> context;
  int retained = 0;
};

struct Primaries {
  std::mutex mutex;
  std::map<Device, Primary> by_device;
};

Primaries& primaries() {
  static Primaries* const value = new Primaries;
  return *value;
}

std::vector<std::shared_ptr<Context>>& context_stack() {
  static thread_local std::vector<std::shared_ptr<Context>> stack;
  return stack;
}

int physical(Device device) {
  const auto& devices = settings().devices;
  require(device >= 0 && static_cast<size_t>(device) < devices.size(), kInvalidDevice);
  return devices[static_cast<size_t>(device)];
}

struct Attribute {
  int number, value;
};

// What an H200 answers, as far as a user of its copy engines may ask.
constexpr Attribute kAttributes[] = {
    {1, 1024},                  // threads in a block
    {10, 32},                   // threads in a warp
    {11, 2147483647},           // pitch
    {15, 1},                    // copies overlap kernels
    {16, 132},                  // multiprocessors
    {18, 0},                    // integrated
    {19, 1},                    // maps host memory
    {20, 0},                    // compute mode
    {31, 1},                    // concurrent kernels
    {39, 2048},                 // threads of a multiprocessor
    {40, 3},                    // asynchronous engines
    {41, 1},                    // unified addressing
    {75, 9},                    // compute capability
    {76, 0},          {78, 1},  // stream priorities
    {83, 1},                    // managed memory
    {86, 0},                    // native host atomics
    {88, 0},                    // pageable memory access
    {89, 1},                    // concurrent managed access
    {91, 1},                    // host pointers work for registered memory
    {92, 0},                    // stream memory operations, first version
    {98, 0},                    // can flush remote writes
    {99, 1},                    // host registration
    {102, 1},                   // virtual memory management
    {103, 1},                   // POSIX file descriptors
    {116, 1},                   // GPUDirect RDMA
    {117, 1},                   // its flushing
    {118, 200},                 // its ordering
    {122, 1},                   // 64-bit stream memory operations
    {123, 1},                   // the wait that negates
    {124, 1},                   // dma-buf
    {128, 0},                   // fabric handles
    {132, 0},                   // multicast
    {134, 0},                   // host NUMA node
};

Uuid uuid_of(int device, bool instance) {
  Uuid out{};
  std::snprintf(reinterpret_cast<char*>(out.bytes), sizeof out.bytes, "standin-%s-%03d",
                instance ? "mig" : "gpu", device);
  return out;
}

std::shared_ptr<Context> make_context(Device device) {
  auto context = std::make_shared<Context>();
  context->device = device;
  context->physical = physical(device);
  context->handle = contexts().add(context);
  context->legacy = std::make_shared<Stream>(context, 0, true);
  return context;
}

void destroy_context(Context& context) {
  context.fail(kContextIsDestroyed);
  contexts().remove(context.handle);
  const auto of_context = [&](const auto& owner) { return owner.get() == &context; };
  streams().remove_if([&](Stream& stream) {
    if (!of_context(stream.context())) return false;
    stream.close();
    return true;
  });
  events().remove_if([&](const Event& event) { return of_context(event.context); });
  context.default_stream()->close();
  const std::lock_guard lock(context.mutex);
  context.legacy = nullptr;
  for (const auto& [thread, stream] : std::exchange(context.of_threads, {})) stream->close();
}

}  // namespace

std::shared_ptr<Context> any_current_context() {
  require(!context_stack().empty(), kInvalidContext);
  return context_stack().back();
}

std::shared_ptr<Context> current_context() {
  auto context = any_current_context();
  check_alive(*context);
  return context;
}

FAKE_API Result cuInit(unsigned flags) {
  const auto body = [&] {
    require(flags == 0, kInvalidValue);
    require(!settings().devices.empty(), kNoDevice);
    set_initialized();
  };
  return enter("cuInit", body, When::kStart);
}

FAKE_API Result cuDriverGetVersion(int* version) {
  const auto body = [&] {
    require(version != nullptr, kInvalidValue);
    *version = settings().driver;
  };
  return enter("cuDriverGetVersion", body, When::kAlways);
}

FAKE_API Result cuDeviceGetPCIBusId(char* id, int bytes, Device device) {
  return enter("cuDeviceGetPCIBusId", [&] {
    require(id != nullptr && bytes > 0, kInvalidValue);
    const int number = 0x10 + physical(device);
    require(std::snprintf(id, static_cast<size_t>(bytes), "0000:%02x:00.0", number) < bytes,
            kInvalidValue);
  });
}

FAKE_API Result cuDeviceGetCount(int* count) {
  return enter("cuDeviceGetCount", [&] {
    require(count != nullptr, kInvalidValue);
    *count = static_cast<int>(settings().devices.size());
  });
}

FAKE_API Result cuDeviceGet(Device* device, int ordinal) {
  return enter("cuDeviceGet", [&] {
    require(device != nullptr, kInvalidValue);
    physical(ordinal);
    *device = ordinal;
  });
}

FAKE_API Result cuDeviceGetName(char* name, int length, Device device) {
  return enter("cuDeviceGetName", [&] {
    physical(device);
    require(name != nullptr && length > 0, kInvalidValue);
    std::snprintf(name, static_cast<size_t>(length), "%s", settings().name.c_str());
  });
}

FAKE_API Result cuDeviceGetUuid(Uuid* uuid, Device device) {
  return enter("cuDeviceGetUuid", [&] {
    require(uuid != nullptr, kInvalidValue);
    *uuid = uuid_of(physical(device), false);
  });
}

FAKE_API Result cuDeviceGetUuid_v2(Uuid* uuid, Device device) {
  return enter("cuDeviceGetUuid", [&] {
    require(uuid != nullptr, kInvalidValue);
    *uuid = uuid_of(physical(device), settings().mig);
  });
}

FAKE_API Result cuDeviceGetAttribute(int* value, int attribute, Device device) {
  return enter("cuDeviceGetAttribute", [&] {
    const int number = physical(device);
    require(value != nullptr && attribute > 0 && attribute < 150, kInvalidValue);
    const auto found = std::ranges::find(kAttributes, attribute, &Attribute::number);
    *value = found == std::end(kAttributes) ? 0 : found->value;
    if (attribute == 33) *value = 0x10 + number;  // PCI bus
    if (settings().mig && attribute == 16) *value = 16;
    if (settings().mig && attribute == 40) *value = 1;
  });
}

FAKE_API Result cuDeviceCanAccessPeer(int* can, Device device, Device peer) {
  return enter("cuDeviceCanAccessPeer", [&] {
    require(can != nullptr, kInvalidValue);
    const int a = physical(device), b = physical(peer);
    *can = a != b && settings().peers(a, b);
  });
}

FAKE_API Result cuDevicePrimaryCtxRetain(ContextHandle* context, Device device) {
  return enter("cuDevicePrimaryCtxRetain", [&] {
    require(context != nullptr, kInvalidValue);
    physical(device);
    const std::lock_guard lock(primaries().mutex);
    Primary& primary = primaries().by_device[device];
    if (primary.retained == 0) primary.context = make_context(device);
    check_alive(*primary.context);
    ++primary.retained;
    *context = primary.context->handle;
  });
}

FAKE_API Result cuDevicePrimaryCtxRelease_v2(Device device) {
  return enter("cuDevicePrimaryCtxRelease", [&] {
    physical(device);
    const std::lock_guard lock(primaries().mutex);
    Primary& primary = primaries().by_device[device];
    require(primary.retained > 0, kInvalidContext);
    if (--primary.retained > 0) return;
    destroy_context(*primary.context);
    primary.context = nullptr;
  });
}

FAKE_API Result cuCtxGetCurrent(ContextHandle* context) {
  return enter("cuCtxGetCurrent", [&] {
    require(context != nullptr, kInvalidValue);
    const auto& stack = context_stack();
    *context = stack.empty() ? nullptr : stack.back()->handle;
  });
}

FAKE_API Result cuCtxSetCurrent(ContextHandle context) {
  return enter("cuCtxSetCurrent", [&] {
    auto& stack = context_stack();
    const auto next = context ? contexts().find(context) : nullptr;
    if (!stack.empty()) stack.pop_back();
    if (next) stack.push_back(next);
  });
}

FAKE_API Result cuCtxPushCurrent_v2(ContextHandle context) {
  return enter("cuCtxPushCurrent", [&] { context_stack().push_back(contexts().find(context)); });
}

FAKE_API Result cuCtxPopCurrent_v2(ContextHandle* context) {
  return enter("cuCtxPopCurrent", [&] {
    auto& stack = context_stack();
    require(!stack.empty(), kInvalidContext);
    if (context) *context = stack.back()->handle;
    stack.pop_back();
  });
}

FAKE_API Result cuCtxEnablePeerAccess(ContextHandle peer, unsigned flags) {
  return enter("cuCtxEnablePeerAccess", [&] {
    const auto own = current_context();
    const auto other = contexts().find(peer);
    require(flags == 0, kInvalidValue);
    const bool reachable =
        own->physical != other->physical && settings().peers(own->physical, other->physical);
    require(reachable, kPeerAccessUnsupported);
    const std::lock_guard lock(own->mutex);
    require(own->peers.insert(peer).second, kPeerAccessAlready);
    addresses().open_to_peer(own->physical, other->physical);
  });
}

FAKE_API Result cuMemGetInfo_v2(size_t* free, size_t* total) {
  return enter("cuMemGetInfo", [&] {
    const auto context = current_context();
    require(free != nullptr && total != nullptr, kInvalidValue);
    *total = settings().memory_bytes;
    *free = *total - device_bytes_used(context->physical);
  });
}

}  // namespace fakecuda
