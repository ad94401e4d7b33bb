// The thread that submits what jobs copy, and sees it end. The caller pays for neither, but for the
// first part of a small job that finds the thread asleep: to wake it takes longer than to copy it.
// A caller that waits for a job submits by itself: beside other users of the driver a page takes
// the thread, which has been idle, up to twice as long.
//
// - It keeps a bounded amount enqueued: what is not enqueued yet can be cancelled or overtaken.
// - Of the jobs of a direction the most urgent goes first; equals go in the order of their calls,
//   but jobs by layer together, the lowest layer first.
// - Jobs that touch the same block or slot, one of them writing, are copied in the order of their
//   calls, whatever their priorities and directions: the later one begins when the earlier one's
//   copies have ended, or (in one direction, where one engine copies) are enqueued. Waiting makes
//   the earlier one as urgent.
// - A job that comes after a mark is enqueued once that has passed, and holds up no other.
// - Small pages go by both engines while the other direction has none on its way (engine_split.h),
//   or are packed (packing.h).
// - Where there are neighbours' links, large jobs of all layers go over several: each part over the
//   one that is expected to bring it first, by the speeds that were measured. A link that fails is
//   not used any more.
// - Over several links, by both engines, or packed, copies of one direction have no order among
//   each other.
#pragma once
#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "core/kv/engine_split.h"
#include "core/kv/job.h"
#include "core/kv/layout.h"
#include "core/kv/link.h"
#include "core/kv/packing.h"
#include "core/kv/pool.h"

namespace offcore::kv {

inline constexpr uint32_t kPartsOfPace = 4;  // of what is enqueued ahead

struct Pace {
  uint64_t ahead_bytes = uint64_t{32} << 20;  // enqueued in a direction at most, about
  uint32_t ahead_commands = 1024;
};

class TransferWorker {
 public:
  // `keep` is what the caches need, until the last copy has ended.
  TransferWorker(std::shared_ptr<JobQueue> queue, std::shared_ptr<Backend> backend,
                 std::vector<CacheGroup> groups, EngineSplit crossing, Packing packing,
                 std::vector<Neighbour> neighbours, Pace pace, std::shared_ptr<const void> keep,
                 bool checked);

  void run();  // until the queue is closing and nothing is left
  // Enqueues parts for a caller who has found the thread asleep, or waits for a job; whether there
  // were any.
  bool help(bool waits);

 private:
  struct DirectionQueue {
    std::vector<std::shared_ptr<Job>> jobs;  // with parts to be enqueued, the most urgent first
    std::vector<Link> links;
  };
  // Who named a block or slot last, for comparing two jobs: twice the job's number, and 1 if it
  // writes.
  using Marks = std::vector<uint64_t>;

  std::unique_lock<std::mutex> take_turn();
  bool rest();
  bool turn();  // whether there was anything to do
  void collect();
  void admit(const std::shared_ptr<Job>& job);
  void mark(const Job& job);
  bool meets(const Job& job, const Job& other);
  void inherit_priority(Job& job, int32_t urgency);
  void sort(DirectionQueue& direction);
  void drop_cancelled(bool all);
  bool reap(Link& link);
  uint64_t reap(Link& link, LinkLane& lane);
  void end_layer_groups(Job& job);
  // `goes_on`: what comes behind the part is enqueued soon.
  bool submit(DirectionQueue& direction, uint32_t plain_max, bool goes_on);
  void refuse(Link& link, LinkLane& lane, const std::shared_ptr<Job>& job, const Error& failure);
  std::shared_ptr<Job> pick(DirectionQueue& direction);
  static bool goes_before(const Job& job, const Job& earlier);
  bool may_begin(Job& job) const;
  bool may_cross(const Job& job) const;
  bool crosses(const Job& job) const;
  bool is_to_be_packed(const Job& job) const;
  bool in_order(const Job& job) const;
  LinkLane* engine_for(Link& link, const Job& job) const;
  bool has_room(Link& link) const;
  uint64_t share_of(const DirectionQueue& direction, const Job& job) const;
  uint64_t share_of_packing(const Job& job) const;
  uint64_t share_of_engine(const LinkLane& lane, const Job& job, bool goes_on) const;
  Link* choose(DirectionQueue& direction, const Job& job, uint64_t bytes) const;
  uint32_t plain_in_time(const Link& link, uint32_t plain_max) const;
  Part next_part(const Link& link, LinkLane& lane, Job& job, const PartBudget& budget) const;
  void enqueue(Link& link, LinkLane& lane, const std::shared_ptr<Job>& job,
               const PartBudget& budget);
  void stop(const std::shared_ptr<Job>& job, std::optional<Error> failure);
  void finish(const std::shared_ptr<Job>& job);

  const std::shared_ptr<JobQueue> queue_;
  const std::shared_ptr<Backend> backend_;
  const std::vector<CacheGroup> groups_;
  const EngineSplit crossing_;
  const Packing packing_;
  const std::vector<Neighbour> neighbours_;
  const Pace pace_;
  const std::shared_ptr<const void> keep_;
  const bool checked_;
  std::mutex turning_;                        // whoever holds it has all below, and the jobs' share
  bool refused_ = false;                      // a driver has, what crosses
  std::vector<std::shared_ptr<Job>> jobs_;    // that have not ended, by their numbers
  std::array<DirectionQueue, 2> directions_;  // by direction
  const std::vector<size_t> cache_of_;        // of a group: the first one with the same memory
  std::vector<size_t> pool_of_;               // the first one with the same pool
  std::vector<Marks> blocks_;
  std::vector<Marks> slots_;
  uint64_t number_ = 0;
};

}  // namespace offcore::kv
