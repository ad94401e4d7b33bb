// A communicator as the protocol sees it: who takes part, how buffers are cut, how long things may
// take. The rendezvous hands it over; everything above "Times" must be the same at every rank, and
// the barrier of an operation finds out where it is not.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace offcore::mcast {

using GroupRank = uint32_t;

// Agreed at rendezvous, random for every communicator. `tag` stands in every datagram and tells
// communicators apart; `secret` is never sent: it proves who a peer is, and seals datagrams.
struct GroupKey {
  uint64_t tag = 0;
  std::array<std::byte, 16> secret{};
};

inline constexpr GroupRank kRanksMax = 1 << 16;
inline constexpr uint32_t kSubgroupsMax = 64;
inline constexpr uint32_t kChunkBytesMax = 65000;  // head and chunk fit a UDP datagram

struct Group {
  GroupKey key;
  GroupRank rank = 0;
  GroupRank ranks = 1;
  uint32_t chunk_bytes = 1440;      // payload of a datagram
  uint32_t subgroups = 1;           // multicast groups that a block is split over
  uint32_t chains = 1;              // roots of an all-gather that send at once (the paper's M)
  bool multicast = true;            // false: everything goes through the fetch ring
  bool sealed = false;              // every datagram carries a MAC
  uint64_t first_op = 1;            // number of the first operation
  uint32_t share_bytes = 16 << 20;  // of a reduce-scatter, under way to a rank, about

  // Times, and other matters of this rank alone.
  double link_bytes_s = 1.25e9;         // B_link of the cutoff timer
  int64_t alpha_ns = 10'000'000;        // alpha of the cutoff timer
  int64_t settle_ns = 200'000;          // after every chain's last chunk: for reordered ones
  int64_t timeout_ns = 30'000'000'000;  // of one operation, from its barrier on
  int64_t silence_ns = 5'000'000'000;   // a peer waited for that says nothing for so long is dead
  uint32_t fetch_bytes = 256 << 10;     // of one fetch, about
  uint32_t fetches_in_flight = 8;
};

void check(const Group& group);  // throws invalid

}  // namespace offcore::mcast
