#include "core/base/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

#include "core/base/error.h"

namespace offcore {
namespace {

struct Open {
  std::mutex mutex;
  std::set<int> descriptors;
};

Open& open() {
  static auto* const all = new Open;  // outlives whatever is closed as the process ends
  return *all;
}

void in_child() {
  fork_count.fetch_add(1, std::memory_order_relaxed);
  for (const int fd : open().descriptors) close(fd);
  open().descriptors.clear();
  open().mutex.unlock();
}

// The set is whole at every fork, since that waits for the mutex.
[[maybe_unused]] const int watched =
    pthread_atfork([] { open().mutex.lock(); }, [] { open().mutex.unlock(); }, in_child);

}  // namespace

void OfProcess::fail_elsewhere() const {
  fail(Code::invalid, name_,
       " was opened before this process forked, and does not survive a fork: ",
       "its threads, connections and GPUs stay with the parent. Open it after the fork, or start ",
       "processes anew (multiprocessing's \"spawn\")");
}

void close_in_children(int fd) {
  const std::scoped_lock lock(open().mutex);
  open().descriptors.insert(fd);
}

void keep_in_children(int fd) {
  const std::scoped_lock lock(open().mutex);
  open().descriptors.erase(fd);
}

}  // namespace offcore
