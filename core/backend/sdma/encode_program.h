// From a program to the packets of its engine queues, and to other addresses.
//
// What orders what: copies of a queue overlap until a FENCE or an ATOMIC. A signal is a FENCE. A
// fence command is a FENCE to a scratch word that nobody reads, and so is what a poll or a
// timestamp needs when data commands precede it; the value tells the two apart.
//
// A stream can be launched again elsewhere: its patches name the dwords that change, and replay
// writes only those. A rectangle never spans ranks, because each rank's buffer may move by itself.
#pragma once
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "core/ir/program.h"

namespace offcore::sdma {

inline constexpr uint64_t kBaseAlign = 64;  // a replay moves buffers by multiples of it
inline constexpr uint32_t kFenceCommand = 0;
inline constexpr uint32_t kFenceImplied = 1;

// Where a program's memory lies, as engines address it.
struct Addresses {
  std::map<std::pair<BufferId, Rank>, uint64_t> bases;  // of what the program's queues address
  uint64_t scratch = 0;                                 // a dword that nobody reads
  uint64_t timestamps = 0;                              // timestamp n at + 32 * n
  uint32_t epoch = 0;                                   // flag values are epoch + the program's

  uint64_t base(BufferId buffer, Rank rank) const;  // throws invalid where there is none
  uint64_t of(const Slice& slice) const;            // words are kWordBytes apart
};

// A dword, or two, that a replay writes.
struct Patch {
  enum class PatchKind : uint8_t {
    address,    // two dwords: the base of (buffer, rank) + value
    flag,       // one: epoch + value
    scratch,    // two
    timestamp,  // two: timestamps + value
  };
  uint32_t dword = 0;
  PatchKind what = PatchKind::address;
  BufferId buffer = 0;
  Rank rank = 0;
  uint64_t value = 0;

  friend bool operator==(const Patch&, const Patch&) = default;
};

// The packets of one engine queue.
struct EncodedQueue {
  uint32_t queue = 0;            // index into program.queues
  std::vector<uint32_t> dwords;  // whole packets
  std::vector<uint32_t> starts;  // of each command: its first dword
  std::vector<Patch> patches;
};

// A stream for each engine queue, and with `callers` for each caller queue too. Throws invalid or
// unsupported, naming queue and command; unsupported for a captured program, whose polls consume.
std::vector<EncodedQueue> encode(const Program& program, const Addresses& addresses,
                                 uint64_t copy_bytes_max, bool callers = false);

// The same stream for other addresses or another epoch: writes the dwords that the patches name.
// Throws invalid where a base does not agree with `from`'s modulo kBaseAlign: encode anew.
void replay(EncodedQueue& stream, const Addresses& from, const Addresses& to);

}  // namespace offcore::sdma
