// Contexts, streams and events: streams are in-order queues of work, each with a thread of its own
// that starts with the first work and sleeps when it has none.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "tests/fakes/cuda/abi.h"
#include "tests/fakes/cuda/entry.h"

namespace fakecuda {

class Capture;
class Stream;

// A place in a stream's order, passed once everything before it is complete.
struct Marker {
  void pass();
  void wait() const;
  bool is_passed() const;
  std::atomic<int64_t> time_ns{0};

 private:
  std::atomic<uint32_t> passed_{0};
};

struct Context {
  Device device = 0;
  int physical = 0;
  ContextHandle handle = nullptr;
  std::atomic<Result> error{kSuccess};  // sticky: once set, nothing of the context runs
  std::mutex mutex;
  std::shared_ptr<Stream> legacy;                                 // the default stream
  std::map<std::thread::id, std::shared_ptr<Stream>> of_threads;  // their own default streams
  std::vector<std::weak_ptr<Stream>> blocking;     // streams that the default stream orders
  std::vector<std::weak_ptr<Stream>> every;        // also those that are closed, not through
  static constexpr int64_t kThreads = 132 * 2048;  // that its SMs hold
  int64_t threads_free = kThreads;
  std::set<ContextHandle> peers;  // that it has asked for access to
  std::condition_variable room;   // threads have become free

  std::shared_ptr<Stream> default_stream() {
    const std::lock_guard lock(mutex);
    return legacy;
  }
  void fail(Result code) {
    Result none = kSuccess;
    error.compare_exchange_strong(none, code);
  }
};

// What a piece of work may use while it runs.
struct Engine {
  Context& context;
  std::mt19937_64& random;
  bool loose = false;                              // later copies may overtake what is left to do
  bool copied = false;                             // something, already
  std::vector<std::function<Result()>> left = {};  // of earlier copies
  Result catch_up();                               // does what is left
  void pause();  // for a random while, now and then: what other streams do overtakes
};

// Runs once, or at each replay of the graph it was captured into. What it returns other than
// success is sticky for the context.
using Work = std::function<Result(Engine&)>;

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(std::shared_ptr<Context> context, unsigned flags, bool legacy);

  // Puts the work in order behind what the stream has; waits while the stream is full. Goes into
  // the capture instead, if there is one.
  void push(Work work);
  std::shared_ptr<Marker> mark();  // passes when what was pushed so far is complete
  bool idle();
  void synchronize() { mark()->wait(); }
  void close();  // the thread ends when everything pushed is complete
  bool closed();

  const std::shared_ptr<Context>& context() const { return context_; }
  unsigned flags() const { return flags_; }
  bool is_legacy() const { return legacy_; }

  // Where the stream stands in a capture; guarded by capture_mutex().
  struct Capturing {
    std::shared_ptr<Capture> capture;
    int lane = 0;
    int last = -1;          // its last node
    std::vector<int> next;  // what its next node waits for besides
  } capturing;

 private:
  struct Entry {
    Work work;
    std::shared_ptr<Marker> marker;
  };
  void enqueue(Entry entry);
  void order_against_default_stream();
  void serve();

  const std::shared_ptr<Context> context_;
  const unsigned flags_;
  const bool legacy_;
  std::mt19937_64 random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> queue_;  // its front is running
  bool started_ = false;
  bool closed_ = false;
};

struct Event {
  std::shared_ptr<Context> context;
  unsigned flags = 0;
  std::mutex mutex;
  std::shared_ptr<Marker> marker;    // of the last record; null: never recorded
  std::shared_ptr<Capture> capture;  // where the last record was captured
  std::vector<int> nodes;            // what it stands for there
};

std::mutex& capture_mutex();

Registry<Context, ContextHandle>& contexts();
Registry<Stream, StreamHandle>& streams();
Registry<Event, EventHandle>& events();

// The calling thread's current context. Throws where there is none; current_context() also where
// it has failed.
std::shared_ptr<Context> any_current_context();
std::shared_ptr<Context> current_context();
// One that the default stream orders.
std::shared_ptr<Stream> blocking_stream(const std::shared_ptr<Context>& context);
// Passes when all that the context's streams have been given is complete. Throws where one of them
// is being captured, and spoils that.
std::shared_ptr<Marker> mark_of_context(const std::shared_ptr<Context>& context);
// The stream of a handle, or a default stream of the current context.
std::shared_ptr<Stream> stream_of(StreamHandle handle);
void check_alive(const Context& context);
int64_t now_ns();

}  // namespace fakecuda
