// SDMA packets of gfx942 (MI300X, SDMA 4.4.2), bit by bit.
//
// A packet is a kind and its fields. One table (packet.cpp) says where each field lies; pack and
// what reads packets (studies/sdma/unpack.h) both go by it. Counts, pitches and sizes are here what
// they mean: the table knows which are stored less one. Every bit that the table does not name is
// 0. docs/internals/sdma.md shows the table.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace offcore::sdma {

enum class PacketKind : uint8_t {
  nop,        // 1 dword and `skip` more, which mean nothing; a zero dword is one
  copy,       // COPY_LINEAR
  broadcast,  // COPY_LINEAR to two destinations
  swap,       // exchanges two ranges; dst is its address A, src its address B
  rect,       // COPY_LINEAR_RECT: a window of rows and slices
  poll,       // POLL_REGMEM: until (memory & mask) compares with value
  fence,      // orders, then stores 32 bits
  atomic,     // orders, then operates on 64 bits of memory
  timestamp,  // stores the 64-bit counter
  trap,       // interrupts the host
  fill,       // CONST_FILL with dwords
};
inline constexpr size_t kKinds = 11;

enum class Field : uint8_t {
  dst,
  dst2,
  src,
  bytes,
  value,      // compared, stored, added, filled with, or the interrupt's context
  compare,    // of atomics that compare
  mask,       // of polls
  func,       // of polls: kPollAtLeast, or another comparison
  memory,     // of polls: 1; 0 would be a register
  interval,   // between two looks
  retry,      // looks; kPollForever
  operation,  // of atomics
  skip,       // of nops: dwords that follow
  element,    // of rects, log2 of its bytes; all sizes of a rect count elements
  src_x,
  src_y,
  src_z,
  src_pitch,  // from row to row
  src_slice,  // from slice to slice
  dst_x,
  dst_y,
  dst_z,
  dst_pitch,
  dst_slice,
  width,   // of a row
  height,  // rows of a slice
  depth,   // slices
};
inline constexpr size_t kFields = 27;

inline constexpr uint64_t kPollAtLeast = 5;  // plain unsigned, not cyclic
inline constexpr uint64_t kPollForever = 0xfff;
inline constexpr uint64_t kSwapAlign = 64;
inline constexpr uint64_t kBroadcastAlign = 32;
inline constexpr uint64_t kTimestampAlign = 32;
inline constexpr uint32_t kDwordsMax = 13;  // of the packets other than nops

struct Packet {
  PacketKind kind = PacketKind::nop;
  std::array<uint64_t, kFields> values{};

  uint64_t& operator[](Field field) { return values[static_cast<size_t>(field)]; }
  uint64_t operator[](Field field) const { return values[static_cast<size_t>(field)]; }
  friend bool operator==(const Packet&, const Packet&) = default;
};

// Where a field lies: `bits` bits from bit `bit` of the packet on (dword d is bits 32 * d to
// 32 * d + 31). What is stored is the value less `bias`.
struct Bits {
  Field field;
  uint16_t bit;
  uint8_t bits;
  uint8_t bias = 0;

  constexpr uint64_t mask() const { return bits == 64 ? UINT64_MAX : (1ull << bits) - 1; }
};

struct PacketLayout {
  PacketKind kind;
  const char* name;      // AMD's
  uint16_t dwords;       // without those that a nop skips
  uint32_t header;       // the fixed bits of dword 0: operation, sub-operation, flags
  uint32_t header_mask;  // which bits of dword 0 are fixed
  std::span<const Bits> fields;
};

const PacketLayout& layout_of(PacketKind kind);
const PacketLayout* layout_at(uint32_t header);  // of what begins so; null: no packet does

std::string_view to_string(Field field);

// Appends the packet. Throws invalid where a value does not fit its field.
void pack(const Packet& packet, std::vector<uint32_t>& dwords);

std::string hex(uint64_t value);  // "0x7f00"

// Only the dwords of the packet that begins with this one; 0: no packet begins so.
uint32_t packet_dwords(uint32_t header);

}  // namespace offcore::sdma
