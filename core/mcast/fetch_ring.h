// The fetch ring of one operation (section III-C of the paper): what this rank misses it asks of
// its left neighbour, run by run, nearest source first; what the right neighbour asks it answers as
// soon as it has it. See docs/decisions/0005-mcast.md for why this order cannot deadlock.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/mcast/block_layout.h"
#include "core/mcast/receiver.h"

namespace offcore::mcast {

// Requests of one rank that wait for an answer, at most.
inline constexpr size_t kFetchesWaitingMax = 1024;

class FetchRing {
 public:
  using Receivers = std::vector<std::unique_ptr<Receiver>>;
  using Ask = std::function<void(const ChunkRun&)>;
  using Answer = std::function<void(const ChunkRun&, std::span<const std::byte>)>;

  FetchRing(const Group& group, const Receivers& receivers)
      : group_(group), receivers_(receivers) {}

  void begin(std::shared_ptr<const BlockLayout> layout, std::byte* out);
  // This rank's own block may be asked for. Not before it has been multicast: who is impatient
  // would get twice what is on its way.
  void offer_own() { own_offered_ = changed_ = true; }

  // Asks for missing chunks while few enough are on their way.
  void ask(const Ask& ask);
  // Where the bytes of a run that was asked for go, once; empty: it was not, or they have a place.
  std::span<std::byte> place_of(const ChunkRun& run, uint64_t bytes);
  bool arrived(const ChunkRun& run, uint64_t bytes);  // are in their place; false: it has none

  // The right neighbour asks. False: for what no rank would ask.
  bool asked(const ChunkRun& run);
  void answer(const Answer& answer);      // all that can be by now
  void look_again() { changed_ = true; }  // chunks have come other than by arrived()

  bool owes() const { return !waiting_.empty(); }  // the right neighbour answers
  uint64_t fetches() const { return fetches_; }
  uint64_t fetched_chunks() const { return fetched_chunks_; }
  uint64_t served_chunks() const { return served_chunks_; }

 private:
  bool has(const ChunkRun& run) const;
  std::span<std::byte> bytes_of(const ChunkRun& run) const;
  ChunkRun next();
  uint64_t window_bytes_most() const;

  const Group& group_;
  const Receivers& receivers_;
  std::shared_ptr<const BlockLayout> layout_;
  std::byte* out_ = nullptr;

  // The next chunk to look at: of the source `distance_` to the left.
  GroupRank distance_ = 1;
  uint32_t subgroup_ = 0;
  uint32_t psn_ = 0;  // of that part

  struct Asked {
    ChunkRun run;
    bool placed = false;  // who delivers the bytes has the place, and nobody else gets it
  };
  std::vector<Asked> asked_for_;  // of the left neighbour
  uint64_t bytes_asked_for_ = 0;
  uint64_t window_bytes_ = 0;     // of them, at most; grows with what arrives
  std::deque<ChunkRun> waiting_;  // the right neighbour's
  bool own_offered_ = false;
  bool changed_ = false;  // something has come that may answer one of them
  uint64_t fetches_ = 0;
  uint64_t fetched_chunks_ = 0;
  uint64_t served_chunks_ = 0;
};

}  // namespace offcore::mcast
