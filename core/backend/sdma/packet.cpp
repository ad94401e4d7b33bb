#include "core/backend/sdma/packet.h"

#include "core/base/error.h"

namespace offcore::sdma {
namespace {

// Bit numbers count from the packet's start: dword d begins at 32 * d.
constexpr uint16_t at(uint16_t dword, uint16_t bit = 0) {
  return static_cast<uint16_t>(32 * dword + bit);
}

constexpr Bits kNop[] = {{Field::skip, at(0, 16), 14}};
constexpr Bits kCopy[] = {
    {Field::bytes, at(1), 30, 1}, {Field::src, at(3), 64}, {Field::dst, at(5), 64}};
constexpr Bits kBroadcast[] = {{Field::bytes, at(1), 30, 1},
                               {Field::src, at(3), 64},
                               {Field::dst, at(5), 64},
                               {Field::dst2, at(7), 64}};
constexpr Bits kSwap[] = {
    {Field::bytes, at(1), 30, 1}, {Field::dst, at(3), 64}, {Field::src, at(5), 64}};
constexpr Bits kRect[] = {
    {Field::element, at(0, 29), 3},     {Field::src, at(1), 64},
    {Field::src_x, at(3), 14},          {Field::src_y, at(3, 16), 14},
    {Field::src_z, at(4), 11},          {Field::src_pitch, at(4, 13), 19, 1},
    {Field::src_slice, at(5), 28, 1},   {Field::dst, at(6), 64},
    {Field::dst_x, at(8), 14},          {Field::dst_y, at(8, 16), 14},
    {Field::dst_z, at(9), 11},          {Field::dst_pitch, at(9, 13), 19, 1},
    {Field::dst_slice, at(10), 28, 1},  {Field::width, at(11), 14, 1},
    {Field::height, at(11, 16), 14, 1}, {Field::depth, at(12), 11, 1},
};
constexpr Bits kPoll[] = {{Field::func, at(0, 28), 3},  {Field::memory, at(0, 31), 1},
                          {Field::dst, at(1), 64},      {Field::value, at(3), 32},
                          {Field::mask, at(4), 32},     {Field::interval, at(5), 16},
                          {Field::retry, at(5, 16), 12}};
constexpr Bits kFence[] = {{Field::dst, at(1), 64}, {Field::value, at(3), 32}};
constexpr Bits kAtomic[] = {{Field::operation, at(0, 25), 7},
                            {Field::dst, at(1), 64},
                            {Field::value, at(3), 64},
                            {Field::compare, at(5), 64},
                            {Field::interval, at(7), 13}};
constexpr Bits kTimestamp[] = {{Field::dst, at(1), 64}};
constexpr Bits kTrap[] = {{Field::value, at(1), 28}};
constexpr Bits kFill[] = {
    {Field::dst, at(1), 64}, {Field::value, at(3), 32}, {Field::bytes, at(4), 30, 4}};

constexpr uint32_t kOperation = 0xffff;       // with its sub-operation
constexpr uint32_t kBroadcastBit = 1u << 27;  // of COPY_LINEAR
constexpr uint32_t kFillDwords = 2u << 30;

constexpr uint32_t header(uint32_t operation, uint32_t sub_operation = 0) {
  return operation | sub_operation << 8;
}

constexpr PacketLayout kLayouts[kKinds] = {
    {PacketKind::nop, "NOP", 1, header(0), kOperation, kNop},
    {PacketKind::copy, "COPY_LINEAR", 7, header(1), kOperation | kBroadcastBit, kCopy},
    {PacketKind::broadcast, "COPY_LINEAR broadcast", 9, header(1) | kBroadcastBit,
     kOperation | kBroadcastBit, kBroadcast},
    {PacketKind::swap, "COPY swap", 7, header(1, 9), kOperation, kSwap},
    {PacketKind::rect, "COPY_LINEAR_RECT", 13, header(1, 4), kOperation, kRect},
    {PacketKind::poll, "POLL_REGMEM", 6, header(8), kOperation, kPoll},
    {PacketKind::fence, "FENCE", 4, header(5), kOperation, kFence},
    {PacketKind::atomic, "ATOMIC", 8, header(10), kOperation, kAtomic},
    {PacketKind::timestamp, "TIMESTAMP", 3, header(13, 2), kOperation, kTimestamp},
    {PacketKind::trap, "TRAP", 2, header(6), kOperation, kTrap},
    {PacketKind::fill, "CONST_FILL", 5, header(11) | kFillDwords, kOperation | 3u << 30, kFill},
};

constexpr std::string_view kKindNames[kKinds] = {"nop",       "copy", "broadcast", "swap",
                                                 "rect",      "poll", "fence",     "atomic",
                                                 "timestamp", "trap", "fill"};

constexpr std::string_view kFieldNames[kFields] = {
    "dst",   "dst2",      "src",       "bytes",     "value",     "compare", "mask",
    "func",  "memory",    "interval",  "retry",     "operation", "skip",    "element",
    "src_x", "src_y",     "src_z",     "src_pitch", "src_slice", "dst_x",   "dst_y",
    "dst_z", "dst_pitch", "dst_slice", "width",     "height",    "depth"};

constexpr uint64_t ones(uint32_t bits) { return bits == 64 ? UINT64_MAX : (1ull << bits) - 1; }

uint64_t load(const uint32_t* dwords, const Bits& bits) {
  const uint32_t* word = dwords + bits.bit / 32;
  if (bits.bits == 64) return word[0] | uint64_t{word[1]} << 32;
  return word[0] >> bits.bit % 32 & ones(bits.bits);
}

void store(uint32_t* dwords, const Bits& bits, uint64_t value) {
  uint32_t* word = dwords + bits.bit / 32;
  word[0] |= static_cast<uint32_t>(value << bits.bit % 32);
  if (bits.bits == 64) word[1] |= static_cast<uint32_t>(value >> 32);
}

// What unpack asks of a packet's dwords: which bits of each may be set.
struct Known {
  uint32_t bits[kKinds][kDwordsMax] = {};
};

constexpr Known known_bits() {
  Known known;
  for (const PacketLayout& layout : kLayouts) {
    uint32_t* words = known.bits[static_cast<size_t>(layout.kind)];
    words[0] = layout.header_mask;
    for (const Bits& bits : layout.fields) {
      words[bits.bit / 32] |= static_cast<uint32_t>(ones(bits.bits) << bits.bit % 32);
      if (bits.bits == 64) words[bits.bit / 32 + 1] = UINT32_MAX;
    }
  }
  return known;
}

constexpr Known kKnown = known_bits();

const PacketLayout* find_layout(uint32_t dword) {
  for (const PacketLayout& layout : kLayouts) {
    if ((dword & layout.header_mask) == layout.header) return &layout;
  }
  return nullptr;
}

}  // namespace

std::string hex(uint64_t value) {
  std::ostringstream text;
  text << "0x" << std::hex << value;
  return text.str();
}

std::span<const PacketLayout> layouts() { return kLayouts; }
const PacketLayout& layout_of(PacketKind kind) { return kLayouts[static_cast<size_t>(kind)]; }

std::string_view to_string(PacketKind kind) { return kKindNames[static_cast<size_t>(kind)]; }
std::string_view to_string(Field field) { return kFieldNames[static_cast<size_t>(field)]; }

PacketKind parse_kind(std::string_view name) {
  for (size_t i = 0; i < kKinds; ++i) {
    if (kKindNames[i] == name) return static_cast<PacketKind>(i);
  }
  fail(Code::invalid, "no SDMA packet is named '", name, "'");
}

Field parse_field(std::string_view name) {
  for (size_t i = 0; i < kFields; ++i) {
    if (kFieldNames[i] == name) return static_cast<Field>(i);
  }
  fail(Code::invalid, "no field of an SDMA packet is named '", name, "'");
}

void pack(const Packet& packet, std::vector<uint32_t>& dwords) {
  const PacketLayout& layout = layout_of(packet.kind);
  for (const Bits& bits : layout.fields) {
    const uint64_t value = packet[bits.field];
    if (value >= bits.bias && value - bits.bias <= ones(bits.bits)) continue;
    fail(Code::invalid, layout.name, ": ", to_string(bits.field), " = ", value,
         " does not fit: it has ", unsigned{bits.bits}, " bits",
         bits.bias > 0 ? cat(" for the value less ", unsigned{bits.bias}) : "");
  }
  const size_t first = dwords.size();
  dwords.resize(first + layout.dwords + (packet.kind == PacketKind::nop ? packet[Field::skip] : 0));
  dwords[first] = layout.header;
  for (const Bits& bits : layout.fields) {
    store(dwords.data() + first, bits, packet[bits.field] - bits.bias);
  }
}

namespace {

std::string misaligned(uint64_t address, uint64_t align) {
  if (address % align == 0) return {};
  return cat("address ", hex(address), " is no multiple of ", align);
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
      if (packet[Field::func] == 7) return "function 7 is none";
      return packet[Field::memory] == 1 ? misaligned(dst, 4) : std::string();
    case PacketKind::fence:
      return misaligned(dst, 4);
    case PacketKind::atomic:
      return misaligned(dst, 8);
    case PacketKind::timestamp:
      return misaligned(dst, kTimestampAlign);
    case PacketKind::fill:
      return packet[Field::bytes] % 4 == 0 ? misaligned(dst, 4) : "its bytes are no whole dwords";
    case PacketKind::copy:
    case PacketKind::trap:
    case PacketKind::nop:
      break;
  }
  return {};
}

uint32_t packet_dwords(uint32_t header) {
  const PacketLayout* layout = find_layout(header);
  if (layout == nullptr) return 0;
  if (layout->kind != PacketKind::nop) return layout->dwords;
  return layout->dwords + static_cast<uint32_t>(load(&header, kNop[0]));
}

uint32_t try_unpack(std::span<const uint32_t> dwords, size_t at, Packet& packet, uint64_t first,
                    std::string& why) {
  const uint32_t* words = dwords.data() + at;
  const PacketLayout* layout = find_layout(words[0]);
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
  const uint32_t* known = kKnown.bits[static_cast<size_t>(layout->kind)];
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

uint32_t unpack(std::span<const uint32_t> dwords, size_t at, Packet& packet, uint64_t first) {
  std::string why;
  const uint32_t count = try_unpack(dwords, at, packet, first, why);
  if (count == 0) fail(Code::invalid, why);
  return count;
}

}  // namespace offcore::sdma
