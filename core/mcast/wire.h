// What travels: datagrams over multicast, messages over the reliable connections. Numbers are
// big-endian, and lie at fixed offsets, so that a firewall rule can name one.
//
// Datagram, `head_bytes` and then its chunk (offsets in bytes, after the UDP header):
//    0  magic 0x4f43     2  version     3  flags: bit 0, a MAC follows the header; 6, 7: credits
//    4  PSN: number of the chunk in its root's block (nft: @th,96,32)
//    8  tag of the communicator
//   16  operation: counted in 64 bits from the communicator's first, so it never comes again
//   24  source: the root whose block it is
//   28  subgroup       30  bytes of the chunk
//   32  MAC, 8 bytes, where flags say so: SipHash-2-4 of header and chunk under the secret
// A chunk lies in its block at PSN * chunk_bytes, counted in 64 bits: 32 bits of PSN reach 6 TB of
// one block at 1440 bytes a chunk.
//
// A message has 48 bytes; a `reply` or `share` is followed by payload_bytes of data.
#pragma once
#include <bit>
#include <cstring>
#include <optional>
#include <span>

#include "core/mcast/group.h"

namespace offcore::mcast {

inline constexpr uint16_t kMagic = 0x4f43;
inline constexpr uint8_t kVersion = 1;
inline constexpr uint8_t kFlagSealed = 1;
inline constexpr size_t kFlagsAt = 3;
inline constexpr uint32_t kHeaderBytes = 32;
inline constexpr uint32_t kMacBytes = 8;
inline constexpr uint32_t kHeadBytesMax = kHeaderBytes + kMacBytes;
inline constexpr uint32_t kMessageBytes = 48;
inline constexpr uint64_t kReplyBytesMax = 64 << 20;  // of data after a reply

template <typename Number>
Number load_big(const std::byte* from) {
  Number value;
  std::memcpy(&value, from, sizeof(value));
  if constexpr (sizeof(Number) == 2) value = __builtin_bswap16(value);
  if constexpr (sizeof(Number) == 4) value = __builtin_bswap32(value);
  if constexpr (sizeof(Number) == 8) value = __builtin_bswap64(value);
  return value;
}
template <typename Number>
void store_big(std::byte* to, Number value) {
  static_assert(std::endian::native == std::endian::little);
  if constexpr (sizeof(Number) == 2) value = __builtin_bswap16(value);
  if constexpr (sizeof(Number) == 4) value = __builtin_bswap32(value);
  if constexpr (sizeof(Number) == 8) value = __builtin_bswap64(value);
  std::memcpy(to, &value, sizeof(value));
}

// Chunks of one root's block that travel over one subgroup, one after the other. A transport sends
// each chunk as a datagram: write_head's bytes, then the chunk's.
struct BlockPart {
  uint64_t op = 0;
  GroupRank source = 0;
  uint32_t roots = 1;  // that send at once, the source among them
  uint32_t subgroup = 0;
  uint32_t psn = 0;                 // of the first chunk
  uint32_t chunks = 0;              // 0: nothing to send
  const std::byte* data = nullptr;  // of the first chunk
  uint64_t bytes = 0;               // of all chunks: the last one may be short

  uint64_t offset(uint32_t index, uint32_t chunk_bytes) const {
    return static_cast<uint64_t>(index) * chunk_bytes;
  }
  uint32_t chunk_size(uint32_t index, uint32_t chunk_bytes) const {
    const uint64_t left = bytes - offset(index, chunk_bytes);
    return left < chunk_bytes ? static_cast<uint32_t>(left) : chunk_bytes;
  }
};

// What a head says before the MAC.
struct DatagramHead {
  uint16_t magic = kMagic;
  uint8_t version = kVersion;
  uint8_t flags = 0;
  uint32_t psn = 0;
  uint64_t tag = 0;
  uint64_t op = 0;
  GroupRank source = 0;
  uint16_t subgroup = 0;
  uint16_t bytes = 0;  // of the chunk
};

// In the header, so that a receiver loads only what it looks at.
inline DatagramHead read_head(const std::byte* from) {
  return {.magic = load_big<uint16_t>(from),
          .version = static_cast<uint8_t>(from[2]),
          .flags = static_cast<uint8_t>(from[kFlagsAt]),
          .psn = load_big<uint32_t>(from + 4),
          .tag = load_big<uint64_t>(from + 8),
          .op = load_big<uint64_t>(from + 16),
          .source = load_big<GroupRank>(from + 24),
          .subgroup = load_big<uint16_t>(from + 28),
          .bytes = load_big<uint16_t>(from + 30)};
}
void write_head(const DatagramHead& head, std::byte* out);  // kHeaderBytes

// Bytes before the chunk in each datagram of a group.
inline uint32_t head_bytes(const Group& group) {
  return group.sealed ? kHeaderBytes + kMacBytes : kHeaderBytes;
}

// Writes the head of a part's index-th chunk (head_bytes of it).
void write_head(const Group& group, const BlockPart& part, uint32_t index, std::byte* out);

// The MAC of a datagram: of its 32 header bytes and its chunk.
uint64_t mac_of(const GroupKey& key, const std::byte* header, std::span<const std::byte> chunk);

// A communicator has two sequences of operations, which run beside each other; operations of one
// run one after the other, and each sequence counts its own.
enum class Sequence : uint8_t { gathers, reductions };
inline constexpr uint8_t kSequences = 2;

enum class MessageKind : uint8_t {
  hello,     // the first on a connection, by who opened it: see hello_to
  barrier,   // detail: round; the rest: what the sender is about to do, see barrier.h
  activate,  // the chain's turn is yours
  fetch,     // of the left neighbour: [psn, psn + chunks) of source's block
  reply,     // the same chunks; their bytes follow
  final,     // to the left neighbour: this rank has everything and will fetch no more
  probe,     // are you alive?
  alive,     // yes
  abort,     // the operation has failed: detail is the error's code, source who is to blame
  goodbye,   // this rank closes its communicator; nothing follows
  share,     // piece `psn` of what the sender gives to the receiver's part; its bytes follow
  taken,     // this rank has reduced its pieces [0, psn): there is room for more
};
inline constexpr uint8_t kMessageKinds = 12;

struct Message {
  MessageKind kind = MessageKind::probe;
  uint32_t detail = 0;
  uint64_t op = 0;
  GroupRank source = 0;
  uint32_t psn = 0;
  uint32_t chunks = 0;
  uint64_t value = 0;
  Sequence sequence = Sequence::gathers;  // whose operation it is about
  uint64_t payload_bytes = 0;             // of a reply or share: what follows the message

  bool operator==(const Message&) const = default;
};

void encode(const Message& message, std::byte* out);  // kMessageBytes
// Empty for bytes that are no message: a connection that delivers them is broken.
std::optional<Message> decode(const std::byte* bytes);

// What opens a connection from `from` to `to`: proves knowledge of the secret without telling it.
Message hello_to(const Group& group, GroupRank from, GroupRank to);
// Who sent it; empty where it is no hello to this group's rank by one who knows the secret.
std::optional<GroupRank> check_hello(const Group& group, const Message& message);

}  // namespace offcore::mcast
