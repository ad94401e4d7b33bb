// A load or store under way, as its caller sees it, and as the worker keeps it.
#pragma once
#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/backend/backend.h"
#include "core/base/error.h"
#include "core/base/threads.h"
#include "core/kv/command_builder.h"
#include "core/kv/spare.h"

namespace offcore::kv {

class Job;

inline constexpr uint32_t kCoresMany = 4;   // two that spin leave as many to others
inline constexpr uint32_t kCoresSpare = 8;  // one that does for long is not missed

// How long a worker looks for jobs when it has none: one that has slept is slow over all of
// the next one.
inline int64_t usual_linger_ns() {
  const uint32_t cores = usable_cores();
  return cores >= kCoresSpare ? 50'000'000 : cores >= kCoresMany ? 2'000'000 : 200'000;
}

// Where callers and the worker meet. One mutex guards it, and what of jobs both look at.
struct JobQueue {
  explicit JobQueue(int64_t linger) : linger_ns(linger) {}

  std::mutex mutex;
  std::condition_variable work;     // the worker sleeps here
  std::condition_variable changed;  // those who wait for jobs
  std::deque<std::shared_ptr<Job>> inbox;
  uint64_t under_way = 0;  // jobs that have not ended
  SpareLists spare;        // of ended jobs, with a mutex of its own
  std::atomic<bool> closing{false};
  bool cancel_all = false;
  bool ended = false;                // the worker is through
  std::atomic<bool> news{false};     // for the worker: something above, or a job, has changed
  std::atomic<bool> asleep{false};   // the worker is, or wakes: so long who needs it does its work
  std::atomic<uint32_t> helpers{0};  // who wait, and submit meanwhile: the worker keeps out
  const int64_t linger_ns;           // how long the worker looks for jobs before it sleeps
  // The same of who waits for it to enqueue, and of the worker for copies to end: to be woken
  // takes up to a hundred microseconds of a transfer that takes hundreds.
  const int64_t brief_ns = usable_cores() >= kCoresMany ? 2'000'000 : 200'000;
  // The same of who waits for a job's end, as drivers do: most jobs end within it.
  const int64_t spin_ns = usable_cores() >= kCoresMany ? 20'000'000 : 200'000;
};

struct TransferRequest : JobLists {  // `rows`: where the slots lie, once they are pinned
  Direction direction = Direction::load;
  uint32_t group = 0;
  int32_t priority = 0;
  uint32_t layers_together = 0;  // 0: all
  std::unique_ptr<Mark> after = nullptr;
  bool held = false;  // engines wait for `after`, not the thread: all behind it waits, too
};

// What a job did. All that was enqueued has been copied.
struct JobReport {
  uint64_t blocks = 0;  // the first ones of those asked for, with all layers
  uint32_t layers = 0;  // the first ones, of all blocks
  uint64_t pages = 0;   // descriptors, if each page had its own
  uint64_t commands = 0;
  uint64_t strided = 0;  // of these, commands of several pages
  uint64_t bytes = 0;
  std::vector<uint64_t> link_bytes;  // over the own link, then each neighbour's
  Calls calls;                       // of the driver, for what has ended
  int64_t enqueue_ns = 0;            // of the thread's time, the driver's calls included
  int64_t queued_ns = 0;             // from the call until its first command was enqueued
  int64_t copy_ns = 0;               // from then until its end was seen
  uint32_t sms = 0;                  // that packed, at a time
  int64_t sm_ns = 0;                 // of all these together
  bool cancelled = false;
};

class Job {
 public:
  Job(std::shared_ptr<JobQueue> queue, TransferRequest request);
  ~Job() { queue_->spare.put(std::move(request_)); }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  bool done() const { return ended_.load(std::memory_order_acquire); }
  // Throws timeout, and what the job failed with.
  void wait(const Deadline& deadline);
  // As wait, until that layer has come for all blocks. Throws cancelled if it never will.
  void wait_layer(uint32_t layer, const Deadline& deadline);
  // A stream is to wait for the layer: its copies are enqueued before all bounds.
  void want(uint32_t layer);
  bool enqueued(uint32_t layer) const { return enqueued_ > layer_group_of(layer) || done(); }
  // Makes a stream wait for a layer that is wanted, once its copies are enqueued: until then the
  // caller waits.
  void enqueue_wait(uint32_t layer, Streams& streams, uintptr_t stream, const Deadline& deadline);
  // The same by a gate, which nobody waits for. It is open, too, once the job has ended without the
  // layer. Throws what the backend's gates do.
  void enqueue_gate(uint32_t layer, Streams& streams, uintptr_t stream);
  // What is not enqueued yet is not copied.
  void cancel();
  JobReport report() const;  // once done
  const TransferRequest& request() const { return request_; }
  uint32_t layers() const { return layers_; }

 private:
  friend class TransferWorker;
  friend class Transfer;

  uint32_t layer_group_of(uint32_t layer) const;
  [[noreturn]] void fail_timeout(const Deadline& deadline) const;
  [[noreturn]] void fail_layer(uint32_t layer) const;

  const std::shared_ptr<JobQueue> queue_;
  TransferRequest request_;
  uint32_t layers_ = 0;
  uint32_t together_ = 0;

  // The worker's alone.
  std::optional<CommandBuilder> builder_;
  bool packed_ = false;
  int32_t urgency_ = 0;                      // its priority, or that of a job that waits for it
  std::vector<std::shared_ptr<Job>> waits_;  // what it may not overtake
  uint64_t number_ = 0;
  uint32_t parts_ahead_ = 0;                                          // enqueued and not ended
  std::vector<uint32_t> layer_groups_ahead_;                          // the same, by layer group
  std::map<std::pair<size_t, uint16_t>, std::shared_ptr<Run>> last_;  // by lane
  int64_t called_ns_ = 0;

  // By JobQueue::mutex; the report is the worker's until the job has ended.
  std::vector<std::vector<std::shared_ptr<Run>>>
      layer_groups_;                          // what ends each; none: it is not whole
  std::vector<std::shared_ptr<Gate>> gates_;  // of each, where there is one that is closed
  uint32_t layer_groups_done_ = 0;
  std::optional<Error> failure_;
  JobReport report_;

  std::atomic<int64_t> began_ns_{-1};
  std::atomic<uint32_t> urgent_{0};    // layer groups for which somebody waits with a stream
  std::atomic<uint32_t> enqueued_{0};  // layer groups, wholly
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> ended_{false};
};

}  // namespace offcore::kv
