// From one queue's commands, with absolute addresses, to packets.
//
// The encoder splits what is larger than the largest copy, pairs the destinations of a broadcast,
// says rows at constant steps by rectangles, and keeps the alignment that packets ask for.
// (encode_program.h does it for a program.)
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/backend/sdma/packet.h"

namespace offcore::sdma {

inline constexpr uint64_t kCopyBytesMax = 0x3fffffc0;  // SDMA 4.4.x, in whole swap blocks
inline constexpr uint64_t kPollInterval = 4;
inline constexpr uint64_t kPacketsMax = 1 << 20;  // of one encoder

class Encoder {
 public:
  explicit Encoder(uint64_t copy_bytes_max = kCopyBytesMax);

  // Each throws invalid for what no packet can say and for more than kPacketsMax packets,
  // unsupported for what another machine's could.
  void copy(uint64_t dst, uint64_t src, uint64_t bytes);
  // Pairs of destinations; an odd last one gets a plain copy.
  void broadcast(std::span<const uint64_t> dsts, uint64_t src, uint64_t bytes);
  // Rows at constant steps: rectangles where both steps fit into one, else row by row.
  void strided(uint64_t dst, uint64_t src, uint64_t bytes, uint32_t rows, int64_t dst_step,
               int64_t src_step);
  void swap(uint64_t a, uint64_t b, uint64_t bytes);
  void poll(uint64_t address, uint64_t value);  // until it is there, or more
  void fence(uint64_t address, uint64_t value);
  void timestamp(uint64_t address);
  void add(const Packet& packet) { packets_.push_back(packet); }  // as it is

  const std::vector<Packet>& packets() const { return packets_; }
  std::vector<uint32_t> dwords() const;

 private:
  struct Rect;
  std::optional<Rect> rect_of(uint64_t dst, uint64_t src, uint64_t bytes, int64_t dst_step,
                              int64_t src_step) const;
  void need_room(uint64_t packets, uint64_t times = 1) const;
  Packet packet(const Rect& rect, uint64_t dst, uint64_t src, uint64_t bytes, uint32_t rows) const;

  uint64_t copy_bytes_max_;
  std::vector<Packet> packets_;
};

}  // namespace offcore::sdma
