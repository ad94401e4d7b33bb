// A ring of packets in memory, as its producers see it.
//
// rptr, wptr and doorbell are byte offsets that only grow; a ring's size is a power of two. A
// producer reserves a range, writes whole packets, and then, in the order of the reservations,
// stores wptr and rings the doorbell with the same offset. No packet straddles the ring's end: what
// is left there is filled with zero dwords, which are nops. There is room while the new offset is
// less than a ring's size ahead of rptr. Any number of threads may submit; each one's packets stay
// in its order.
#pragma once
#include <atomic>
#include <cstdint>
#include <span>

namespace offcore::sdma {

// Where a ring and its offsets lie: in memory that engine and producers share.
struct RingMemory {
  std::span<uint32_t> dwords;
  uint64_t* rptr = nullptr;      // the engine's
  uint64_t* wptr = nullptr;      // the producers'
  uint64_t* doorbell = nullptr;  // the producers'; on hardware a register

  uint64_t bytes() const { return dwords.size_bytes(); }
};

inline constexpr uint64_t kRingBytesMin = 256;

class PacketRing {
 public:
  // Throws invalid for a size that is no power of two of at least kRingBytesMin.
  explicit PacketRing(const RingMemory& memory);

  // Writes whole packets and rings the doorbell; all of them or none, of which false tells: there
  // is no room now. Throws timeout where a producer before it does not finish its writing: such a
  // ring is lost.
  bool try_submit(std::span<const uint32_t> packets);

  const RingMemory& memory() const { return memory_; }
  // How many of these dwords to submit at once: whole packets, up to a quarter of the ring. Throws
  // invalid for dwords that are no packets.
  size_t part_of(std::span<const uint32_t> packets) const;

 private:
  void publish(uint64_t begin, uint64_t end);

  RingMemory memory_;
  std::atomic<uint64_t> reserved_;
  std::atomic<uint64_t> committed_;  // up to where the doorbell has been rung
};

}  // namespace offcore::sdma
