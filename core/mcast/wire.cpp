#include "core/mcast/wire.h"

#include "core/mcast/siphash.h"

namespace offcore::mcast {
namespace {

// Proof that the sender of a hello knows the secret: of the tag and both ranks.
uint64_t proof_of(const GroupKey& key, GroupRank from, GroupRank to) {
  std::array<std::byte, 16> said;
  store_big(said.data(), key.tag);
  store_big(said.data() + 8, from);
  store_big(said.data() + 12, to);
  return siphash(key.secret, said, {});
}

}  // namespace

void write_head(const DatagramHead& head, std::byte* out) {
  store_big(out, head.magic);
  out[2] = std::byte{head.version};
  out[kFlagsAt] = std::byte{head.flags};
  store_big(out + 4, head.psn);
  store_big(out + 8, head.tag);
  store_big(out + 16, head.op);
  store_big(out + 24, head.source);
  store_big(out + 28, head.subgroup);
  store_big(out + 30, head.bytes);
}

void write_head(const Group& group, const BlockPart& part, uint32_t index, std::byte* out) {
  const uint32_t bytes = part.chunk_size(index, group.chunk_bytes);
  write_head({.flags = group.sealed ? kFlagSealed : uint8_t{0},
              .psn = part.psn + index,
              .tag = group.key.tag,
              .op = part.op,
              .source = part.source,
              .subgroup = static_cast<uint16_t>(part.subgroup),
              .bytes = static_cast<uint16_t>(bytes)},
             out);
  if (group.sealed) {
    const std::byte* chunk = part.data + part.offset(index, group.chunk_bytes);
    store_big(out + kHeaderBytes, mac_of(group.key, out, {chunk, bytes}));
  }
}

uint64_t mac_of(const GroupKey& key, const std::byte* header, std::span<const std::byte> chunk) {
  return siphash(key.secret, {header, kHeaderBytes}, chunk);
}

void encode(const Message& message, std::byte* out) {
  std::memset(out, 0, kMessageBytes);
  store_big(out, kMagic);
  out[2] = std::byte{kVersion};
  out[3] = static_cast<std::byte>(message.kind);
  store_big(out + 4, message.detail);
  store_big(out + 8, message.op);
  store_big(out + 16, message.source);
  store_big(out + 20, message.psn);
  store_big(out + 24, message.chunks);
  out[28] = static_cast<std::byte>(message.sequence);
  store_big(out + 32, message.value);
  store_big(out + 40, message.payload_bytes);
}

std::optional<Message> decode(const std::byte* bytes) {
  const auto kind = static_cast<uint8_t>(bytes[3]);
  const auto sequence = static_cast<uint8_t>(bytes[28]);
  if (load_big<uint16_t>(bytes) != kMagic || bytes[2] != std::byte{kVersion} ||
      kind >= kMessageKinds || sequence >= kSequences) {
    return {};
  }
  const Message message{.kind = static_cast<MessageKind>(kind),
                        .detail = load_big<uint32_t>(bytes + 4),
                        .op = load_big<uint64_t>(bytes + 8),
                        .source = load_big<GroupRank>(bytes + 16),
                        .psn = load_big<uint32_t>(bytes + 20),
                        .chunks = load_big<uint32_t>(bytes + 24),
                        .value = load_big<uint64_t>(bytes + 32),
                        .sequence = static_cast<Sequence>(sequence),
                        .payload_bytes = load_big<uint64_t>(bytes + 40)};
  const bool carries = message.kind == MessageKind::reply || message.kind == MessageKind::share;
  if (message.payload_bytes > (carries ? kReplyBytesMax : 0)) return {};
  return message;
}

Message hello_to(const Group& group, GroupRank from, GroupRank to) {
  return {.kind = MessageKind::hello,
          .op = group.key.tag,
          .source = from,
          .value = proof_of(group.key, from, to)};
}

std::optional<GroupRank> check_hello(const Group& group, const Message& message) {
  const bool fits = message.kind == MessageKind::hello && message.op == group.key.tag &&
                    message.source < group.ranks && message.source != group.rank &&
                    message.value == proof_of(group.key, message.source, group.rank);
  return fits ? std::optional(message.source) : std::nullopt;
}

}  // namespace offcore::mcast
