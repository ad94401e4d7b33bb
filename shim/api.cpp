// NCCL's functions that are more than passed on.
//
// In a group, calls that may be ours wait for its end, one a communicator: where a second call of
// the same communicator comes, both are NCCL's. What is left at the end runs then, unless the group
// has communicators of several GPUs: one thread drives them then, which cannot wait for itself.
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "core/base/env.h"
#include "shim/companion.h"
#include "shim/library.h"
#include "shim/names.h"

namespace offcore::shim {
namespace {

class Companions {
 public:
  static Companions& of_process() {
    static auto* const all = new Companions();  // never destroyed: threads may outlive statics
    return *all;
  }

  // Throws invalid for a variable with a wrong value.
  std::shared_ptr<Companion> of(Comm comm) {
    {
      const std::shared_lock lock(mutex_);
      const auto found = by_comm_.find(comm);
      if (found != by_comm_.end()) return found->second;
    }
    const std::unique_lock lock(mutex_);
    auto& made = by_comm_[comm];
    if (made == nullptr) made = std::make_shared<Companion>(comm, policy());
    return made;
  }
  std::shared_ptr<Companion> find(Comm comm) const {
    const std::shared_lock lock(mutex_);
    const auto found = by_comm_.find(comm);
    return found == by_comm_.end() ? nullptr : found->second;
  }
  std::shared_ptr<Companion> take(Comm comm) {
    const std::unique_lock lock(mutex_);
    const auto node = by_comm_.extract(comm);
    return node.empty() ? nullptr : node.mapped();
  }
  // Null: of whichever has one, as NCCL's own is any communicator's.
  std::string last_error(Comm comm) const {
    const std::shared_lock lock(mutex_);
    for (const auto& [key, companion] : by_comm_) {
      std::string text = comm == nullptr || comm == key ? companion->last_error() : "";
      if (!text.empty()) return text;
    }
    return "";
  }
  static const Policy& policy() {
    static const Policy policy = Policy::of_environment();
    return policy;
  }
  static bool reports() {
    static const bool reports = env("OFFCORE_NCCL_REPORT") == "1";
    return reports;
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<Comm, std::shared_ptr<Companion>> by_comm_;
};

// Nothing of ours is thrown into C.
template <typename Body>
NcclResult guarded(const Body& body) noexcept {
  try {
    return body();
  } catch (const Error& error) {
    tell(error.message());
    return result_of(error);
  } catch (const std::exception& error) {
    tell(error.what());
  }
  return kNcclInternalError;
}

template <typename... Parameters, typename... Arguments>
NcclResult real(const char* name, NcclResult (*function)(Parameters...), Arguments... arguments) {
  if (function == nullptr) {
    Library::of_process().find(name);  // says so
    return Library::of_process().loaded() ? kNcclInvalidUsage : kNcclSystemError;
  }
  const Inside guard;
  return function(arguments...);
}
#define OFFCORE_REAL(name, ...) \
  real("nccl" #name, Library::of_process().name __VA_OPT__(, ) __VA_ARGS__)

NcclResult pass_on(const Call& call) {
  if (Companions::reports()) Companions::of_process().of(call.comm)->count(call, false);
  const Inside guard;
  return forward(call);
}

// Whether it may be ours by what the call itself says: the number of ranks, which is not asked
// here, only makes it larger.
bool may_be_ours(const Call& call) {
  if (inside || call.comm == nullptr || call.count == 0 || !Library::of_process().loaded())
    return false;
  const uint64_t floor = Companions::policy().floor(call.collective);
  if (floor == kNever || !computable(call)) return false;
  constexpr Rank kRanksMost = 64;
  return total_bytes(call, kRanksMost) >= floor;
}

NcclResult run(const Call& call) {
  if (const auto result = Companions::of_process().of(call.comm)->run(call)) return *result;
  return pass_on(call);
}

struct Group {
  struct Held {
    Comm comm;
    std::optional<Call> call;  // none: the calls of this communicator are NCCL's
  };
  int depth = 0;
  std::vector<Held> held;  // by communicator

  // The next call of that communicator; whether it is the first.
  bool enter(Comm comm, const Call* call) {
    for (Held& one : held) {
      if (one.comm != comm) continue;
      if (const auto waiting = std::exchange(one.call, std::nullopt)) pass_on(*waiting);
      return false;
    }
    held.push_back({comm, call == nullptr ? std::nullopt : std::optional(*call)});
    return true;
  }
  bool several_gpus() const {
    int first = -1;
    for (const Held& one : held) {
      int device = -1;
      if (one.call && held.size() > 1) OFFCORE_REAL(CommCuDevice, one.comm, &device);
      if (device >= 0 && first >= 0 && device != first) return true;
      first = device >= 0 ? device : first;
    }
    return false;
  }
  void pass_all_on() {
    for (Held& one : held) {
      if (const auto waiting = std::exchange(one.call, std::nullopt)) pass_on(*waiting);
    }
  }
};
thread_local Group group;

NcclResult collective(const Call& call) {
  return guarded([&] {
    const bool ours = may_be_ours(call);
    if (group.depth == 0 || inside) return ours ? run(call) : pass_on(call);
    const bool first = group.enter(call.comm, ours ? &call : nullptr);
    return first && ours ? kNcclSuccess : pass_on(call);
  });
}

// Of a call that is always NCCL's.
void enter_group(Comm comm) {
  if (group.depth > 0 && !inside) guarded([&] { return group.enter(comm, nullptr), 0; });
}

NcclResult end_group() {
  if (inside || group.depth == 0) return OFFCORE_REAL(GroupEnd);
  if (group.depth > 1) {
    --group.depth;
    return OFFCORE_REAL(GroupEnd);
  }
  if (group.several_gpus()) group.pass_all_on();
  const std::vector<Group::Held> held = std::exchange(group.held, {});
  group.depth = 0;
  NcclResult result = OFFCORE_REAL(GroupEnd);
  for (const Group::Held& one : held) {
    if (!one.call || (result != kNcclSuccess && result != kNcclInProgress)) continue;
    const NcclResult own = run(*one.call);
    if (own != kNcclSuccess) result = own;
  }
  return result;
}

// As a communicator ends, before NCCL ends its own. What is left goes with the result, which must
// outlive that: to free memory waits for what NCCL has under way.
enum class Ending : uint8_t { finished, aborted };
std::shared_ptr<Companion> leave(Comm comm, Ending ending) {
  const auto companion = Companions::of_process().take(comm);
  guarded([&] {
    if (companion == nullptr) return kNcclSuccess;
    if (ending == Ending::aborted) {
      companion->abort();
    } else {
      companion->finish();
    }
    if (Companions::reports()) tell(companion->report());
    return kNcclSuccess;
  });
  return companion;
}

}  // namespace
}  // namespace offcore::shim

using namespace offcore::shim;

#define OFFCORE_EXPORT extern "C" __attribute__((visibility("default")))

OFFCORE_EXPORT NcclResult ncclAllGather(const void* in, void* out, size_t count, int dtype,
                                        Comm comm, Stream stream) {
  return collective({offcore::Collective::all_gather, in, out, count, dtype, -1, 0, comm, stream});
}

OFFCORE_EXPORT NcclResult ncclAlltoAll(const void* in, void* out, size_t count, int dtype,
                                       Comm comm, Stream stream) {
  return collective({offcore::Collective::all_to_all, in, out, count, dtype, -1, 0, comm, stream});
}

OFFCORE_EXPORT NcclResult ncclAllReduce(const void* in, void* out, size_t count, int dtype, int op,
                                        Comm comm, Stream stream) {
  return collective({offcore::Collective::all_reduce, in, out, count, dtype, op, 0, comm, stream});
}

OFFCORE_EXPORT NcclResult ncclReduceScatter(const void* in, void* out, size_t count, int dtype,
                                            int op, Comm comm, Stream stream) {
  return collective(
      {offcore::Collective::reduce_scatter, in, out, count, dtype, op, 0, comm, stream});
}

OFFCORE_EXPORT NcclResult ncclBroadcast(const void* in, void* out, size_t count, int dtype,
                                        int root, Comm comm, Stream stream) {
  return collective(
      {offcore::Collective::broadcast, in, out, count, dtype, -1, root, comm, stream});
}

OFFCORE_EXPORT NcclResult ncclBcast(void* data, size_t count, int dtype, int root, Comm comm,
                                    Stream stream) {
  return ncclBroadcast(data, data, count, dtype, root, comm, stream);
}

OFFCORE_EXPORT NcclResult ncclGather(const void* in, void* out, size_t count, int dtype, int root,
                                     Comm comm, Stream stream) {
  return collective({offcore::Collective::gather, in, out, count, dtype, -1, root, comm, stream});
}

OFFCORE_EXPORT NcclResult ncclScatter(const void* in, void* out, size_t count, int dtype, int root,
                                      Comm comm, Stream stream) {
  return collective({offcore::Collective::scatter, in, out, count, dtype, -1, root, comm, stream});
}

OFFCORE_EXPORT NcclResult ncclReduce(const void* in, void* out, size_t count, int dtype, int op,
                                     int root, Comm comm, Stream stream) {
  enter_group(comm);
  return guarded([&] {
    return pass_on({offcore::Collective::reduce, in, out, count, dtype, op, root, comm, stream});
  });
}

OFFCORE_EXPORT NcclResult ncclSend(const void* in, size_t count, int dtype, int peer, Comm comm,
                                   Stream stream) {
  enter_group(comm);
  return OFFCORE_REAL(Send, in, count, dtype, peer, comm, stream);
}

OFFCORE_EXPORT NcclResult ncclRecv(void* out, size_t count, int dtype, int peer, Comm comm,
                                   Stream stream) {
  enter_group(comm);
  return OFFCORE_REAL(Recv, out, count, dtype, peer, comm, stream);
}

OFFCORE_EXPORT NcclResult ncclGroupStart() {
  if (!inside) ++group.depth;
  return OFFCORE_REAL(GroupStart);
}

OFFCORE_EXPORT NcclResult ncclGroupEnd() { return guarded(end_group); }

OFFCORE_EXPORT NcclResult ncclGroupSimulateEnd(void* info) {
  return guarded([&] {
    if (!inside && group.depth > 0) {
      group.pass_all_on();
      if (--group.depth == 0) group.held.clear();
    }
    return OFFCORE_REAL(GroupSimulateEnd, info);
  });
}

OFFCORE_EXPORT NcclResult ncclCommFinalize(Comm comm) {
  guarded([&] {
    if (const auto companion = Companions::of_process().find(comm)) companion->finish();
    return kNcclSuccess;
  });
  return OFFCORE_REAL(CommFinalize, comm);
}

OFFCORE_EXPORT NcclResult ncclCommDestroy(Comm comm) {
  const auto left = leave(comm, Ending::finished);
  return OFFCORE_REAL(CommDestroy, comm);
}

OFFCORE_EXPORT NcclResult ncclCommAbort(Comm comm) {
  const auto left = leave(comm, Ending::aborted);
  return OFFCORE_REAL(CommAbort, comm);
}

// NCCL keeps such a communicator, without what is under way. Ours ends with that.
OFFCORE_EXPORT NcclResult ncclCommRevoke(Comm comm, int flags) {
  const auto left = leave(comm, Ending::aborted);
  return OFFCORE_REAL(CommRevoke, comm, flags);
}

OFFCORE_EXPORT NcclResult ncclCommGetAsyncError(Comm comm, NcclResult* state) {
  const NcclResult result = OFFCORE_REAL(CommGetAsyncError, comm, state);
  if (result != kNcclSuccess || state == nullptr || *state != kNcclSuccess) return result;
  return guarded([&] {
    const auto companion = Companions::of_process().find(comm);
    if (companion != nullptr && companion->failed()) *state = kNcclRemoteError;
    return result;
  });
}

OFFCORE_EXPORT NcclResult ncclCommWindowRegister(Comm comm, void* data, size_t bytes,
                                                 NcclWindow* window, int flags) {
  const NcclResult result = OFFCORE_REAL(CommWindowRegister, comm, data, bytes, window, flags);
  const bool symmetric = (flags & kWindowSymmetric) != 0 && group.depth == 0 && !inside;
  if (result != kNcclSuccess || !symmetric || window == nullptr) return result;
  return guarded([&] {
    Companions::of_process().of(comm)->register_window(*window, data, bytes);
    return result;
  });
}

OFFCORE_EXPORT NcclResult ncclCommWindowDeregister(Comm comm, NcclWindow window) {
  guarded([&] {
    if (const auto companion = Companions::of_process().find(comm)) {
      companion->deregister_window(window);
    }
    return kNcclSuccess;
  });
  return OFFCORE_REAL(CommWindowDeregister, comm, window);
}

OFFCORE_EXPORT const char* ncclGetErrorString(NcclResult result) {
  using Function = const char* (*)(NcclResult);
  static const auto function =
      reinterpret_cast<Function>(Library::of_process().find("ncclGetErrorString"));
  return function == nullptr ? "no NCCL library was found: set OFFCORE_NCCL_LIBRARY"
                             : function(result);
}

// Of ours, where one has failed; else NCCL's.
OFFCORE_EXPORT const char* ncclGetLastError(Comm comm) {
  thread_local std::string own;
  own = Companions::of_process().last_error(comm);
  if (!own.empty()) return own.c_str();
  using Function = const char* (*)(Comm);
  static const auto function =
      reinterpret_cast<Function>(Library::of_process().find("ncclGetLastError"));
  return function == nullptr ? "" : function(comm);
}
