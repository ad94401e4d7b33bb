// A lane: what a (communicator, stream) pair owns, and nothing else may touch: flag words, slots,
// epoch and sequence. Launches of a lane run in the order of their calls, rank by rank.
//
// Why each way of entering is safe (p writes into q's memory):
//   barrier  p waits for q's entry signal, which q's caller sends when q has left every earlier
//            operation of the lane.
//   eager    p writes into a slot of q, never into q's buffer. Two slots alternate among full
//            exchanges: before p writes slot j again it has finished the full exchange in between,
//            so it has heard from q in that one, and q sent that only after it had emptied slot j.
//            Operations that are no full exchange never use these two: they use a third slot, and
//            an entry signal guards it.
//   credits  as barrier, but q's signal for the next call may go out as soon as q's caller has
//            released the buffer. Each plan has words of its own for that: a credit is for the next
//            launch of its plan, and for no other one of the lane.
//   promise  the caller says that q's buffer is free.
//
// Flag values are the lane's epoch + the program's values, compared cyclically; the epoch moves on
// by the program's span at each launch. A word always has the same writing rank (see lower.cpp).
// A captured graph takes no part in this: it has words, a slot and scratch of its own.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "core/backend/backend.h"
#include "core/comm/journal.h"
#include "core/window/window.h"

namespace offcore {

// Zeroed host memory of every rank, visible to all of them, never phantom.
struct ControlMemory {
  std::vector<std::byte*> bases;
  std::shared_ptr<void> owner;

  // Collective where ranks are processes.
  static ControlMemory create(Rendezvous* rendezvous, Rank ranks, uint64_t bytes,
                              const Deadline& deadline);
};

// Flag words for one sequence of launches: control memory, or a window where engines cannot wait
// for that.
struct Flags {
  ControlMemory memory;
  uint64_t words = 0;
  uint32_t epoch = 0;

  static Flags create(Backend& backend, Rendezvous* rendezvous, Rank ranks, uint64_t words,
                      const Deadline& deadline);
  // The index-th of many Flags of `words` words each that lie in these.
  Flags part(uint64_t index, uint64_t words) const;
  // The rank's words, or the words in host memory (which lie behind those of rank 0).
  std::byte* base(Rank rank) const {
    return rank == kHostRank ? memory.bases[0] + words * kWordBytes : memory.bases[rank];
  }
};

class Slots {
 public:
  static constexpr uint32_t kEager = 2;
  static constexpr uint32_t kGuarded = 2;  // the index of the third slot
  static constexpr uint32_t kCount = 3;

  uint64_t bytes() const { return bytes_; }
  // Replaces the slots by larger ones. Collective where ranks are processes. Launches under way
  // keep the old ones.
  void grow(Backend& backend, Rendezvous* rendezvous, Rank ranks, uint64_t bytes,
            const Deadline& deadline, uint32_t count = kCount);
  // The slot of the next launch: alternating for full exchanges, the guarded one otherwise.
  uint32_t next(bool full_exchange) { return full_exchange ? turn_++ % kEager : kGuarded; }
  std::byte* base(Rank rank, uint32_t slot) const {
    std::byte* base = window_->base(rank);
    return base == nullptr ? nullptr : base + slot * bytes_;
  }
  const std::shared_ptr<Window>& window() const { return window_; }

 private:
  std::shared_ptr<Window> window_;
  uint64_t bytes_ = 0;
  uint32_t turn_ = 0;
};

// The words, slots and scratch of one sequence of launches. A lane has one; a prelaunched program has
// its own, because it takes its values and its slot when it is armed, ahead of its turn in the lane.
struct Track {
  Flags flags;
  Slots slots;
  std::vector<Share> scratch;  // one a local rank, where a program has any
};

// What one CUDA graph with operations of a lane owns: its values repeat at each replay, whatever the
// lane does in between. Its words are 0 before and after a replay (see `replay`, verify.h), and its
// one slot is guarded by the entry round that every captured program has.
struct Graph {
  uint64_t capture = 0;  // the backend's number
  Track track;
};

struct Lane {
  uint32_t index = 0;
  Track track;
  std::vector<std::unique_ptr<Graph>> graphs;  // as they were captured: alike on every rank
  ControlMemory records;
  Journal journal{{}};
  uint64_t sequence = 0;  // launches so far: the next one's number

  Graph* find(uint64_t capture) const;  // null: no operation of the lane is in it yet
};

}  // namespace offcore
