// NCCL's functions that are more than passed on.
//
// In a group, calls that may be ours wait for its end, one a communicator: where a second
// collective of the same communicator comes, both are NCCL's. What is left runs at the end. Nothing
// else that a rank has in its group may decide where a call goes, since other ranks of the
// communicator need not have it in theirs: neither other communicators nor sends and receives.
#include <algorithm>
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <thread>
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

// Whether it may be ours by what the call itself says, once its ranks have met: the number of
// ranks, which is not asked here, only makes it larger.
bool may_be_ours(const Call& call) {
  if (inside || call.comm == nullptr || call.count == 0 || !Library::of_process().loaded())
    return false;
  if (!computable(call)) return false;
  const auto companion = Companions::of_process().find(call.comm);
  if (companion == nullptr || companion->standing() == Standing::unmet) return true;
  if (companion->standing() == Standing::given_up) return false;
  constexpr Rank kRanksMost = 64;
  return total_bytes(call, kRanksMost) >= Companions::policy().floor(call.collective);
}

// None: NCCL is to do it.
std::optional<NcclResult> run(const Call& call) {
  std::optional<NcclResult> result;
  const NcclResult failure = guarded([&] {
    result = Companions::of_process().of(call.comm)->run(call);
    return kNcclSuccess;
  });
  return failure == kNcclSuccess ? result : failure;
}

// Calls of several communicators, in their order. Other ranks may have another one, and a call may
// wait for its ranks: then each stream's go by a thread of their own. Another thread has no name
// for this one's default stream, so that calls there go aside.
std::vector<std::optional<NcclResult>> run_all(const std::vector<Call>& calls) {
  std::vector<std::optional<NcclResult>> results(calls.size());
  const auto ready = [](const Call& call) {
    return Companions::of_process().of(call.comm)->ready(call);
  };
  if (calls.size() == 1 || std::all_of(calls.begin(), calls.end(), ready)) {
    std::transform(calls.begin(), calls.end(), results.begin(), run);
    return results;
  }
  using Some = std::vector<size_t>;
  std::map<std::pair<int, Stream>, Some> by_stream;  // of a device
  std::vector<Call> given = calls;
  for (size_t i = 0; i < calls.size(); ++i) {
    int device = -1;
    OFFCORE_REAL(CommCuDevice, calls[i].comm, &device);
    Stream& stream = given[i].stream;
    if (stream == kStreamOfThread) stream = Companions::of_process().of(calls[i].comm)->aside();
    by_stream[{device, stream}].push_back(i);
  }
  const auto run_some = [&](const Some& some) {
    for (const size_t i : some) results[i] = run(given[i]);
  };
  std::vector<std::future<void>> others;
  for (const auto& entry : by_stream) {
    others.push_back(std::async(std::launch::async, [&, driver = driver_of_thread()] {
      driver_of_thread() = driver;
      run_some(entry.second);
    }));
  }
  for (std::future<void>& other : others) other.get();
  for (const Call& call : calls) {
    if (call.stream == kStreamOfThread) Companions::of_process().of(call.comm)->join_aside();
  }
  return results;
}

// Of communicators that do not block, until what a group had for them is under way: until then NCCL
// takes nothing else. Ends as NCCL does, and by its abort.
NcclResult await_ready(const std::vector<Call>& calls) {
  for (const Call& call : calls) {
    NcclResult state = kNcclInProgress;
    while (state == kNcclInProgress) {
      const NcclResult result = OFFCORE_REAL(CommGetAsyncError, call.comm, &state);
      if (result != kNcclSuccess) return result;
      if (state == kNcclInProgress) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    if (state != kNcclSuccess) return state;
  }
  return kNcclSuccess;
}

// What waited for the end of a group, which has come.
NcclResult run_held(const std::vector<Call>& calls) {
  const auto results = run_all(calls);
  NcclResult worst = kNcclSuccess;
  const auto note = [&](NcclResult result) {
    if (result != kNcclSuccess && worst == kNcclSuccess) worst = result;
  };
  const bool several = std::count(results.begin(), results.end(), std::nullopt) > 1;
  if (several) note(OFFCORE_REAL(GroupStart));
  for (size_t i = 0; i < calls.size(); ++i) note(results[i] ? *results[i] : pass_on(calls[i]));
  if (several) note(OFFCORE_REAL(GroupEnd));
  return worst;
}

// A symmetric one, which NCCL registers, and tells by `made` once that is done.
struct Window {
  Comm comm;
  void* data;
  size_t bytes;
  NcclWindow* made;  // null there: NCCL has none to offer

  void add() const {
    if (*made != nullptr) Companions::of_process().of(comm)->add_window(*made, data, bytes);
  }
};

struct Group {
  struct Held {
    Comm comm;
    std::optional<Call> call;  // none: the calls of this communicator are NCCL's
  };
  struct Left {
    std::vector<Call> calls;
    std::vector<Window> windows;
  };
  int depth = 0;
  std::vector<Held> held;  // by communicator
  std::vector<Window> windows;

  // The next collective of that communicator; whether it is the first.
  bool enter(Comm comm, const Call* call) {
    for (Held& one : held) {
      if (one.comm != comm) continue;
      if (const auto waiting = std::exchange(one.call, std::nullopt)) pass_on(*waiting);
      return false;
    }
    held.push_back({comm, call == nullptr ? std::nullopt : std::optional(*call)});
    return true;
  }
  void pass_all_on() {
    for (Held& one : held) {
      if (const auto waiting = std::exchange(one.call, std::nullopt)) pass_on(*waiting);
    }
  }
  Left leave() {
    depth = 0;
    Left left{.calls = {}, .windows = std::exchange(windows, {})};
    for (const Held& one : std::exchange(held, {})) {
      if (one.call) left.calls.push_back(*one.call);
    }
    return left;
  }
};
thread_local Group group;

NcclResult collective(const Call& call) {
  return guarded([&] {
    const bool ours = may_be_ours(call);
    if (group.depth == 0 || inside) {
      const auto result = ours ? run(call) : std::nullopt;
      return result ? *result : pass_on(call);
    }
    const bool first = group.enter(call.comm, ours ? &call : nullptr);
    return first && ours ? kNcclSuccess : pass_on(call);
  });
}

NcclResult end_group() {
  if (inside || group.depth == 0) return OFFCORE_REAL(GroupEnd);
  if (group.depth > 1) {
    --group.depth;
    return OFFCORE_REAL(GroupEnd);
  }
  const auto [calls, windows] = group.leave();
  const NcclResult result = OFFCORE_REAL(GroupEnd);
  if (result == kNcclSuccess) {
    for (const Window& one : windows) one.add();
  }
  if (calls.empty() || (result != kNcclSuccess && result != kNcclInProgress)) return result;
  const NcclResult ready = result == kNcclInProgress ? await_ready(calls) : kNcclSuccess;
  const NcclResult own = ready == kNcclSuccess ? run_held(calls) : ready;
  return own == kNcclSuccess ? result : own;
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
  return guarded([&] {
    if (group.depth > 0 && !inside) group.enter(comm, nullptr);
    return pass_on({offcore::Collective::reduce, in, out, count, dtype, op, root, comm, stream});
  });
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
      if (--group.depth == 0) group.leave();
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

OFFCORE_EXPORT NcclResult ncclCommShrink(Comm comm, int* excluded, int count, Comm* made,
                                         void* config, int flags) {
  const auto left = (flags & kShrinkAbort) != 0 ? leave(comm, Ending::aborted) : nullptr;
  return OFFCORE_REAL(CommShrink, comm, excluded, count, made, config, flags);
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
  const bool symmetric = (flags & kWindowSymmetric) != 0 && !inside;
  if (result != kNcclSuccess || !symmetric || window == nullptr) return result;
  return guarded([&] {
    const Window made{comm, data, bytes, window};
    group.depth > 0 ? group.windows.push_back(made) : made.add();
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
