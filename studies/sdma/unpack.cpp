#include "studies/sdma/unpack.h"

#include <array>

#include "core/base/names.h"

namespace offcore::sdma {
namespace {

constexpr std::string_view kKindNames[kKinds] = {"nop",       "copy", "broadcast", "swap",
                                                 "rect",      "poll", "fence",     "atomic",
                                                 "timestamp", "trap", "fill"};

// Which bits of each dword of a packet may be set.
using KnownBits = std::array<uint32_t, kDwordsMax>;

std::array<KnownBits, kKinds> known_bits() {
  std::array<KnownBits, kKinds> known{};
  for (size_t kind = 0; kind < kKinds; ++kind) {
    const PacketLayout& layout = layout_of(static_cast<PacketKind>(kind));
    known[kind][0] = layout.header_mask;
    for (const Bits& bits : layout.fields) {
      known[kind][bits.bit / 32] |= static_cast<uint32_t>(bits.mask() << bits.bit % 32);
      if (bits.bits == 64) known[kind][bits.bit / 32 + 1] = UINT32_MAX;
    }
  }
  return known;
}

uint64_t load(const uint32_t* dwords, const Bits& bits) {
  const uint32_t* word = dwords + bits.bit / 32;
  if (bits.bits == 64) return word[0] | uint64_t{word[1]} << 32;
  return word[0] >> bits.bit % 32 & bits.mask();
}

std::string misaligned(uint64_t address, uint64_t align) {
  if (address % align == 0) return {};
  return cat("address ", hex(address), " is not a multiple of ", align);
}

std::string rect_refusal(const Packet& packet) {
  constexpr uint64_t kElementMax = 4;  // log2: 16 bytes
  const uint64_t element = packet[Field::element];
  if (element > kElementMax) return "elements have at most 16 bytes";
  const auto side = [&](Field address, Field x, Field pitch, Field slice) -> std::string {
    if (packet[address] % 4 != 0 || (packet[pitch] << element) % 4 != 0 ||
        (packet[Field::depth] > 1 && (packet[slice] << element) % 4 != 0)) {
      return "addresses, pitches and slices are whole dwords";
    }
    const bool fits = packet[x] + packet[Field::width] <= packet[pitch];
    return fits ? "" : "a row is longer than its pitch";
  };
  const std::string dst = side(Field::dst, Field::dst_x, Field::dst_pitch, Field::dst_slice);
  if (!dst.empty()) return dst;
  return side(Field::src, Field::src_x, Field::src_pitch, Field::src_slice);
}

}  // namespace

std::string_view to_string(PacketKind kind) { return kKindNames[static_cast<size_t>(kind)]; }

PacketKind parse_kind(std::string_view name) {
  return parse_name<PacketKind>("SDMA packet", name, kKindNames);
}

Field parse_field(std::string_view name) {
  for (size_t i = 0; i < kFields; ++i) {
    if (const auto field = static_cast<Field>(i); to_string(field) == name) return field;
  }
  fail(Code::invalid, "no field of an SDMA packet is named '", name, "'");
}

std::string refusal(const Packet& packet) {
  const uint64_t dst = packet[Field::dst];
  switch (packet.kind) {
    case PacketKind::broadcast:
      if ((dst - packet[Field::dst2]) % kBroadcastAlign == 0) return {};
      return cat("the destinations ", hex(dst), " and ", hex(packet[Field::dst2]),
                 " do not agree modulo ", kBroadcastAlign);
    case PacketKind::swap: {
      const std::string why = misaligned(dst, kSwapAlign);
      return why.empty() ? misaligned(packet[Field::src], kSwapAlign) : why;
    }
    case PacketKind::rect:
      return rect_refusal(packet);
    case PacketKind::poll:
      if (packet[Field::func] == 7) return "function 7 does not exist";
      return packet[Field::memory] == 1 ? misaligned(dst, 4) : std::string();
    case PacketKind::fence:
      return misaligned(dst, 4);
    case PacketKind::atomic:
      return misaligned(dst, 8);
    case PacketKind::timestamp:
      return misaligned(dst, kTimestampAlign);
    case PacketKind::fill:
      return packet[Field::bytes] % 4 == 0 ? misaligned(dst, 4) : "its bytes are not whole dwords";
    case PacketKind::copy:
    case PacketKind::trap:
    case PacketKind::nop:
      break;
  }
  return {};
}

uint32_t unpack(std::span<const uint32_t> dwords, size_t at, Packet& packet, uint64_t first,
                std::string& why) {
  const uint32_t* words = dwords.data() + at;
  const PacketLayout* layout = layout_at(words[0]);
  if (layout == nullptr) {
    why = cat("dword ", first + at, " (", hex(words[0]), "): no packet has operation ",
              words[0] & 255, " with sub-operation ", words[0] >> 8 & 255);
    return 0;
  }
  const uint32_t count = packet_dwords(words[0]);
  if (count > dwords.size() - at) {
    why = cat("dword ", first + at, " (", hex(words[0]), "): this ", layout->name, " has ", count,
              " dwords, and ", dwords.size() - at, " are left");
    return 0;
  }
  static const std::array<KnownBits, kKinds> kKnown = known_bits();
  const KnownBits& known = kKnown[static_cast<size_t>(layout->kind)];
  for (uint32_t i = 0; i < layout->dwords; ++i) {
    if ((words[i] & ~known[i]) == 0) continue;
    why = cat("dword ", first + at + i, " (", hex(words[i]), "): bits ", hex(words[i] & ~known[i]),
              " have to be 0 in dword ", i, " of ", layout->name);
    return 0;
  }
  packet = Packet{.kind = layout->kind};
  for (const Bits& bits : layout->fields) packet[bits.field] = load(words, bits) + bits.bias;
  return count;
}

}  // namespace offcore::sdma
