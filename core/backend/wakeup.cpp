#include "core/backend/wakeup.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace offcore {
namespace {

uint32_t* address(std::atomic<uint32_t>& word) { return reinterpret_cast<uint32_t*>(&word); }

// The thread sanitizer does not know fences; the data that the words guard does not rely on this.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wtsan"
void fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
#pragma GCC diagnostic pop

}  // namespace

void wake(Wakeup& wakeup) {
  fence();
  if (wakeup.sleepers.load(std::memory_order_relaxed) == 0) return;
  wakeup.count.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, address(wakeup.count), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void poison(Wakeup& wakeup, Rank by) {
  uint32_t none = 0;
  wakeup.poison.compare_exchange_strong(none, by + 1u, std::memory_order_seq_cst);
  wake(wakeup);
}

Sleeper::Sleeper(Wakeup& wakeup) : wakeup_(wakeup) {
  wakeup_.sleepers.fetch_add(1, std::memory_order_seq_cst);
  fence();
  seen_ = wakeup_.count.load(std::memory_order_seq_cst);
}

Sleeper::~Sleeper() { wakeup_.sleepers.fetch_sub(1, std::memory_order_seq_cst); }

void Sleeper::sleep(int64_t wait_ns) {
  if (wait_ns > 0) {
    const timespec wait{.tv_sec = wait_ns / 1'000'000'000, .tv_nsec = wait_ns % 1'000'000'000};
    syscall(SYS_futex, address(wakeup_.count), FUTEX_WAIT, seen_, &wait, nullptr, 0);
  }
  seen_ = wakeup_.count.load(std::memory_order_seq_cst);
}

}  // namespace offcore
