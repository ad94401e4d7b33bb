// How arrays are cut for slots that are rings of a few chunks a peer, which senders fill while the
// owner empties them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace offcore {

inline constexpr uint32_t kRingDepth = 4;        // chunks of a peer that a slot holds
inline constexpr uint64_t kChunkAlign = 256;     // whole elements, and vectors
inline constexpr uint32_t kChunksMax = 1 << 14;  // their numbers are flag values
inline constexpr uint32_t kChunkQueues =
    2;  // one queue's signals are sent while another's data flows

inline uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

// A part in chunks of one size, but for the first, which is half as long where several queues take
// them by turns: queues that share a link would end chunks together, and leave it idle while they
// signal.
class Chunks {
 public:
  Chunks() = default;
  // Of parts of at most `largest` bytes.
  Chunks(uint64_t bytes, uint64_t largest, uint32_t queues) : bytes_(bytes) {
    if (queues > 1 && count(largest) > queues) shift_ = bytes / 2 / kChunkAlign * kChunkAlign;
  }

  uint64_t bytes() const { return bytes_; }  // of the longest
  uint32_t count(uint64_t part) const {
    return static_cast<uint32_t>((part + shift_ + bytes_ - 1) / bytes_);
  }
  uint64_t begin(uint32_t chunk) const { return chunk == 0 ? 0 : chunk * bytes_ - shift_; }
  // Of a part's chunk; those behind its end are empty.
  uint64_t bytes_of(uint64_t part, uint32_t chunk) const {
    return std::min(begin(chunk + 1), part) - std::min(begin(chunk), part);
  }

 private:
  uint64_t bytes_ = 1;
  uint64_t shift_ = 0;
};

// Chunk sizes that are worth a look for parts of at most `largest` bytes from each of `peers`, the
// largest first: `pieces_max` pieces or fewer, and slots of a bounded size, unless the ring has to
// hold all chunks (captured programs, whose words count no further).
std::vector<uint64_t> chunk_sizes(uint64_t largest, uint64_t peers, uint32_t pieces_max,
                                  bool captured);

}  // namespace offcore
