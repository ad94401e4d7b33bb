#include "core/backend/sdma/encode.h"

#include <algorithm>

#include "core/base/error.h"

namespace offcore::sdma {
namespace {

constexpr uint64_t kRectAlign = 4;       // of addresses and pitches
constexpr uint32_t kElementMax = 4;      // log2: 16 bytes
constexpr uint64_t kWidthMax = 1 << 14;  // elements; the other bounds of a rectangle
constexpr uint64_t kHeightMax = 1 << 14;
constexpr uint64_t kDepthMax = 1 << 11;
constexpr uint64_t kPitchMax = 1 << 19;
constexpr uint64_t kSliceMax = 1 << 28;

void need_align(std::string_view what, uint64_t address, uint64_t align) {
  if (address % align == 0) return;
  fail(Code::invalid, what, " address ", hex(address), " has to be a multiple of ", align);
}

void need_bytes(std::string_view what, uint64_t bytes) {
  if (bytes == 0) {
    fail(Code::invalid, what, " of 0 bytes: a packet's count is its bytes less one; leave it out");
  }
}

// The rows' addresses, from the first byte to the last, are numbers of 64 bits.
void need_range(std::string_view what, uint64_t address, uint64_t bytes, uint64_t rows = 1,
                int64_t step = 0) {
  using Wide = __int128;
  const Wide last = Wide{address} + Wide{step} * Wide{rows - 1};
  const Wide end = std::max(Wide{address}, last) + Wide{bytes};
  if (last >= 0 && end <= Wide{1} << 64) return;
  fail(Code::invalid, what, " of ", bytes, " bytes at ", hex(address), rows > 1 ? " in rows" : "",
       " goes beyond the 64-bit addresses");
}

uint64_t stepped(uint64_t address, int64_t step, uint64_t row) {
  return address + static_cast<uint64_t>(step) * row;
}

}  // namespace

// A way to say rows at two constant steps.
struct Encoder::Rect {
  uint32_t element = 0;
  bool slices = false;  // rows are slices of one row each: steps beyond the pitch field
  uint64_t dst_step = 0;
  uint64_t src_step = 0;
  uint64_t rows_max = 0;
};

Encoder::Encoder(uint64_t copy_bytes_max) : copy_bytes_max_(copy_bytes_max) {
  if (copy_bytes_max < kSwapAlign || copy_bytes_max > uint64_t{1} << 30) {
    fail(Code::invalid, "the largest copy of an SDMA packet is ", kSwapAlign,
         " to 2^30 bytes, not ", copy_bytes_max);
  }
}

void Encoder::need_room(uint64_t packets, uint64_t times) const {
  const uint64_t room = kPacketsMax - packets_.size();
  if (packets <= room && times <= room / std::max<uint64_t>(1, packets)) return;
  fail(Code::invalid, "more than ", kPacketsMax, " packets for one queue: split the work");
}

std::vector<uint32_t> Encoder::dwords() const {
  std::vector<uint32_t> dwords;
  for (const Packet& packet : packets_) pack(packet, dwords);
  return dwords;
}

void Encoder::copy(uint64_t dst, uint64_t src, uint64_t bytes) {
  need_bytes("a copy", bytes);
  need_range("a copy", dst, bytes);
  need_range("a copy", src, bytes);
  need_room((bytes - 1) / copy_bytes_max_ + 1);
  for (uint64_t done = 0; done < bytes; done += copy_bytes_max_) {
    Packet packet{.kind = PacketKind::copy};
    packet[Field::dst] = dst + done;
    packet[Field::src] = src + done;
    packet[Field::bytes] = std::min(copy_bytes_max_, bytes - done);
    packets_.push_back(packet);
  }
}

void Encoder::broadcast(std::span<const uint64_t> dsts, uint64_t src, uint64_t bytes) {
  need_bytes("a broadcast", bytes);
  if (dsts.empty()) fail(Code::invalid, "a broadcast needs destinations");
  for (size_t i = 0; i + 1 < dsts.size(); i += 2) {
    if (dsts[i] % kBroadcastAlign != dsts[i + 1] % kBroadcastAlign) {
      fail(Code::invalid, "the destinations ", hex(dsts[i]), " and ", hex(dsts[i + 1]),
           " of a broadcast have to agree modulo ", kBroadcastAlign);
    }
  }
  need_range("a broadcast", src, bytes);
  for (const uint64_t dst : dsts) need_range("a broadcast", dst, bytes);
  const uint64_t bytes_max = copy_bytes_max_ / kBroadcastAlign * kBroadcastAlign;
  need_room((bytes - 1) / bytes_max + 1, (dsts.size() + 1) / 2);
  for (size_t i = 0; i + 1 < dsts.size(); i += 2) {
    for (uint64_t done = 0; done < bytes; done += bytes_max) {
      Packet packet{.kind = PacketKind::broadcast};
      packet[Field::dst] = dsts[i] + done;
      packet[Field::dst2] = dsts[i + 1] + done;
      packet[Field::src] = src + done;
      packet[Field::bytes] = std::min(bytes_max, bytes - done);
      packets_.push_back(packet);
    }
  }
  if (dsts.size() % 2 == 1) copy(dsts.back(), src, bytes);
}

std::optional<Encoder::Rect> Encoder::rect_of(uint64_t dst, uint64_t src, uint64_t bytes,
                                              int64_t dst_step, int64_t src_step) const {
  if (dst_step <= 0 || src_step <= 0) return std::nullopt;
  Rect rect{.dst_step = static_cast<uint64_t>(dst_step),
            .src_step = static_cast<uint64_t>(src_step)};
  if ((rect.dst_step | rect.src_step) % kRectAlign != 0) return std::nullopt;
  // The address is rounded down to a dword, and the rest is an offset in elements.
  const uint64_t all = dst | src | bytes | rect.dst_step | rect.src_step;
  while (rect.element < kElementMax && all % (uint64_t{2} << rect.element) == 0) ++rect.element;
  const uint64_t row = std::max(dst % kRectAlign, src % kRectAlign) + bytes;
  const uint64_t least = std::min(rect.dst_step, rect.src_step) >> rect.element;
  const uint64_t largest = std::max(rect.dst_step, rect.src_step) >> rect.element;
  rect.slices = largest > kPitchMax;
  rect.rows_max = rect.slices ? kDepthMax : kHeightMax;
  const bool fits = bytes >> rect.element <= kWidthMax && row >> rect.element <= least &&
                    bytes <= copy_bytes_max_ && largest <= kSliceMax;
  return fits ? std::optional(rect) : std::nullopt;
}

Packet Encoder::packet(const Rect& rect, uint64_t dst, uint64_t src, uint64_t bytes,
                       uint32_t rows) const {
  Packet packet{.kind = PacketKind::rect};
  const uint64_t dst_step = rect.dst_step >> rect.element;
  const uint64_t src_step = rect.src_step >> rect.element;
  const uint64_t width = bytes >> rect.element;
  packet[Field::element] = rect.element;
  packet[Field::dst] = dst / kRectAlign * kRectAlign;
  packet[Field::src] = src / kRectAlign * kRectAlign;
  packet[Field::dst_x] = dst % kRectAlign >> rect.element;
  packet[Field::src_x] = src % kRectAlign >> rect.element;
  packet[Field::width] = width;
  packet[Field::height] = rect.slices ? 1 : rows;
  packet[Field::depth] = rect.slices ? rows : 1;
  // Where rows are slices the pitch is only wide enough; where they are not there are no slices.
  packet[Field::dst_pitch] = rect.slices ? std::min(dst_step, kPitchMax) : dst_step;
  packet[Field::src_pitch] = rect.slices ? std::min(src_step, kPitchMax) : src_step;
  packet[Field::dst_slice] = rect.slices ? dst_step : 1;
  packet[Field::src_slice] = rect.slices ? src_step : 1;
  return packet;
}

void Encoder::strided(uint64_t dst, uint64_t src, uint64_t bytes, uint32_t rows, int64_t dst_step,
                      int64_t src_step) {
  need_bytes("a copy", rows == 0 ? 0 : bytes);
  need_range("a copy", dst, bytes, rows, dst_step);
  need_range("a copy", src, bytes, rows, src_step);
  const std::optional<Rect> rect = rect_of(dst, src, bytes, dst_step, src_step);
  const uint64_t rows_max = rect ? rect->rows_max : 1;
  need_room((rows - 1) / rows_max + 1, rect ? 1 : (bytes - 1) / copy_bytes_max_ + 1);
  for (uint64_t row = 0; row < rows; row += rows_max) {
    const uint64_t to = stepped(dst, dst_step, row);
    const uint64_t from = stepped(src, src_step, row);
    const auto count = static_cast<uint32_t>(std::min<uint64_t>(rows_max, rows - row));
    if (count == 1) {
      copy(to, from, bytes);
    } else {
      packets_.push_back(packet(*rect, to, from, bytes, count));
    }
  }
}

void Encoder::swap(uint64_t a, uint64_t b, uint64_t bytes) {
  need_bytes("a swap", bytes);
  need_align("a swap's", a, kSwapAlign);
  need_align("a swap's", b, kSwapAlign);
  need_range("a swap", a, bytes);
  need_range("a swap", b, bytes);
  const uint64_t bytes_max = copy_bytes_max_ / kSwapAlign * kSwapAlign;
  need_room((bytes - 1) / bytes_max + 1);
  for (uint64_t done = 0; done < bytes; done += bytes_max) {
    Packet packet{.kind = PacketKind::swap};
    packet[Field::dst] = a + done;
    packet[Field::src] = b + done;
    packet[Field::bytes] = std::min(bytes_max, bytes - done);
    packets_.push_back(packet);
  }
}

void Encoder::poll(uint64_t address, uint64_t value) {
  need_align("a poll's", address, 4);
  if (value > UINT32_MAX) {
    fail(Code::unsupported, "a poll for ", hex(value), ": POLL_REGMEM compares 32 bits, and there ",
         "is no 64-bit poll on this engine; count in 32-bit words");
  }
  Packet packet{.kind = PacketKind::poll};
  packet[Field::func] = kPollAtLeast;
  packet[Field::memory] = 1;
  packet[Field::dst] = address;
  packet[Field::value] = value;
  packet[Field::mask] = UINT32_MAX;
  packet[Field::interval] = kPollInterval;
  packet[Field::retry] = kPollForever;
  packets_.push_back(packet);
}

void Encoder::fence(uint64_t address, uint64_t value) {
  need_align("a fence's", address, 4);
  if (value > UINT32_MAX) {
    fail(Code::invalid, "a FENCE stores 32 bits, not ", hex(value), ": signal it by an atomic");
  }
  Packet packet{.kind = PacketKind::fence};
  packet[Field::dst] = address;
  packet[Field::value] = value;
  packets_.push_back(packet);
}

void Encoder::timestamp(uint64_t address) {
  need_align("a timestamp's", address, kTimestampAlign);
  Packet packet{.kind = PacketKind::timestamp};
  packet[Field::dst] = address;
  packets_.push_back(packet);
}

}  // namespace offcore::sdma
