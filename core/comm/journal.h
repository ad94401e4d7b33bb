// What each rank has launched lately, in memory that all ranks see, so that ranks that disagree
// (other operations, another order, other sizes) find out instead of hanging or corrupting.
//
// Every launch of a lane leaves one record under its sequence number: the digest of its plan key,
// where the data lands and whether the rank knew that already (decided), and the key's text for the
// error message. Nothing is sent: a rank looks at its peers' records when it has no plan for a key,
// when a wait takes long, and when an operation has completed.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/ir/command.h"

namespace offcore {

// What one rank says of one launch.
struct Entry {
  uint64_t key = 0;      // digest of the key's text
  uint64_t place = 0;    // digest of where the data lands; what the rank proposes while undecided
  bool decided = false;  // the rank has kept the plan
  std::string text;      // "all_gather ranks=2 ... out=window 1+0", cut to the record's room
};

class Journal {
 public:
  static constexpr uint64_t kRecords = 64;
  static constexpr uint64_t kRecordWords = 32;
  static constexpr uint64_t kBytes = (kRecords * kRecordWords + 8) * sizeof(uint64_t);

  // `bases`: each rank's kBytes of zeroed shared memory.
  explicit Journal(std::vector<std::byte*> bases) : bases_(std::move(bases)) {}

  void publish(Rank rank, uint64_t sequence, const Entry& entry);
  // The rank's record of this launch; nothing when it has not come there, or is far ahead of it.
  std::optional<Entry> read(Rank rank, uint64_t sequence) const;
  // Whether the rank has left a record of this launch that says something else. Looks at one cache
  // line of the rank's: every wait asks this.
  bool contradicts(Rank rank, uint64_t sequence, const Entry& mine) const;
  // How many launches the rank has published.
  uint64_t published(Rank rank) const;

 private:
  std::atomic_ref<uint64_t> word(Rank rank, uint64_t index) const {
    return std::atomic_ref<uint64_t>(reinterpret_cast<uint64_t*>(bases_[rank])[index]);
  }

  std::vector<std::byte*> bases_;
};

}  // namespace offcore
