// How the ranks of a job meet: each hands over a few bytes, its card, and gets all ranks' cards and
// a key that only they have.
//
// A bootstrap is an all-gather of bytes, by whatever carries them: an address where rank 0 listens
// (address.h), or what the caller brings, such as a torch.distributed store or group. The carrier
// is not trusted: a card ends with a code under the job's secret, and the key depends on all cards,
// each of which has a random part. So whoever forges, replays or mixes cards but does not know the
// secret keeps ranks from meeting, and no more. Without a secret the carrier's own protection is
// all there is, and it must not let others read along.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/base/error.h"

namespace offcore {

inline constexpr uint64_t kCardBytesMax = 4 << 10;  // with its code

struct Roster {
  std::string secret;              // the job's; empty: it has none
  std::string key;                 // random, the same at every rank, different for every meeting
  std::vector<std::string> cards;  // by rank
};

class Bootstrap {
 public:
  // Every rank's bytes, by rank. Collective.
  using AllGather = std::function<std::vector<std::string>(const std::string&, const Deadline&)>;

  // `where` they meet, for messages. Throws invalid for a rank outside the world.
  Bootstrap(std::string where, uint32_t rank, uint32_t ranks, AllGather all_gather);
  static Bootstrap at(const std::string& address, uint32_t rank, uint32_t ranks);

  const std::string& where() const { return where_; }
  uint32_t rank() const { return rank_; }
  uint32_t ranks() const { return ranks_; }

  // The bare bytes. Throws invalid for too many, mismatch where others than `ranks` answer, and
  // what the carrier throws: timeout names the missing ranks.
  std::vector<std::string> all_gather(const std::string& bytes, const Deadline& deadline) const;
  // Throws mismatch also where a rank has another secret.
  Roster meet(const std::string& card, const Deadline& deadline) const;

 private:
  std::string where_;
  uint32_t rank_;
  uint32_t ranks_;
  AllGather all_gather_;
};

// "rank 2", "ranks 2, 5"
template <typename Number>
std::string rank_list(const std::vector<Number>& ranks) {
  constexpr size_t kShown = 16;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size() && i < kShown; ++i) text += cat(i == 0 ? "" : ", ", ranks[i]);
  return ranks.size() > kShown ? cat(text, ", ... (", ranks.size(), " in all)") : text;
}

}  // namespace offcore
