#include "core/backend/sdma/packet_ring.h"

#include <sched.h>

#include <algorithm>

#include "core/backend/sdma/packet.h"
#include "core/base/clock.h"
#include "core/base/error.h"

namespace offcore::sdma {
namespace {

// For a producer that has only to copy a few kilobytes; a test machine may stop it for a while.
constexpr double kPublishS = 10;

}  // namespace

PacketRing::PacketRing(const RingMemory& memory)
    : memory_(memory),
      reserved_(std::atomic_ref(*memory.wptr).load(std::memory_order_acquire)),
      committed_(reserved_.load()) {
  const uint64_t bytes = memory.bytes();
  if (bytes < kRingBytesMin || (bytes & (bytes - 1)) != 0) {
    fail(Code::invalid, "a ring of ", bytes, " bytes: it has to be a power of two of at least ",
         kRingBytesMin);
  }
}

bool PacketRing::try_submit(std::span<const uint32_t> packets) {
  const uint64_t bytes = packets.size_bytes();
  const uint64_t size = memory_.bytes();
  uint64_t begin = reserved_.load(std::memory_order_relaxed);
  uint64_t pad = 0;
  uint64_t end = 0;
  do {
    const uint64_t lap_left = size - begin % size;
    pad = bytes > lap_left ? lap_left : 0;
    end = begin + pad + bytes;
    const uint64_t rptr = std::atomic_ref(*memory_.rptr).load(std::memory_order_acquire);
    if (end - rptr >= size) return false;
  } while (!reserved_.compare_exchange_weak(begin, end, std::memory_order_relaxed));

  uint32_t* at = memory_.dwords.data() + begin % size / 4;
  at = std::fill_n(at, pad / 4, 0u);
  if (pad > 0) at = memory_.dwords.data();
  std::copy(packets.begin(), packets.end(), at);

  publish(begin, end);
  return true;
}

void PacketRing::publish(uint64_t begin, uint64_t end) {
  if (committed_.load(std::memory_order_acquire) != begin) {
    const Deadline deadline = Deadline::after_s(kPublishS);
    while (committed_.load(std::memory_order_acquire) != begin) {
      if (deadline.passed()) {
        fail(Code::timeout, "a producer has reserved bytes of the ring before byte ", begin,
             " and published up to byte ", committed_.load(), " only, for ",
             shown_s(deadline.wait_ns()), " s: the ring is lost");
      }
      sched_yield();
    }
  }
  std::atomic_ref(*memory_.wptr).store(end, std::memory_order_release);
  std::atomic_ref(*memory_.doorbell).store(end, std::memory_order_release);
  committed_.store(end, std::memory_order_release);
}

size_t PacketRing::part_of(std::span<const uint32_t> packets) const {
  const size_t most = memory_.dwords.size() / 4;
  size_t part = 0;
  while (part < packets.size()) {
    const uint32_t count = packet_dwords(packets[part]);
    if (count == 0 || count > packets.size() - part) {
      fail(Code::invalid, "no whole packet begins with dword ", hex(packets[part]));
    }
    if (part > 0 && part + count > most) break;
    part += count;
  }
  if (part > most && 2 * part >= memory_.dwords.size()) {
    fail(Code::invalid, "a packet of ", part, " dwords is too large for a ring of ",
         memory_.dwords.size());
  }
  return part;
}

}  // namespace offcore::sdma
