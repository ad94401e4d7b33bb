// A launch under way: its queues as tasks that go on a little whenever somebody looks.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/backend/backend.h"
#include "core/backend/sdma/encode_program.h"
#include "core/backend/sdma/submit_path.h"
#include "core/base/error.h"

namespace offcore::sdma {

struct SdmaSubmission;

// One queue of one launch.
class QueueTask {
 public:
  QueueTask(SdmaSubmission& submission, uint32_t queue) : submission_(submission), queue_(queue) {}
  virtual ~QueueTask() = default;
  virtual bool advance() = 0;  // as far as it gets now; false where that is nowhere
  virtual bool ended() const = 0;
  virtual uint32_t reached() const = 0;  // the command that it is at
  // Its run is dead: nothing of it has to be done any more, and what waits has to be let go.
  virtual void release() = 0;
  virtual bool sent() const { return true; }  // the engine has all of it

  uint32_t queue() const { return queue_; }

 protected:
  const Queue& commands() const;
  SdmaSubmission& submission_;
  const uint32_t queue_;
};

struct SdmaSubmission {
  SdmaSubmission(std::shared_ptr<const Program> program_, Launch launch_)
      : program(std::move(program_)), launch(std::move(launch_)) {}

  std::shared_ptr<const Program> program;  // as it is laid out for this launch's addresses
  Launch launch;
  Addresses addresses;
  std::map<std::pair<BufferId, Rank>, Rank> places;  // where that is: kHostRank, or whose GPU
  std::vector<std::shared_ptr<void>> kept;           // pinned memory, words
  std::vector<std::vector<std::unique_ptr<QueueTask>>> parts;  // of each rank
  uint32_t parts_left = 0;
  std::string_view way;         // that it takes (submit_path.h)
  bool native = true;           // false: its swaps are copies
  std::byte* stamps = nullptr;  // of the engines, kTimestampAlign apart; null without rings
  std::vector<int64_t> timestamps_ns;
  std::vector<Rank> stamped_by;  // whose engine a timestamp is; kHostRank: it is in ns already
  uint64_t engine_time = 0;
  uint32_t ring_group = 0;
  uint64_t after_doomed = 0;  // executor.h: how many had been taken back when it was enqueued
  int64_t launch_ns = 0;
  int64_t control_ns = 0;
  int64_t end_ns = 0;
  std::atomic<uint32_t> poisoned_by{0};
  std::optional<Error> error;  // what a task threw
  std::atomic<bool> done{false};

  bool ended() const { return done.load(std::memory_order_acquire); }
  Rank place_of(const Slice& slice) const { return places.at({slice.buffer, slice.rank}); }
  std::string position() const;
  Report report() const;
};

// Executes a queue itself: a caller's, or one whose data goes by batches.
std::unique_ptr<QueueTask> make_host_task(SdmaSubmission& submission, uint32_t queue,
                                          SubmitPath& path);

// Sends a queue's packets through a ring; `completed` is a word of the submission's, 0 at first.
std::unique_ptr<QueueTask> make_ring_task(SdmaSubmission& submission, const EncodedQueue& stream,
                                          PacketRing& ring, std::byte* completed);

}  // namespace offcore::sdma
