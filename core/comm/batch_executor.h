// Batches of copies that one process makes between memories of any kind, by address: planned,
// launched once, and not kept; or planned once and launched many times (core/comm/copy_requests.h).
//
// An executor holds a backend for one set of GPUs (or for simulated or software engines), opened at
// the first batch that needs it and kept until the process ends. What streams were given together
// is a lane: their batches are in order, those of other streams may overtake them.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/backend/registry.h"
#include "core/base/fork.h"
#include "core/comm/lane.h"
#include "core/plan/batch.h"

namespace offcore {

inline constexpr int32_t kHostHome = -1;

// Columns of equal length. Places are addresses, in phantom memory offsets; homes are ranks, or
// kHostHome.
struct BatchEntries {
  std::vector<uint64_t> dsts;
  std::vector<uint64_t> srcs;
  std::vector<uint64_t> sizes;
  std::vector<int32_t> dst_homes;
  std::vector<int32_t> src_homes;
  std::vector<int> gpus = {};  // by rank, where ranks are GPUs
  std::vector<std::pair<uint64_t, int32_t>> seams =
      {};  // places and homes, as plan_batch takes them
  Rank ranks = 1;
};

// Finds the homes of addresses on GPUs and in pinned memory. `gpu`: one to look from, which is rank
// 0 where no entry names any. Throws invalid, or unsupported for copies from host to host, with the
// entry's number.
void locate_on_gpus(BatchEntries& entries, int gpu);
// Throws invalid where CPUs are to copy what they cannot reach.
void check_reach_of_cpus(const BatchEntries& entries, const std::string& machine);

// Throws invalid, naming the first entry of another kind. Known: auto, h2d, d2h, d2d, h2h.
void check_kind(const BatchEntries& entries, const std::string& kind);

// Where the memories of a batch begin: what its program's offsets count from.
struct BatchBases {
  std::vector<uint64_t> device;  // by rank
  uint64_t host = 0;
};

// The entries as moves between at most two buffers, `device` and `host`, and their seams in these.
Moves moves_of(const BatchEntries& entries, bool phantom, BatchBases& bases,
               std::vector<Slice>& seams);

struct BatchCall {
  BatchEntries entries;
  std::vector<uint32_t> swaps;
  BatchPolicy policy;
  bool phantom = false;
  std::vector<uintptr_t> streams;  // as Launch::streams
  std::shared_ptr<void> keep;  // until the copies have ended; a graph's are the caller's to keep
};

// A batch that is planned and loaded, for any number of launches between the same places.
struct PlannedBatch {
  Batch plan;
  BatchBases bases;
  bool within = false;  // something is copied within a rank's memory
  std::unique_ptr<Loaded> loaded;
  uint64_t commands = 0;  // of data
  int64_t plan_ns = 0;
};

// A batch under way, or one that was captured. Dropping it lets it go on by itself.
class BatchExecutor;
struct BatchRun : OfProcess {
  BatchRun() : OfProcess("the batch") {}
  std::shared_ptr<BatchExecutor> executor;
  Batch plan;
  Mode mode = Mode::eager;
  bool within = false;  // something is copied within a rank's memory
  int64_t plan_ns = 0;
  int64_t submit_ns = 0;  // of the caller's time, after planning
  OwnedHere<Run> run;
};

class BatchExecutor : public std::enable_shared_from_this<BatchExecutor> {
 public:
  ~BatchExecutor() { close(); }
  // The process's executor for this backend, machine and set of GPUs. Throws what opening does.
  static std::shared_ptr<BatchExecutor> of(const std::string& backend, const Machine& machine,
                                           Rank ranks, BackendOptions options);
  // One of its own, which shares neither streams nor locks with others.
  static std::shared_ptr<BatchExecutor> open(const std::string& backend, const Machine& machine,
                                             Rank ranks, BackendOptions options);
  // Closes all: waits a little for what is under way, then ends it.
  static void close_all();

  // Throws invalid (what plan_batch does), unsupported, driver, memory.
  std::unique_ptr<BatchRun> start(BatchCall call, const Deadline& deadline);
  // The same in two steps. `call` is planned for a capture if its policy says so.
  PlannedBatch plan(const BatchCall& call);
  std::unique_ptr<BatchRun> launch(const PlannedBatch& planned, BatchCall call,
                                   const Deadline& deadline);
  // Host memory of the caller's, for the engines, as ForeignMemory::register_host.
  Share register_host(std::byte* data, uint64_t bytes, std::shared_ptr<void> keep);

 private:
  using Wakeups = std::deque<Wakeup>;  // one a rank
  struct BatchLane {
    std::vector<uintptr_t> streams;
    Flags flags;
    std::shared_ptr<Wakeups> wakeups;  // of those that use the flags
    std::vector<Share> scratch;        // by rank
  };

  BatchExecutor(std::unique_ptr<Backend> backend, Rank ranks);
  void check_open() const;
  uint32_t lane_of(const std::vector<uintptr_t>& streams);
  Share scratch_of(BatchLane& lane, Rank rank, uint64_t bytes, bool captured);
  Launch bind(const Program& program, const BatchBases& bases, BatchCall& call, uint32_t index,
              const Deadline& deadline);
  void close();

  const Rank ranks_;
  std::mutex mutex_;  // of all below
  std::unique_ptr<Backend> backend_;
  std::deque<BatchLane> lanes_;
};

}  // namespace offcore
