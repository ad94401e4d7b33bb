// One broadcast, all-gather or reduce-scatter: what is asked for, and the handle that waits for it.
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/fork.h"
#include "core/base/reduction.h"
#include "core/mcast/barrier.h"
#include "core/mcast/block_layout.h"

namespace offcore::mcast {

struct OperationRequest {
  OperationKind kind = OperationKind::broadcast;
  GroupRank root = 0;             // of a broadcast
  std::byte* out = nullptr;       // all blocks; reduce-scatter: this rank's part of the result
  const std::byte* in = nullptr;  // this rank's, copied in its turn; none: it is in `out` already
  std::vector<uint64_t> counts;   // bytes of each rank's block; broadcast: of the root's only
  std::shared_ptr<const void> keep;    // lives until the operation has ended
  std::optional<Reduction> reduction;  // of a reduce-scatter, whose `in` has all ranks' parts

  Sequence sequence() const { return reduction ? Sequence::reductions : Sequence::gathers; }
};
// "all-gather of 300 bytes", "reduce-scatter (sum of float32) of 300 bytes"
std::string text_of(const AnnouncedCall& call);

enum class Phase : uint8_t { queued, barrier, multicast, recovery, handshake, exchange, ended };

// What an operation took, at this rank.
struct OperationReport {
  uint64_t bytes = 0;           // of all blocks
  uint64_t datagrams = 0;       // that brought a chunk
  uint64_t lost_chunks = 0;     // missing when the multicast phase was cut off
  uint64_t fetched_chunks = 0;  // came through the ring
  uint64_t fetches = 0;
  uint64_t shares = 0;     // pieces of other ranks' inputs, of a reduce-scatter
  uint64_t cutoffs = 0;    // firings of the cutoff timer, those that only prolonged it too
  int64_t barrier_ns = 0;  // the phases of the paper's Figure 10
  int64_t multicast_ns = 0;
  int64_t recovery_ns = 0;
  int64_t handshake_ns = 0;
  int64_t exchange_ns = 0;  // of shares, and reducing them

  void add(const OperationReport& other);
};

// Any thread.
class Operation : public OfProcess {
 public:
  // Throws invalid for a reduction that makes no sense.
  Operation(OperationRequest request, std::shared_ptr<const BlockLayout> layout);
  const OperationRequest& request() const { return request_; }
  const std::shared_ptr<const BlockLayout>& layout() const { return layout_; }
  const AnnouncedCall& call() const { return call_; }

  bool ended() const { return done_; }
  // Throws the operation's error, or timeout where it has not ended by then; it goes on.
  OperationReport wait(const Deadline& deadline) const;
  void end(std::optional<Error> error, const OperationReport& report);  // once, by the endpoint

 private:
  OperationRequest request_;
  const std::shared_ptr<const BlockLayout> layout_;
  AnnouncedCall call_;
  mutable std::mutex mutex_;
  mutable std::condition_variable ended_;
  std::atomic<bool> done_ = false;
  std::optional<Error> error_;
  OperationReport report_;
};

}  // namespace offcore::mcast
