// How arrays are cut for slots that are rings of a few chunks a peer, which senders fill while the
// owner empties them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/machine/machine.h"

namespace offcore {

inline constexpr uint32_t kRingDepth = 4;        // chunks of a peer that a slot holds
inline constexpr uint32_t kChunkWords = 8;       // flag words of a peer, which chunks take in turn
inline constexpr uint64_t kChunkAlign = 256;     // whole elements, and vectors
inline constexpr uint32_t kChunksMax = 1 << 14;  // their numbers are flag values
// Of a chunk that ranks send in step, of all peers.
inline constexpr uint64_t kSteppedBytesMax = 96 << 20;

inline uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

// Where chunks are shorter, by a fifth from one to the next: at the end, so that little is left to
// do when the last one has come; at the beginning, so that those who are slower than the link
// begin early.
enum class Taper : uint8_t { none, end, begin };

// Parts of arrays in chunks: all parts are cut at the same offsets.
class Chunks {
 public:
  Chunks() = default;
  // All of so many bytes.
  explicit Chunks(uint64_t bytes) : bytes_(bytes) {}
  // So many pieces at most, of parts of at most `largest` bytes, behind one of `first` bytes.
  Chunks(uint32_t pieces, Taper taper, uint64_t largest, uint64_t first = 0);

  uint64_t bytes() const { return bytes_; }  // of the longest
  uint32_t count(uint64_t part) const {
    if (part == 0) return 0;
    if (ends_.empty()) {
      return static_cast<uint32_t>(std::min<uint64_t>((part - 1) / bytes_ + 1, UINT32_MAX));
    }
    const auto last = std::lower_bound(ends_.begin(), ends_.end(), part);
    return static_cast<uint32_t>(last - ends_.begin()) + 1;
  }
  uint64_t begin(uint32_t chunk) const { return chunk == 0 ? 0 : end(chunk - 1); }
  // Of a part's chunk; those behind its end are empty.
  uint64_t bytes_of(uint64_t part, uint32_t chunk) const {
    return std::min(end(chunk), part) - std::min(begin(chunk), part);
  }

 private:
  uint64_t end(uint32_t chunk) const {
    return ends_.empty() ? (uint64_t{chunk} + 1) * bytes_ : ends_[chunk];
  }

  uint64_t bytes_ = 1;
  std::vector<uint64_t> ends_;  // empty: all chunks are alike
};

// Whether ranks send a chunk to their peers only once all have sent the one before. Where a switch
// has one port for all that a rank gets, they send by turns, no two to the same peer. One that is
// late meets others at its peer, which makes it later still: after a few turns ports idle for a
// third of the time. All that are late wait for each other instead.
inline bool in_step(const Machine& machine, Rank ranks) {
  return machine.topology == Topology::switched && ranks > 2;
}

// What ranks lose by it, with so many chunks, beyond what the cost model estimates.
inline double steps_ns(const Machine& machine, uint32_t chunks) {
  return chunks > 1 ? (chunks - 1) * machine.cost.step_ns : 0;
}

// Chunk sizes that are worth a look for parts of at most `largest` bytes from each of `peers`, the
// largest first: `pieces_max` pieces or fewer, and of `shared` bytes of all peers.
std::vector<uint64_t> chunk_sizes(uint64_t largest, uint64_t peers, uint32_t pieces_max,
                                  uint64_t shared);

// What cuts of a reduction's parts have to fit.
struct CutLimits {
  uint64_t peers = 1;
  uint64_t shared = 0;    // bytes of a chunk that peers share
  bool captured = false;  // no cut: all of a graph's commands follow each other
  bool behind = false;    // who takes chunks is slower than what brings them
};

// The same, but as cuts, also tapered, with a first chunk of `first` bytes if that is not 0.
std::vector<Chunks> chunkings(uint64_t largest, const CutLimits& limits, uint64_t first);

}  // namespace offcore
