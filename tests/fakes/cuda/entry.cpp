#include "tests/fakes/cuda/entry.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <string_view>

#include "tests/fakes/cuda/graph.h"
#include "tests/fakes/cuda/settings.h"
#include "tests/fakes/cuda/symbols.h"
#include "tests/fakes/cuda/user_object.h"

namespace fakecuda {
namespace {

std::atomic<bool> initialized{false};
std::atomic<bool> forked{false};  // from a process that had called cuInit: nothing works here

// Refused where a capture forbids them to the calling thread.
constexpr std::string_view kUnsafe[] = {
    "cuMemCreate",
    "cuMemRelease",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuStreamCreateWithPriority",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease",
};

struct Calls {
  std::mutex mutex;
  std::map<std::string, uint64_t> by_name;
};

Calls& calls() {
  static Calls* const value = new Calls;
  return *value;
}

}  // namespace

void set_initialized() {
  if (initialized.exchange(true)) return;
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
}

void begin_call(const char* name, When when) {
  if (forked) {  // touch no lock: the fork may have left it taken
    require(when == When::kAlways, kNotInitialized);
    return;
  }
  require(when != When::kInitialized || initialized, kNotInitialized);
  require(!in_destructor(), kNotPermitted);
  require(oldest_driver(name) <= settings().driver, kCallRequiresNewerDriver);
  if (const Result code = planted_fault(name)) throw Failure{code};
  if (std::ranges::find(kUnsafe, name) != std::end(kUnsafe)) refuse_unsafe();
}

Result planted_fault(const char* name) {
  const std::lock_guard lock(calls().mutex);
  const uint64_t call = ++calls().by_name[name];
  for (const Fault& fault : settings().faults) {
    if (fault.name == name && fault.call == call) return fault.code;
  }
  return kSuccess;
}

uint64_t calls_of(const std::string& name) {
  const std::lock_guard lock(calls().mutex);
  const auto found = calls().by_name.find(name);
  return found == calls().by_name.end() ? 0 : found->second;
}

}  // namespace fakecuda
