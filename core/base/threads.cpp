#include "core/base/threads.h"

#include <sched.h>

#include <charconv>
#include <string>

#include "core/base/env.h"
#include "core/base/error.h"

namespace offcore {

uint32_t usable_cores() {
  const std::string given = env("OFFCORE_HOST_CORES");
  uint32_t count = 0;
  const auto [end, bad] = std::from_chars(given.data(), given.data() + given.size(), count);
  if (bad != std::errc() || end != given.data() + given.size()) {
    fail(Code::invalid, "OFFCORE_HOST_CORES is '", given, "': it must be a number of cores");
  }
  if (count > 0) return count;
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace offcore
