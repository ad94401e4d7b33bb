// What the lanes of a soak push, GPU threads (offcore.tools.driven's kernels.cu) and host threads
// alike, and how the other side waits for them. offcore.tools.driven.soak says what is there in the
// end: it draws the same requests.
//
// Buffers: 0 is sent, in slots of 64 bytes; 1 to `buffers` are received, and every slot of them is
// the place of one request: of a whole slot (8 bytes a request), or of 1 to 64 bytes anywhere in it
// from anywhere in buffer 0 (16 bytes). Then a buffer with a clock of two words for each lane, and
// one with what clocks may show. After so many requests a lane sends the next number to its clock,
// with a signal, once the last one has been sent: so a clock never goes back. Nothing else is said
// of the order in which a lane's requests arrive, each in a place of its own.
#pragma once
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#include <offcore/ring.h>
#else
#include "core/proxy/ring.h"
#endif

namespace offcore {

constexpr unsigned kSoakSlot = 64;
constexpr unsigned kSoakEvery = 16;  // requests of a lane between two of its clock
constexpr unsigned kSoakClock = 2 * sizeof(proxy::Word);
constexpr unsigned kSoakWrong = 99;  // beside PortFault

struct SoakShape {
  unsigned lanes;
  unsigned each;      // requests of a lane: a multiple of kSoakEvery
  unsigned buffers;   // received
  proxy::Word slots;  // of each, and of buffer 0; lanes x each = buffers x slots
};

struct SoakRequest {
  bool whole;
  unsigned bytes;
  unsigned shift;   // in its slot
  proxy::Word src;  // in buffer 0
};

OFFCORE_INLINE SoakRequest soak_request(const SoakShape& shape, proxy::Word number) {
  proxy::Word h = (number + 1) * 0x9E3779B97F4A7C15ull;
  h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9ull;
  h = (h ^ h >> 27) * 0x94D049BB133111EBull;
  h ^= h >> 31;
  const unsigned bytes = 1 + unsigned(h >> 1 & (kSoakSlot - 1));
  return {(h & 1) == 0, bytes, unsigned(h >> 8 & 0xfff) % (kSoakSlot - bytes + 1),
          (h >> 20) % (shape.slots * kSoakSlot - bytes + 1)};
}

// All requests of a lane: the fault of one, or kNone when all have been sent.
template <typename Calls>
OFFCORE_INLINE unsigned soak_lane(const proxy::RequestPort& port, unsigned peer,
                                  const SoakShape& shape, unsigned lane) {
  const unsigned clocks = shape.buffers + 1;
  proxy::PutTicket tick{0, peer, proxy::kNone};
  proxy::Word before = 0;
  for (unsigned i = 0; i < shape.each; ++i) {
    const proxy::Word number = proxy::Word{i} * shape.lanes + lane;
    const unsigned dst = 1 + unsigned(number / shape.slots);
    const proxy::Word slot = number % shape.slots;
    const SoakRequest one = soak_request(shape, number);
    const proxy::PutTicket ticket =
        one.whole ? Calls::put(port, peer, dst, 0, slot, 1)
                  : Calls::put_bytes(port, peer, dst, slot * kSoakSlot + one.shift, 0, one.src,
                                     one.bytes);
    if (ticket.fault != proxy::kNone) return ticket.fault;
    if (ticket.position <= before) return kSoakWrong;
    before = ticket.position;
    if ((i + 1) % kSoakEvery != 0) continue;
    const unsigned fault = Calls::wait_sent(port, tick);
    if (fault != proxy::kNone) return fault;
    const proxy::Word shown = proxy::Word{(i + 1) / kSoakEvery} * kSoakClock;
    tick = Calls::put_bytes(port, peer, clocks, proxy::Word{lane} * kSoakClock, clocks + 1, shown,
                            kSoakClock, true);
    if (tick.fault != proxy::kNone) return tick.fault;
  }
  return Calls::wait_sent(port, tick);
}

// On the other side: until a lane's clock shows `last`. kTimeout: it has not moved for so long.
template <typename Memory>
OFFCORE_INLINE unsigned soak_watch(const proxy::Word* clock, proxy::Word last,
                                   proxy::Word limit_ns) {
  proxy::Word seen = 0;
  proxy::Word since_ns = Memory::now_ns();
  for (unsigned looks = 1; seen < last; ++looks) {
    const proxy::Word shown = Memory::load(clock);
    if (shown < seen) return kSoakWrong;
    const proxy::Word now_ns = Memory::now_ns();
    if (shown > seen) since_ns = now_ns;
    if (now_ns > since_ns && now_ns - since_ns > limit_ns) return proxy::kTimeout;
    seen = shown;
    Memory::rest(looks);
  }
  return proxy::kNone;
}

// And until all signals have come: not one more.
template <typename Calls>
OFFCORE_INLINE unsigned soak_signals(const proxy::RequestPort& port, unsigned peer,
                                     const SoakShape& shape) {
  const proxy::Word all = proxy::Word{shape.lanes} * (shape.each / kSoakEvery);
  const unsigned fault = Calls::wait(port, peer, shape.buffers + 1, all);
  if (fault != proxy::kNone) return fault;
  return Calls::received(port, peer, shape.buffers + 1) == all ? unsigned{proxy::kNone}
                                                               : kSoakWrong;
}

}  // namespace offcore
