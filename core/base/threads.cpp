#include "core/base/threads.h"

#include <sched.h>

#include <chrono>
#include <string>
#include <thread>

#include "core/base/env.h"

namespace offcore {

uint32_t usable_cores() {
  const auto count = static_cast<uint32_t>(std::stoul(env("OFFCORE_HOST_CORES")));
  if (count > 0) return count;
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

void nap(int64_t waited_ns, int64_t spin_ns) {
  if (waited_ns < spin_ns) return std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::microseconds(waited_ns < 4'000'000 ? 20 : 200));
}

}  // namespace offcore
