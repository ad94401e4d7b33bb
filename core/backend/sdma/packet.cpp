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

constexpr std::string_view kFieldNames[kFields] = {
    "dst",   "dst2",      "src",       "bytes",     "value",     "compare", "mask",
    "func",  "memory",    "interval",  "retry",     "operation", "skip",    "element",
    "src_x", "src_y",     "src_z",     "src_pitch", "src_slice", "dst_x",   "dst_y",
    "dst_z", "dst_pitch", "dst_slice", "width",     "height",    "depth"};

void store(uint32_t* dwords, const Bits& bits, uint64_t value) {
  uint32_t* word = dwords + bits.bit / 32;
  word[0] |= static_cast<uint32_t>(value << bits.bit % 32);
  if (bits.bits == 64) word[1] |= static_cast<uint32_t>(value >> 32);
}

}  // namespace

std::string hex(uint64_t value) {
  std::ostringstream text;
  text << "0x" << std::hex << value;
  return text.str();
}

const PacketLayout& layout_of(PacketKind kind) { return kLayouts[static_cast<size_t>(kind)]; }

std::string_view to_string(Field field) { return kFieldNames[static_cast<size_t>(field)]; }

void pack(const Packet& packet, std::vector<uint32_t>& dwords) {
  const PacketLayout& layout = layout_of(packet.kind);
  for (const Bits& bits : layout.fields) {
    const uint64_t value = packet[bits.field];
    if (value >= bits.bias && value - bits.bias <= bits.mask()) continue;
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

const PacketLayout* layout_at(uint32_t header) {
  for (const PacketLayout& layout : kLayouts) {
    if ((header & layout.header_mask) == layout.header) return &layout;
  }
  return nullptr;
}

uint32_t packet_dwords(uint32_t header) {
  const PacketLayout* layout = layout_at(header);
  if (layout == nullptr) return 0;
  if (layout->kind != PacketKind::nop) return layout->dwords;
  return layout->dwords + (header >> kNop[0].bit & static_cast<uint32_t>(kNop[0].mask()));
}

}  // namespace offcore::sdma
