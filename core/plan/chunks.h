// How arrays are cut for slots that are rings of a few chunks a peer, which senders fill while the
// owner empties them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace offcore {

inline constexpr uint32_t kRingDepth = 4;        // chunks of a peer that a slot holds
inline constexpr uint32_t kChunkWords = 8;       // flag words of a peer, which chunks take in turn
inline constexpr uint64_t kChunkAlign = 256;     // whole elements, and vectors
inline constexpr uint32_t kChunksMax = 1 << 14;  // their numbers are flag values

inline uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

// Where chunks are shorter, by a fifth from one to the next: at the end, so that little is left to
// do when the last one has come; at the beginning, so that those who are slower than the link
// begin early.
enum class Taper : uint8_t { none, end, begin };

// Parts of arrays in chunks: all parts are cut at the same offsets.
class Chunks {
 public:
  Chunks() = default;
  // All of so many bytes, in parts of at most `largest`.
  Chunks(uint64_t bytes, uint64_t largest);
  // So many pieces at most.
  Chunks(uint32_t pieces, Taper taper, uint64_t largest);

  uint64_t bytes() const { return bytes_; }  // of the longest
  uint32_t count(uint64_t part) const {
    return static_cast<uint32_t>(std::lower_bound(ends_.begin(), ends_.end(), part) -
                                 ends_.begin()) +
           (part > 0);
  }
  uint64_t begin(uint32_t chunk) const { return chunk == 0 ? 0 : ends_[chunk - 1]; }
  // Of a part's chunk; those behind its end are empty.
  uint64_t bytes_of(uint64_t part, uint32_t chunk) const {
    return std::min(ends_[chunk], part) - std::min(begin(chunk), part);
  }

 private:
  uint64_t bytes_ = 1;
  std::vector<uint64_t> ends_;
};

// Chunk sizes that are worth a look for parts of at most `largest` bytes from each of `peers`, the
// largest first: `pieces_max` pieces or fewer, and slots of a bounded size.
std::vector<uint64_t> chunk_sizes(uint64_t largest, uint64_t peers, uint32_t pieces_max);

// The same, but as cuts, also tapered. With `captured`, the ring has to hold all chunks: the words
// of captured programs count no further.
std::vector<Chunks> chunkings(uint64_t largest, uint64_t peers, bool captured);

}  // namespace offcore
