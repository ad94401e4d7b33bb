// All names that have no meaning in the stand-in, and all names with a p in front.
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "shim/names.h"
#include "tests/fakes/nccl/count.h"

namespace fakenccl {
namespace {

std::mutex mutex;
std::map<std::string, uint64_t>& counts() {
  static auto* const all = new std::map<std::string, uint64_t>();
  return *all;
}

}  // namespace

void count(const char* name) {
  const std::lock_guard lock(mutex);
  ++counts()[name];
}

extern "C" __attribute__((visibility("default"))) uint64_t fakenccl_calls(const char* name) {
  const std::lock_guard lock(mutex);
  return counts()[name];
}

}  // namespace fakenccl

#define FAKE_STUB(name)                                                \
  extern "C" __attribute__((weak, visibility("default"))) int name() { \
    return fakenccl::count(#name), 0;                                  \
  }
#define FAKE_STUB_P(name) FAKE_STUB(p##name)
OFFCORE_NCCL_FORWARDED(FAKE_STUB)
OFFCORE_NCCL_OWN(FAKE_STUB)
OFFCORE_NCCL_FORWARDED(FAKE_STUB_P)
OFFCORE_NCCL_OWN(FAKE_STUB_P)
