// How ranks meet at an address where rank 0 listens: every rank hands over a few bytes, its card,
// and gets all ranks' cards and a key that only they know.
//
//   rank                                store (rank 0)
//    |--- knock: nonce, place, secret? --->|
//    |<-- challenge: nonce, place, secret?, Unix name
//    |--- hello: rank, ranks, port, card ->|
//    |<-- progress: the missing ranks      |  now and then
//    |<-- roster: salt of the key, cards   |  once all have come; or refusal: code, message
//
// From the challenge on each frame ends with its code under the job's secret (proof.h), so each
// side has proved itself before it is believed. Without a secret nobody can prove anything over
// TCP: the challenge names a Unix socket then, where the rank knocks again, and both sides look
// whose process the other one is. Ranks on other hosts, or in other network namespaces, therefore
// need a secret. A rank that hangs up before all have come may come again.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/base/error.h"

namespace offcore {

inline constexpr uint64_t kCardBytesMax = 4 << 10;

struct Roster {
  std::string secret;              // the job's; empty: it has none
  std::string key;                 // random, the same at every rank, different for every meeting
  std::vector<std::string> cards;  // by rank
};

// Errors: timeout (names the missing ranks), mismatch (worlds of different sizes, secrets), invalid
// (two processes with one rank; strangers' rank 0; no secret where one is needed), peer (rank 0
// died), driver (the port is taken, somebody else's server). One that rank 0 finds reaches every
// rank that has come.
Roster meet(const std::string& store, uint32_t rank, uint32_t ranks, const std::string& card,
            const Deadline& deadline);

// "rank 2", "ranks 2, 5"
template <typename Number>
std::string rank_list(const std::vector<Number>& ranks) {
  constexpr size_t kShown = 16;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size() && i < kShown; ++i) text += cat(i == 0 ? "" : ", ", ranks[i]);
  return ranks.size() > kShown ? cat(text, ", ... (", ranks.size(), " in all)") : text;
}

}  // namespace offcore
