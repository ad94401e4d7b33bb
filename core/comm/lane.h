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
//   view     p writes into slot j of a ring of S that nothing but views uses. Views are full
//            exchanges and take the slots in turn, so before p writes slot j for view call k + S
//            it has finished view call k + S - 1 and has heard from q in that one. q sent that
//            after all that came before call k + S - 1 on its side: also after its reads of view k,
//            if they are done (on a GPU: ordered) before it makes that call. So q may read view k
//            while it makes S - 2 further view calls, and p needs no entry signal.
//            Calls of other kinds in between only add order. When the ring grows the next calls
//            take new slots, and nothing is written into the old ones any more.
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

// A ring of slots of equal size: a number that are taken in turn by launches whose end proves that
// all have entered and, behind them, one that an entry signal guards, for the others.
class Slots {
 public:
  explicit Slots(uint32_t turning, bool guarded) : turning_(turning), guarded_(guarded) {}

  // Where a launch finds its slot, and what it keeps mapped until it has ended.
  struct SlotPlace {
    std::shared_ptr<Window> window;
    uint64_t offset = 0;
    std::vector<std::shared_ptr<Window>> former = {};

    std::byte* base(Rank rank) const {
      std::byte* base = window ? window->base(rank) : nullptr;
      return base == nullptr ? nullptr : base + offset;
    }
  };

  uint64_t bytes() const { return bytes_; }  // of a slot; 0: there are none yet
  // Replaces the slots by larger ones. Collective where ranks are processes. Launches under way
  // keep the old ones.
  void grow(Backend& backend, Rendezvous* rendezvous, Rank ranks, uint64_t bytes,
            const Deadline& deadline);
  // The slot that the next launch that turns them will take.
  SlotPlace upcoming() const { return {.window = window_, .offset = turn_ % turning_ * bytes_}; }
  // The slot of the next launch: in turn where its end proves that all have entered, else the
  // guarded one.
  SlotPlace take(bool turns);
  // Undoes the last `take`, which gave that: its launch was refused.
  void give_back(SlotPlace place, bool turns);

 private:
  const uint32_t turning_;
  const bool guarded_;
  std::shared_ptr<Window> window_;
  std::vector<std::shared_ptr<Window>> former_;  // whose slots may still be read
  uint64_t bytes_ = 0;
  uint64_t turn_ = 0;  // since the slots grew
};

inline constexpr uint32_t kEagerSlots = 2;
inline constexpr uint32_t kViewSlots = 4;

// The words, slots and scratch of one sequence of launches. A lane has one; a prelaunched program
// has its own, because it takes its values and its slot when it is armed, ahead of its turn in the
// lane.
struct LaneState {
  Flags flags;
  Slots slots{kEagerSlots, true};
  Slots views{kViewSlots, false};
  std::vector<Share> scratch = {};  // one a local rank, where a program has any
};

// What one captured graph with operations of a lane owns: its values repeat at each replay,
// whatever the lane does in between. Its words are 0 before and after a replay (see `replay`,
// verify.h), and
// its one slot is guarded by the entry round that every captured program has. Another graph of the
// lane takes it over once this one is gone on every rank.
struct Graph {
  uint64_t capture = 0;  // the backend's number
  uint64_t number = 0;   // of the lane's graphs: alike on every rank
  LaneState track{.flags = {}, .slots = Slots(1, false)};
};

struct Lane {
  uint32_t index = 0;
  LaneState track;
  ControlMemory records;
  Journal journal{{}};
  uint64_t sequence = 0;                       // launches so far: the next one's number
  std::shared_ptr<const Entry> refused;        // that was published for it, but did not happen
  uint32_t own_tracks = 0;                     // that its plans have
  std::vector<std::unique_ptr<Graph>> graphs;  // as they were made: alike on every rank
  Flags graph_flags;                           // of all of them, once there is one
  uint64_t captured = 0;                       // graphs so far

  Graph* find(uint64_t capture) const;  // null: no operation of the lane is in it yet
};

}  // namespace offcore
