// A launch under way, and its queues as tasks.
#pragma once
#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "core/backend/exec/task_executor.h"
#include "core/backend/sdma/encode_program.h"
#include "core/backend/sdma/submit_path.h"

namespace offcore::sdma {

// A queue whose packets go to a ring.
class RingTask : public exec::QueueTask {
 public:
  using exec::QueueTask::QueueTask;
  virtual bool sent() const = 0;  // the engine has all of it
};

struct SdmaSubmission final : exec::TaskSubmission {
  using exec::TaskSubmission::TaskSubmission;
  Rank place_of(const Slice& slice) const { return places.at({slice.buffer, slice.rank}); }
  Report report() const override;

  Addresses addresses;
  std::map<std::pair<BufferId, Rank>, Rank> places;  // where that is: kHostRank, or whose GPU
  std::vector<RingTask*> rings;                      // of the tasks
  std::string_view way;                              // that it takes (submit_path.h)
  bool native = true;                                // false: its swaps are copies
  std::byte* stamps = nullptr;   // of the engines, kTimestampAlign apart; null without rings
  std::vector<Rank> stamped_by;  // whose engine a timestamp is; kHostRank: it is in ns already
  uint32_t ring_group = 0;
  uint64_t after_doomed = 0;  // executor.h: how many had been taken back when it was enqueued
};

// Executes a queue itself: a caller's, or one whose data goes by batches.
std::unique_ptr<exec::QueueTask> make_host_task(SdmaSubmission& submission, uint32_t queue,
                                                SubmitPath& path);

// Sends a queue's packets through a ring; `completed` is a word of the submission's, 0 at first.
std::unique_ptr<RingTask> make_ring_task(SdmaSubmission& submission, const EncodedQueue& stream,
                                         PacketRing& ring, std::byte* completed);

}  // namespace offcore::sdma
