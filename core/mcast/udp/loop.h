// A thread that serves sockets, timers and posted calls, and sleeps when there is nothing to do.
//
// Several communicators may share one, and one communicator may spread over several: that is how
// receive workers scale apart from send workers, and how one process runs hundreds of ranks. What
// is served must never wait for anything.
#pragma once
#include <sys/epoll.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/base/descriptor.h"

namespace offcore::mcast {

class Loop {
 public:
  using Call = std::function<void()>;

  // Looks for `spin_ns` before it sleeps, and yields its core in between: to be woken takes longer.
  explicit Loop(int64_t spin_ns = 0);
  ~Loop();  // any thread but its own; what is posted by then has run

  bool here() const { return std::this_thread::get_id() == thread_.get_id(); }
  // Any thread. In the order of the calls.
  void post(Call call);
  // Any thread: returns when it has run. On the loop's own thread it runs at once.
  void call(const Call& call);

  // All below: on its thread.
  // Calls back while the descriptor is ready (EPOLLIN, EPOLLOUT); what is to be called and for
  // which events may be changed by another watch(). A closed or broken one counts as ready.
  void watch(int fd, uint32_t events, Call ready);
  void rewatch(int fd, uint32_t events);
  void unwatch(int fd);  // before it is closed

  // A time to be called at, once, for each `who`; INT64_MAX: never.
  void set_timer(const void* who, int64_t at_ns, Call call);

 private:
  struct Watched {
    uint32_t events = 0;
    uint64_t id = 0;  // of this watch: a descriptor's number comes again
    std::shared_ptr<Call> ready;
  };
  struct Reminder {
    int64_t at_ns = INT64_MAX;
    Call call;
  };

  void run();
  void wait();
  bool run_posted();
  void run_reminders();
  int64_t next_ns() const { return times_.empty() ? INT64_MAX : times_.begin()->first; }
  void notify();

  const int64_t spin_ns_;
  Descriptor epoll_;
  Descriptor bell_;
  std::unordered_map<int, Watched> watched_;
  uint64_t ids_ = 0;
  std::multimap<int64_t, const void*> times_;
  std::unordered_map<const void*, Reminder> reminders_;
  std::atomic<bool> asleep_{false};
  std::atomic<bool> news_{false};
  std::atomic<bool> ending_{false};
  std::mutex mutex_;
  std::vector<Call> posted_;
  std::thread thread_;
};

}  // namespace offcore::mcast
