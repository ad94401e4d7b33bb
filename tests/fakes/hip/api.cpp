// A stand-in HIP runtime, as core/backend/sdma/hip.h declares it: memory, registrations by the
// page, streams, and batches whose copies are made in any order, some at each look at a stream.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "core/backend/sdma/hip.h"

namespace offcore::hip {
struct StreamTag {
  int device = 0;
  struct Copy {
    std::byte* dst;
    const std::byte* src;
    size_t bytes;
  };
  std::vector<std::vector<Copy>> batches;
};
}  // namespace offcore::hip

namespace {

using namespace offcore::hip;

constexpr HipError kInvalidValue = 1;
constexpr HipError kInvalidDevice = 101;
constexpr HipError kInvalidHandle = 400;
constexpr HipError kIllegalAddress = 700;
constexpr HipError kAlreadyRegistered = 712;
constexpr HipError kNotRegistered = 713;
constexpr size_t kBatchMax = 8192;
constexpr uintptr_t kPage = 4096;
constexpr uintptr_t kSeen = uintptr_t{1} << 45;  // where devices see registered memory
constexpr int kHost = -1;

struct Range {
  size_t bytes = 0;
  int device = kHost;
};

struct Machine {
  std::mutex mutex;
  int devices = 8;
  size_t refuse = SIZE_MAX;                // this entry, of the first batch that is as long
  std::map<uintptr_t, Range> memory;       // as devices see it
  std::map<uintptr_t, size_t> registered;  // as the host does
  std::set<std::pair<int, int>> peers;
  std::set<HipStream> streams;
  std::map<std::string, uint64_t> done;
  uint64_t draws = 1;

  Machine() {
    const char* gpus = std::getenv("OFFCORE_FAKE_HSA_GPUS");
    if (gpus != nullptr && *gpus != '\0') devices = std::atoi(gpus);
    const char* entry = std::getenv("OFFCORE_FAKE_HIP_REFUSE");
    if (entry != nullptr && *entry != '\0') refuse = std::strtoull(entry, nullptr, 10);
  }

  // Whose memory all of it is; false where it is no memory, or nobody's that the device reaches.
  bool reached(int device, uintptr_t at, size_t bytes) const {
    const auto after = memory.upper_bound(at);
    if (after == memory.begin()) return false;
    const auto& [begin, range] = *std::prev(after);
    const bool inside = at - begin < range.bytes && bytes <= range.bytes - (at - begin);
    const bool near = range.device == kHost || range.device == device;
    return inside && (near || peers.contains({device, range.device}));
  }

  std::byte* bytes_at(uintptr_t at) const {
    return reinterpret_cast<std::byte*>(registered_at(at) ? at - kSeen : at);
  }

 private:
  bool registered_at(uintptr_t at) const {
    const auto after = registered.upper_bound(at - kSeen);
    return at >= kSeen && after != registered.begin() &&
           at - kSeen < std::prev(after)->first + std::prev(after)->second;
  }
};

Machine& machine() {
  static Machine* const one = new Machine();
  return *one;
}

using Lock = std::scoped_lock<std::mutex>;
thread_local int current = 0;

HipError allocate(void** data, size_t bytes, int device) {
  if (bytes == 0) return kInvalidValue;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return kOutOfMemory;
  std::memset(memory, 0xA5, bytes);  // nobody promises zeros
  const Lock lock(machine().mutex);
  machine().memory[reinterpret_cast<uintptr_t>(memory)] = {bytes, device};
  *data = memory;
  return kSuccess;
}

HipError release(void* data) {
  const Lock lock(machine().mutex);
  const auto found = machine().memory.find(reinterpret_cast<uintptr_t>(data));
  if (found == machine().memory.end()) return kInvalidValue;
  munmap(data, found->second.bytes);
  machine().memory.erase(found);
  return kSuccess;
}

// Makes one of the copies of a stream's first batch.
void copy_one(StreamTag& stream) {
  auto& batch = stream.batches.front();
  const size_t pick = (machine().draws += 0x9e3779b97f4a7c15) % batch.size();
  const StreamTag::Copy copy = batch[pick];
  batch.erase(batch.begin() + static_cast<ptrdiff_t>(pick));
  std::memmove(copy.dst, copy.src, copy.bytes);
  ++machine().done["copies"];
  if (batch.empty()) stream.batches.erase(stream.batches.begin());
}

}  // namespace

extern "C" {

HipError hipInit(unsigned flags) { return flags == 0 ? kSuccess : kInvalidValue; }

HipError hipGetDeviceCount(int* count) {
  *count = machine().devices;
  return kSuccess;
}

HipError hipSetDevice(int device) {
  if (device < 0 || device >= machine().devices) return kInvalidDevice;
  current = device;
  return kSuccess;
}

HipError hipDeviceEnablePeerAccess(int peer, unsigned flags) {
  const Lock lock(machine().mutex);
  if (flags != 0 || peer == current || peer >= machine().devices) return kInvalidDevice;
  return machine().peers.insert({current, peer}).second ? kSuccess : kPeerAccessAlready;
}

HipError hipMalloc(void** data, size_t bytes) { return allocate(data, bytes, current); }
HipError hipFree(void* data) { return release(data); }
HipError hipHostMalloc(void** data, size_t bytes, unsigned flags) {
  return flags == (kHostPortable | kHostMapped) ? allocate(data, bytes, kHost) : kInvalidValue;
}
HipError hipHostFree(void* data) { return release(data); }

HipError hipHostRegister(void* data, size_t bytes, unsigned flags) {
  if (bytes == 0 || flags != (kHostPortable | kHostMapped)) return kInvalidValue;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes + kPage - 1) / kPage * kPage;
  const Lock lock(machine().mutex);
  auto& registered = machine().registered;
  const auto next = registered.lower_bound(end);
  if (next != registered.begin() && std::prev(next)->first + std::prev(next)->second > begin) {
    return kAlreadyRegistered;
  }
  registered[begin] = end - begin;
  machine().memory[begin + kSeen] = {end - begin, kHost};
  ++machine().done["registered"];
  return kSuccess;
}

HipError hipHostUnregister(void* data) {
  const Lock lock(machine().mutex);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / kPage * kPage;
  if (machine().registered.erase(begin) == 0) return kNotRegistered;
  machine().memory.erase(begin + kSeen);
  ++machine().done["unregistered"];
  return kSuccess;
}

HipError hipHostGetDevicePointer(void** seen, void* data, unsigned flags) {
  if (flags != 0) return kInvalidValue;
  *seen = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(data) + kSeen);
  return kSuccess;
}

HipError hipStreamCreateWithFlags(HipStream* stream, unsigned flags) {
  const Lock lock(machine().mutex);
  if (flags != kNonBlocking) return kInvalidValue;
  *stream = new StreamTag{.device = current, .batches = {}};
  machine().streams.insert(*stream);
  return kSuccess;
}

HipError hipStreamDestroy(HipStream stream) {
  const Lock lock(machine().mutex);
  if (machine().streams.erase(stream) == 0) return kInvalidHandle;
  while (!stream->batches.empty()) copy_one(*stream);
  delete stream;
  return kSuccess;
}

HipError hipStreamQuery(HipStream stream) {
  const Lock lock(machine().mutex);
  if (!machine().streams.contains(stream) || stream->device != current) return kInvalidHandle;
  for (int i = 0; i < 64 && !stream->batches.empty(); ++i) copy_one(*stream);
  return stream->batches.empty() ? kSuccess : kNotReady;
}

const char* hipGetErrorString(HipError error) {
  return error == kAlreadyRegistered ? "already registered"
         : error == kOutOfMemory     ? "out of memory"
         : error == kIllegalAddress  ? "an illegal memory access was encountered"
                                     : "invalid argument";
}

// Where an entry is refused those before it are made all the same.
HipError hipMemcpyBatchAsync(void** dsts, void** srcs, size_t* sizes, size_t count,
                             void* attributes, size_t* indices, size_t attribute_count,
                             size_t* failed, HipStream stream) {
  const Lock lock(machine().mutex);
  Machine& all = machine();
  if (!all.streams.contains(stream)) return kInvalidHandle;
  if (count == 0 || attributes != nullptr || indices != nullptr || attribute_count != 0) {
    return kInvalidValue;
  }
  if (count > kBatchMax) return kIllegalAddress;
  ++all.done["batches"];
  all.done["largest"] = std::max<uint64_t>(all.done["largest"], count);
  std::vector<StreamTag::Copy> batch;
  HipError error = kSuccess;
  for (size_t i = 0; i < count && error == kSuccess; ++i) {
    const auto dst = reinterpret_cast<uintptr_t>(dsts[i]);
    const auto src = reinterpret_cast<uintptr_t>(srcs[i]);
    const bool fits = sizes[i] > 0 && all.reached(stream->device, dst, sizes[i]) &&
                      all.reached(stream->device, src, sizes[i]);
    if (!fits || i == all.refuse) {
      if (i == all.refuse) all.refuse = SIZE_MAX;  // once
      *failed = i;
      error = kInvalidValue;
    } else {
      batch.push_back({all.bytes_at(dst), all.bytes_at(src), sizes[i]});
    }
  }
  if (!batch.empty()) stream->batches.push_back(std::move(batch));
  return error;
}

// What was done: batches, copies, largest (of all batches, in copies), registered, unregistered.
uint64_t fakehip_done(const char* what) {
  const Lock lock(machine().mutex);
  return machine().done[what];
}

}  // extern "C"
