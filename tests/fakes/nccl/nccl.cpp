// A stand-in libnccl.so.2 for tests of the shim: collectives of processes and threads on one host,
// on the stand-in driver's memory. Each is done when the call returns, or the group that it is in:
// communicators of a group go at once there. What has no meaning here counts its calls and returns
// success.
//
// fakenccl_calls(name) tells how often a function was called. ncclScatterConfig is missing, as from
// an older library.
#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/base/reduce.h"
#include "tests/fakes/nccl/count.h"

using fakenccl::count;

namespace {

constexpr uint64_t kSlotBytes = uint64_t{4} << 20;
constexpr int kRanksMax = 8;
constexpr size_t kTypeBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

void* driver() {
  static void* const opened = dlopen(std::getenv("OFFCORE_LIBCUDA"), RTLD_NOW);
  return opened;
}
template <typename... Arguments>
int cu(const char* name, Arguments... arguments) {
  const auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(driver(), name));
  return function(arguments...);
}

struct Meeting {
  std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> round;
  std::atomic<uint32_t> joined;
  std::atomic<int> colors[kRanksMax];
  std::atomic<int> keys[kRanksMax];
};

struct Comm {
  int rank = 0;
  int ranks = 0;
  int device = 0;
  std::string name;
  Meeting* meeting = nullptr;
  uint32_t splits = 0;
  void* context = nullptr;

  std::byte* slot(int peer) const {
    return reinterpret_cast<std::byte*>(meeting) + 4096 + static_cast<size_t>(peer) * kSlotBytes;
  }
  void barrier() const {
    const uint32_t round = meeting->round.load();
    if (meeting->arrived.fetch_add(1) + 1 == static_cast<uint32_t>(ranks)) {
      meeting->arrived.store(0);
      meeting->round.fetch_add(1);
      return;
    }
    while (meeting->round.load() == round) sched_yield();
  }
};

int current_device() {
  void* current = nullptr;
  int devices = 0;
  cu("cuCtxGetCurrent", &current);
  cu("cuDeviceGetCount", &devices);
  for (int device = 0; device < devices; ++device) {
    void* primary = nullptr;
    cu("cuDevicePrimaryCtxRetain", &primary, device);
    cu("cuDevicePrimaryCtxRelease_v2", device);
    if (primary == current) return device;
  }
  return 0;
}

Comm* join(const std::string& name, int rank, int ranks) {
  auto* const comm =
      new Comm{.rank = rank, .ranks = ranks, .device = current_device(), .name = name};
  cu("cuCtxGetCurrent", &comm->context);
  const int fd = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
  const uint64_t bytes = 4096 + static_cast<uint64_t>(ranks) * kSlotBytes;
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return nullptr;
  comm->meeting =
      static_cast<Meeting*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  close(fd);
  comm->barrier();
  if (rank == 0) shm_unlink(name.c_str());
  return comm;
}

// FAKENCCL_NO_BLOCK: looks at a communicator until a group is under way; before that
// nothing else is taken.
std::atomic<int> looks = 0;

// What a thread's group has, by communicator, in the order of the calls.
using Step = std::function<int()>;
thread_local int depth = 0;
thread_local std::map<Comm*, std::vector<Step>> grouped;

int run_group() {
  std::vector<std::future<int>> running;
  const auto all = std::exchange(grouped, {});
  for (const auto& entry : all) {
    running.push_back(std::async(std::launch::async, [&entry] {
      cu("cuCtxSetCurrent", entry.first->context);
      int result = 0;
      for (const Step& step : entry.second) result = std::max(result, step());
      return result;
    }));
  }
  int result = 0;
  for (std::future<int>& one : running) result = std::max(result, one.get());
  return result;
}

// Every rank's bytes lie in its slot; `take` reads them.
int meet(Comm* comm, const void* in, uint64_t bytes, void* stream, const Step& take) {
  if (bytes > kSlotBytes) return 4;
  if (depth > 0) {
    grouped[comm].push_back([=] { return meet(comm, in, bytes, stream, take); });
    return 0;
  }
  if (looks > 0) return 4;
  int capturing = 0;
  if (cu("cuStreamIsCapturing", stream, &capturing) != 0) return 1;
  if (capturing != 0) return 0;  // and the graph has nothing of it
  if (cu("cuStreamSynchronize", stream) != 0) return 1;
  if (in != nullptr && cu("cuMemcpyDtoH_v2", static_cast<void*>(comm->slot(comm->rank)),
                          reinterpret_cast<unsigned long long>(in), bytes) != 0) {
    return 1;
  }
  comm->barrier();
  const int result = take();
  comm->barrier();
  return result;
}

int put(void* out, const std::byte* data, uint64_t bytes) {
  return cu("cuMemcpyHtoD_v2", reinterpret_cast<unsigned long long>(out),
            static_cast<const void*>(data), bytes) == 0
             ? 0
             : 1;
}

// Sums, and averages, of part `first` of everybody's input.
std::vector<std::byte> reduced(const Comm* comm, uint64_t first, uint64_t count, int dtype,
                               int op) {
  constexpr offcore::DType kTypes[] = {
      offcore::DType::i8,  offcore::DType::u8,  offcore::DType::i32, offcore::DType::i32,
      offcore::DType::i64, offcore::DType::i64, offcore::DType::f16, offcore::DType::f32,
      offcore::DType::f64, offcore::DType::bf16};
  const uint64_t bytes = count * kTypeBytes[dtype];
  std::vector<std::byte> out(bytes);
  std::vector<const std::byte*> sources;
  for (int peer = 0; peer < comm->ranks; ++peer) sources.push_back(comm->slot(peer) + first);
  const offcore::Reduction reduction{
      .op = op == 4 ? offcore::ReduceOp::avg : offcore::ReduceOp::sum, .dtype = kTypes[dtype]};
  offcore::reduce(reduction, out.data(), sources, bytes);
  return out;
}

}  // namespace

#define FAKE_API extern "C" __attribute__((visibility("default")))
#define COUNTED count(__func__)

FAKE_API int ncclGetVersion(int* version) { return COUNTED, *version = 22809, 0; }
FAKE_API const char* ncclGetErrorString(int) { return COUNTED, "stand-in"; }
FAKE_API const char* ncclGetLastError(Comm*) { return COUNTED, "stand-in's last"; }

struct UniqueId {
  char bytes[128];
};

FAKE_API int ncclGetUniqueId(UniqueId* id) {
  COUNTED;
  uint64_t random = 0;
  if (getrandom(&random, sizeof random, 0) != sizeof random) return 2;
  std::memset(id->bytes, 0x5a, sizeof id->bytes);
  std::memcpy(id->bytes, &random, sizeof random);
  return 0;
}

FAKE_API int ncclCommInitRankConfig(Comm** comm, int ranks, UniqueId id, int rank, void*) {
  COUNTED;
  uint64_t random = 0;
  std::memcpy(&random, id.bytes, sizeof random);
  if (id.bytes[127] != 0x5a) return 4;  // the id came as it was
  *comm = join("/fakenccl-" + std::to_string(random), rank, ranks);
  return *comm == nullptr ? 2 : 0;
}

FAKE_API int ncclCommInitRank(Comm** comm, int ranks, UniqueId id, int rank) {
  COUNTED;
  return ncclCommInitRankConfig(comm, ranks, id, rank, nullptr);
}

FAKE_API int ncclCommSplit(Comm* comm, int color, int key, Comm** made, void*) {
  COUNTED;
  comm->meeting->colors[comm->rank] = color;
  comm->meeting->keys[comm->rank] = key;
  comm->barrier();
  int rank = 0;
  int ranks = 0;
  for (int peer = 0; peer < comm->ranks; ++peer) {
    if (comm->meeting->colors[peer] != color) continue;
    ++ranks;
    const int other = comm->meeting->keys[peer];
    rank += other < key || (other == key && peer < comm->rank);
  }
  comm->barrier();
  *made =
      color < 0
          ? nullptr
          : join(comm->name + "-" + std::to_string(++comm->splits) + "-" + std::to_string(color),
                 rank, ranks);
  return 0;
}

// FAKENCCL_NOT_READY: as of a communicator that is still being made, the first time.
FAKE_API int ncclCommCount(Comm* comm, int* value) {
  COUNTED;
  static std::atomic<bool> ready = std::getenv("FAKENCCL_NOT_READY") == nullptr;
  if (!ready.exchange(true) || looks > 0) return 4;
  return *value = comm->ranks, 0;
}
FAKE_API int ncclCommUserRank(Comm* comm, int* value) { return COUNTED, *value = comm->rank, 0; }
FAKE_API int ncclCommCuDevice(Comm* comm, int* value) { return COUNTED, *value = comm->device, 0; }
FAKE_API int ncclCommGetAsyncError(Comm*, int* value) {
  COUNTED;
  *value = looks > 0 && --looks > 0 ? 7 : 0;
  return 0;
}
FAKE_API int ncclCommDestroy(Comm* comm) { return COUNTED, delete comm, 0; }
FAKE_API int ncclCommAbort(Comm* comm) { return COUNTED, delete comm, 0; }
FAKE_API int ncclCommFinalize(Comm*) { return COUNTED, 0; }
// In a group there is none before its end.
FAKE_API int ncclCommWindowRegister(Comm* comm, void* data, size_t, void** window, int) {
  COUNTED;
  *window = nullptr;
  const auto made = [=] {
    comm->barrier();
    *window = data;
    return 0;
  };
  if (depth == 0) return made();
  grouped[comm].push_back(made);
  return 0;
}
FAKE_API int ncclCommWindowDeregister(Comm*, void*) { return COUNTED, 0; }
FAKE_API int ncclGroupStart() { return COUNTED, ++depth, 0; }
FAKE_API int ncclGroupEnd() {
  COUNTED;
  depth = std::max(depth - 1, 0);
  if (depth > 0) return 0;
  const int result = run_group();
  if (result != 0 || std::getenv("FAKENCCL_NO_BLOCK") == nullptr) return result;
  looks = 5;
  return 7;
}
FAKE_API int ncclGroupSimulateEnd(void*) {
  COUNTED;
  depth = std::max(depth - 1, 0);
  if (depth == 0) grouped.clear();
  return 0;
}

FAKE_API int ncclAllGather(const void* in, void* out, size_t n, int dtype, Comm* comm,
                           void* stream) {
  COUNTED;
  const uint64_t bytes = n * kTypeBytes[dtype];
  return meet(comm, in, bytes, stream, [=] {
    int result = 0;
    for (int peer = 0; peer < comm->ranks && result == 0; ++peer) {
      result = put(static_cast<std::byte*>(out) + peer * bytes, comm->slot(peer), bytes);
    }
    return result;
  });
}

FAKE_API int ncclAlltoAll(const void* in, void* out, size_t n, int dtype, Comm* comm,
                          void* stream) {
  COUNTED;
  const uint64_t bytes = n * kTypeBytes[dtype];
  return meet(comm, in, bytes * comm->ranks, stream, [=] {
    int result = 0;
    for (int peer = 0; peer < comm->ranks && result == 0; ++peer) {
      const std::byte* const from = comm->slot(peer) + comm->rank * bytes;
      result = put(static_cast<std::byte*>(out) + peer * bytes, from, bytes);
    }
    return result;
  });
}

FAKE_API int ncclAllReduce(const void* in, void* out, size_t n, int dtype, int op, Comm* comm,
                           void* stream) {
  COUNTED;
  return meet(comm, in, n * kTypeBytes[dtype], stream, [=] {
    const std::vector<std::byte> sum = reduced(comm, 0, n, dtype, op);
    return put(out, sum.data(), sum.size());
  });
}

FAKE_API int ncclReduceScatter(const void* in, void* out, size_t n, int dtype, int op, Comm* comm,
                               void* stream) {
  COUNTED;
  const uint64_t bytes = n * kTypeBytes[dtype];
  return meet(comm, in, bytes * comm->ranks, stream, [=] {
    const std::vector<std::byte> sum = reduced(comm, comm->rank * bytes, n, dtype, op);
    return put(out, sum.data(), sum.size());
  });
}

FAKE_API int ncclBroadcast(const void* in, void* out, size_t n, int dtype, int root, Comm* comm,
                           void* stream) {
  COUNTED;
  const uint64_t bytes = n * kTypeBytes[dtype];
  const void* const given = comm->rank == root ? in : nullptr;
  return meet(comm, given, bytes, stream, [=] { return put(out, comm->slot(root), bytes); });
}

FAKE_API int ncclGather(const void* in, void* out, size_t n, int dtype, int root, Comm* comm,
                        void* stream) {
  COUNTED;
  const uint64_t bytes = n * kTypeBytes[dtype];
  return meet(comm, in, bytes, stream, [=] {
    int result = 0;
    for (int peer = 0; peer < comm->ranks && comm->rank == root && result == 0; ++peer) {
      result = put(static_cast<std::byte*>(out) + peer * bytes, comm->slot(peer), bytes);
    }
    return result;
  });
}

FAKE_API int ncclScatter(const void* in, void* out, size_t n, int dtype, int root, Comm* comm,
                         void* stream) {
  COUNTED;
  const uint64_t bytes = n * kTypeBytes[dtype];
  const void* const given = comm->rank == root ? in : nullptr;
  return meet(comm, given, bytes * comm->ranks, stream,
              [=] { return put(out, comm->slot(root) + comm->rank * bytes, bytes); });
}

// Sums its parameters, of which some lie on the stack: they have come as they were.
FAKE_API int ncclPutSignal(const void* data, size_t n, int dtype, int peer, void* window,
                           size_t offset, int index, int context, unsigned flags, Comm* comm,
                           void* stream) {
  COUNTED;
  const auto number = [](const void* pointer) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(pointer));
  };
  return number(data) + static_cast<int>(n) + dtype + peer + number(window) +
         static_cast<int>(offset) + index + context + static_cast<int>(flags) + number(comm) +
         number(stream);
}

struct Team {
  int ranks, rank, stride;
};
FAKE_API Team ncclTeamWorld(Comm*) { return COUNTED, Team{7, 5, 3}; }
