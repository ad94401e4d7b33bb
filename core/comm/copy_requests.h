// Copies between a GPU's memory and the host's, or within a GPU, that are described once and posted
// many times: what transfer libraries ask of a backend (shim/nixl).
//
// Preparing plans and loads a batch, posting launches it. A driver holds whoever enqueues more than
// its queues take, so each direction of a GPU has streams, locks and a thread of its own: a request
// of few commands is launched by its caller where nothing is in front of it, all others by the
// thread. The requests of a direction begin in the order in which they were posted.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/comm/batch_executor.h"

namespace offcore {

// Memory that requests may name until it is removed.
struct RegisteredMemory {
  int home = kHostMemory;  // or a GPU
  bool removed = false;
  std::shared_ptr<void> pin = nullptr;  // null: on a GPU, or pinned by others
};

// Columns of equal length. All destinations are memory of one home, and all sources.
struct RequestedCopies {
  std::vector<uint64_t> dsts;
  std::vector<uint64_t> srcs;
  std::vector<uint64_t> sizes;
  int dst_home = kHostMemory;
  int src_home = kHostMemory;
  std::vector<std::shared_ptr<RegisteredMemory>> memories = {};  // that they lie in
};

struct CopyRequest;

class CopyRequests : public OfProcess {
 public:
  // An executor of its own each time, for one GPU.
  using Opener = std::function<std::shared_ptr<BatchExecutor>(int gpu)>;

  // `gpu`: whose driver context pins host memory; below 0: that of the first memory on a GPU, or 0.
  explicit CopyRequests(Opener open, int gpu = -1);
  ~CopyRequests();  // drops what is queued, and waits for what is under way
  CopyRequests(const CopyRequests&) = delete;
  CopyRequests& operator=(const CopyRequests&) = delete;

  // Pins host memory that is not pinned yet. Throws invalid where the memory is not of that home,
  // and driver or memory where it cannot be pinned.
  std::shared_ptr<RegisteredMemory> add(uint64_t address, uint64_t bytes, int home);
  // Waits for the requests under way that name it; those that are prepared cannot be posted again.
  // Throws timeout while the driver keeps it pinned.
  void remove(RegisteredMemory& memory, const Deadline& deadline);

  // Throws invalid, naming the entry, as a batch does, and for what does not lie where it should;
  // unsupported for two homes of the same kind that are not one GPU.
  std::shared_ptr<CopyRequest> prepare(RequestedCopies copies);
  // Does not wait for copies. Throws invalid for a request that is under way or whose memory was
  // removed; driver.
  void post(CopyRequest& request);
  // Whether what was posted has ended. Throws why it has failed, once; it can be posted again.
  bool done(CopyRequest& request);
  // Takes it back where it has not begun, or else waits for its end. Throws timeout.
  void cancel(CopyRequest& request, const Deadline& deadline);

 private:
  struct Line {
    std::shared_ptr<BatchExecutor> executor;
    std::deque<CopyRequest*> queue;  // of what is active
    bool busy = false;               // somebody launches
    uint64_t commands = 0;           // launched, and not known to have ended
    std::thread thread = {};         // once something was queued
  };
  // Host memory that was pinned, and may serve several registrations.
  struct PinnedPages {
    uint64_t first = 0;
    uint64_t last = 0;
    std::weak_ptr<void> pin;
    std::weak_ptr<void> registration;  // lives until the driver has given it back
  };
  enum class LineUse : uint8_t { pinning, load, store, within };
  friend struct CopyRequest;

  std::shared_ptr<Line> line_of(int gpu, LineUse use);
  std::shared_ptr<void> pin(uint64_t address, uint64_t bytes);
  void launch(CopyRequest& request, std::unique_lock<std::mutex>& lock);
  void serve(Line& line);
  void end(CopyRequest& request);
  std::shared_ptr<CopyRequest> find_use(const RegisteredMemory& memory) const;

  const Opener open_;
  int gpu_;
  std::mutex opening_;  // of what is opened and pinned, and of gpu_
  std::map<std::pair<int, LineUse>, std::shared_ptr<Line>> lines_;
  std::vector<PinnedPages> pins_;
  std::mutex mutex_;  // of lines, requests and memories
  std::condition_variable changed_;
  std::set<std::shared_ptr<CopyRequest>> active_;  // not idle
  bool closing_ = false;
};

// Copies that are prepared.
struct CopyRequest : OfProcess, std::enable_shared_from_this<CopyRequest> {
  enum class State : uint8_t { idle, queued, launching, launched, failed };

  CopyRequest() : OfProcess("the request") {}

  std::shared_ptr<CopyRequests::Line> line;
  PlannedBatch planned;
  std::vector<std::shared_ptr<RegisteredMemory>> memories;
  State state = State::idle;
  std::shared_ptr<BatchRun> run;
  std::optional<Error> error;
};

}  // namespace offcore
