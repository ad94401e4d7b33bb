// The hot path of a leaf: datagrams of one subgroup are checked, marked in a bitmap and copied to
// their places. The network's buffers are the staging ring: chunks may come in any order and more
// than once.
//
// A receive worker holds a Batch while it hands over what one system call brought. The lock that a
// batch takes is this receiver's alone, and the control thread takes it only where an operation
// begins, is cut off or ends; hence no two workers share anything. Nothing is allocated.
#pragma once
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "core/mcast/bitmap.h"
#include "core/mcast/block_layout.h"
#include "core/mcast/wire.h"

namespace offcore::mcast {

// Of one receiver since its beginning. Datagrams are counted once: as taken or as what was wrong.
struct ReceiverCounters {
  uint64_t taken = 0;  // datagrams that brought a chunk
  uint64_t bytes = 0;  // of those chunks
  uint64_t duplicates = 0;
  uint64_t foreign = 0;    // another communicator's, or none of ours at all
  uint64_t stale = 0;      // of an operation that is not running
  uint64_t malformed = 0;  // numbers or lengths that do not fit the operation
  uint64_t forged = 0;     // wrong MAC

  void add(const ReceiverCounters& other);
};

class Receiver {
 public:
  // `wake` is called, without the lock, when the control thread has something to look at.
  Receiver(const Group& group, uint32_t subgroup, std::function<void()> wake);

  // A worker's visit. One at a time for each receiver.
  class ReceiveVisit {
   public:
    explicit ReceiveVisit(Receiver& receiver) : receiver_(receiver), lock_(receiver.mutex_) {}
    ~ReceiveVisit();
    // What one receive brought: datagrams of `segment_bytes` one after the other, the last one may
    // be shorter (GRO). One datagram: segment_bytes = buffer.size(). Any bytes are safe.
    void take(std::span<const std::byte> buffer, uint32_t segment_bytes);

    // For a network that can scatter: where the chunks go that follow the last one that came, so
    // that they need not be copied if it is they that come next. Fills `places` from its front,
    // each with room for chunk_bytes; how many. They are missing, so whatever is written there does
    // no harm as long as this batch lives.
    size_t next_places(std::span<std::byte*> places) const;
    // Datagrams of chunk_bytes, heads (head_bytes of each, one after the other) and chunks apart,
    // the chunks in the first of next_places' places. Stops at the first that is not the one whose
    // place it has, before anything is written over; how many were taken.
    size_t take_placed(std::span<const std::byte> heads, std::span<std::byte* const> places);
    uint64_t missing() const { return receiver_.missing_; }  // chunks

   private:
    Receiver& receiver_;
    std::unique_lock<std::mutex> lock_;
  };

  // Control thread, from here on. What comes is for this operation, until disarm.
  void arm(std::shared_ptr<const BlockLayout> layout, uint64_t op, std::byte* out);
  void disarm();
  void report_all();  // from now on every chunk that comes is news, until the next arm

  struct ReceiverState {
    uint64_t missing = 0;  // chunks
    uint64_t taken = 0;    // datagrams that brought one, for this operation
    bool ended = false;    // every chain's last chunk has come
  };
  ReceiverState state() const;
  bool has(const ChunkRun& run) const;  // of this subgroup's part, and not this rank's block
  // The next run of missing chunks of a source's part at or after `psn`, at most `most`; they are
  // claimed: datagrams that bring them are duplicates from now on. Empty: chunks == 0.
  ChunkRun claim(GroupRank source, uint32_t psn, uint32_t most);
  void fetched(const ChunkRun& run);  // what was claimed has come

  ReceiverCounters counters() const;
  uint64_t state_bytes() const;  // bitmaps and table: what grows with the buffer and the ranks

 private:
  struct Source {             // what a datagram of this source is checked against
    uint64_t bit = 0;         // of the first chunk
    uint32_t psn = 0;         // of the first chunk
    uint32_t chunks = 0;      // 0: no datagram of it is expected
    uint32_t last_bytes = 0;  // of the last chunk
    bool closes = false;      // its last chunk is the last one of its chain here
    std::byte* place = nullptr;
  };
  void close_chains();
  void take_one(const std::byte* datagram, const std::byte* payload, uint32_t bytes);

  const Group& group_;
  const uint32_t subgroup_;
  const std::function<void()> wake_;

  mutable std::mutex mutex_;
  std::shared_ptr<const BlockLayout> layout_;  // none: nothing is expected
  uint64_t op_ = 0;
  std::vector<Source> sources_;
  Bitmap taken_;    // by datagram or by claim
  Bitmap claimed_;  // and not fetched yet; empty before the first claim
  uint64_t missing_ = 0;
  uint64_t lasts_missing_ = 0;
  uint64_t taken_now_ = 0;
  bool tells_all_ = false;
  GroupRank next_source_ = 0;  // of the chunk that may come next
  uint32_t next_index_ = 0;
  bool news_ = false;  // for the control thread
  ReceiverCounters counters_;
};

}  // namespace offcore::mcast
