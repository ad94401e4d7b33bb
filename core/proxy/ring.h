// Requests of running kernels, and the ring that carries them to an engine. One header for GPU code
// (nvcc, NVRTC; device.cuh), for host threads and for tests: it includes nothing, and reaches
// memory only by `Memory`, a class of static functions:
//
//   Word load(const Word*)                  acquires, from other processors too
//   Word peek(const Word*)                  without an order
//   void store(Word*, Word)                 releases all that the caller has seen
//   void append(Word*, Word)                without an order; behind a store() of the same push
//   Word add(Word*, Word)                   fetch-and-add, without an order
//   Word swap(Word*, Word, Word)            compare-and-swap, releases; what was found
//   unsigned load(const unsigned*), void store(unsigned*, unsigned)
//   Word now_ns(), void pause(looks)
//   void rest(looks)                        a longer one, where many wait
//   Lanes(Word key)                         lanes of a warp that come together with one key (32 at
//                                           most): size(), place(), leads(); tell(value) of the
//                                           leader, all(bool) and meet(), where they meet
//
// A request is one word (kPut, kPutSignal, kSignal) or two (kPutBytes, kPutBytesSignal):
//
//   bits   63   62..60  59..54  53..48       47..42  41..21  20..0
//          lap  op      peer    destination  source  chunk   length, in chunks
//          lap  op      peer    destination  source  source offset (38), high bits of length (4)
//          lap  destination offset (38), low bits of length (25)
//
// Destination and source are numbers of registered buffers. One-word requests have one chunk for
// both; offsets and lengths of the others are bytes. Past the widths nothing can be registered
// (proxy.h), and a longer put is several requests.
//
// The ring: producers reserve words by adding to `tail` and fill them; the lap bit tells a word of
// this lap from one of the lap before, so that nobody needs an order between words. A producer
// fills a word only when the engine has taken what was there a lap ago. It compares with `head`, a
// replica in its own memory, and where that is behind it waits for it; nobody reads host memory. Of
// a group one lane does so for all. The engine refreshes `head` whenever it has taken a quarter of
// the ring more: a group that waits is at most kGroupWordsMax, half a ring, ahead of the last place
// that all see free, so that the engine gets that far. Positions are 64-bit numbers and only grow.
//
// Armed, `start` of the peer counts requests, and the peer's queue waits for it: one swap takes a
// number and starts what has it.
//
// Completions are sequence numbers that only grow: `sent` of a peer is the position behind the last
// of its requests whose data has left, `received` of a peer and a buffer the number of signals that
// have come, each behind the data of all earlier requests of that peer.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define OFFCORE_INLINE __device__ __forceinline__
#else
#define OFFCORE_INLINE inline
#endif

namespace offcore::proxy {

using Word = unsigned long long;

enum RequestOp : unsigned {
  kPut = 1,
  kPutSignal = 2,
  kSignal = 3,
  kPutBytes = 4,
  kPutBytesSignal = 5,
};

constexpr unsigned kRanksMax = 64;
constexpr unsigned kBuffersMax = 64;
constexpr unsigned kChunkBits = 21;
constexpr unsigned kOffsetBits = 38;
constexpr unsigned kBytesBits = 29;
constexpr unsigned kLowBytesBits = 25;
constexpr Word kChunksMax = (Word{1} << kChunkBits) - 1;    // of a put, and of a buffer
constexpr Word kOffsetMax = (Word{1} << kOffsetBits) - 1;   // of a buffer's last byte
constexpr Word kBytesMax = (Word{1} << kBytesBits) - 4096;  // of one request; whole pages
constexpr Word kLapBit = Word{1} << 63;
constexpr Word kClosed = Word{1} << 62;         // a head that leaves no room; a start that is over
constexpr Word kHeld = kClosed | kClosed << 1;  // the same, and behind all numbers modulo 2^64
constexpr unsigned kSignalStride = kBuffersMax;
constexpr unsigned kGroupWordsMax = 64;  // that lanes reserve together

// Why a call did not do what it was asked for.
enum PortFault : unsigned {
  kNone = 0,
  kTimeout = 1,   // a wait ran past its limit
  kFull = 2,      // no room in the ring for so long: the engine takes nothing more
  kInvalid = 3,   // a rank, buffer or range that is not registered, or not the schedule's
  kStopped = 4,   // the engine of this rank, or of the peer, was stopped
  kPeerLost = 5,  // a rank died or aborted
  kBroken = 6,    // a driver has refused something
};

// What a producer needs to know. All pointers are addresses that the producers reach.
struct RequestPort {
  Word* slots;             // host memory, 1 << slots_log2 words
  Word* tail;              // own memory, like all below: the next position
  const Word* head;        // up to where the engine has taken words, or less
  const Word* taken;       // host memory: the same as it is, to be looked at
  const Word* sent;        // by peer
  const Word* received;    // by peer and buffer (kSignalStride)
  const Word* fault;       // by rank: why its engine has ended (PortFault)
  const Word* fault_here;  // host memory: the same of this rank's
  unsigned* complaints;    // host memory: what producers have found wrong, by PortFault
  Word* start;             // armed: requests so far, by peer; kClosed at the end
  const Word* schedule;    // armed: the requests of all peers
  Word limit_ns;           // of a wait that names none
  unsigned slots_log2;
  unsigned rank;
  unsigned ranks;
  unsigned buffers;
  unsigned first[kRanksMax];   // armed: of the peer, in the schedule
  unsigned period[kRanksMax];  // armed: the peer's requests in a round
};

// A request under way. `fault` other than kNone: nothing was pushed.
struct PutTicket {
  Word position;
  unsigned peer;
  unsigned fault;
};

OFFCORE_INLINE constexpr Word head_of(unsigned op, unsigned peer, unsigned dst, unsigned src) {
  return Word{op} << 60 | Word{peer} << 54 | Word{dst} << 48 | Word{src} << 42;
}

OFFCORE_INLINE constexpr Word chunks_word(unsigned op, unsigned peer, unsigned dst, unsigned src,
                                          Word chunk, Word chunks) {
  return head_of(op, peer, dst, src) | chunk << kChunkBits | chunks;
}

OFFCORE_INLINE constexpr unsigned op_of(Word first) { return unsigned(first >> 60) & 7u; }

OFFCORE_INLINE constexpr unsigned words_of(unsigned op) { return op >= kPutBytes ? 2 : 1; }

// The lap bit of a word at that position: the ring begins as zeros.
OFFCORE_INLINE constexpr Word lap_of(Word position, unsigned slots_log2) {
  return (position >> slots_log2 & 1) == 0 ? kLapBit : 0;
}

// What producers call: every function may be called by many threads at once.
template <typename Memory>
struct RequestCalls {
  // Copies chunks [chunk, chunk + chunks) of buffer `src` to the same place of the peer's `dst`.
  // What the calling thread has seen written is sent.
  OFFCORE_INLINE static PutTicket put(const RequestPort& port, unsigned peer, unsigned dst,
                                      unsigned src, Word chunk, Word chunks) {
    return push_chunks(port, kPut, peer, dst, src, chunk, chunks);
  }

  // The same; then adds one to what the peer has received from this rank in `dst`.
  OFFCORE_INLINE static PutTicket put_signal(const RequestPort& port, unsigned peer, unsigned dst,
                                             unsigned src, Word chunk, Word chunks) {
    return push_chunks(port, kPutSignal, peer, dst, src, chunk, chunks);
  }

  // That alone, behind all earlier requests for the peer.
  OFFCORE_INLINE static PutTicket signal(const RequestPort& port, unsigned peer, unsigned dst) {
    return push_chunks(port, kSignal, peer, dst, 0, 0, 0);
  }

  // Any bytes of two registered buffers: two words a request, and as many requests as it takes.
  OFFCORE_INLINE static PutTicket put_bytes(const RequestPort& port, unsigned peer, unsigned dst,
                                            Word dst_offset, unsigned src, Word src_offset,
                                            Word bytes, bool signalled = false) {
    const Word end = kOffsetMax + 1;
    if (dst_offset >= end || bytes > end - dst_offset || src_offset >= end ||
        bytes > end - src_offset || !named(port, peer, dst, src)) {
      return refuse(port, peer);
    }
    for (;;) {
      const Word part = bytes < kBytesMax ? bytes : kBytesMax;
      bytes -= part;
      const unsigned op = bytes == 0 && signalled ? kPutBytesSignal : kPutBytes;
      const Word words[2] = {
          head_of(op, peer, dst, src) | src_offset << 4 | part >> kLowBytesBits,
          dst_offset << kLowBytesBits | (part & ((Word{1} << kLowBytesBits) - 1))};
      const PutTicket ticket = push(port, peer, words, 2);
      if (bytes == 0 || ticket.fault != kNone) return ticket;
      src_offset += part;
      dst_offset += part;
    }
  }

  // Whether the request's data has left: its source may be written again.
  OFFCORE_INLINE static bool test(const RequestPort& port, const PutTicket& ticket) {
    return ticket.fault == kNone && ticket.peer < port.ranks &&
           Memory::load(&port.sent[ticket.peer]) >= ticket.position;
  }

  // Waits until that is so.
  OFFCORE_INLINE static unsigned wait_sent(const RequestPort& port, const PutTicket& ticket,
                                           Word limit_ns = 0) {
    if (ticket.fault != kNone) return ticket.fault;
    if (ticket.peer >= port.ranks) return refuse(port, ticket.peer).fault;
    return spin(port, port.rank, limit_ns, [&] { return test(port, ticket); });
  }

  // The same of all requests for the peer that were pushed before.
  OFFCORE_INLINE static unsigned flush(const RequestPort& port, unsigned peer, Word limit_ns = 0) {
    if (!named(port, peer, 0, 0)) return refuse(port, peer).fault;
    if (port.start == nullptr) return wait_sent(port, put(port, peer, 0, 0, 0, 0), limit_ns);
    return wait_sent(port, {Memory::peek(&port.start[peer]), peer, kNone}, limit_ns);
  }

  // How many signals have come from the peer in a buffer.
  OFFCORE_INLINE static Word received(const RequestPort& port, unsigned peer, unsigned buffer) {
    return Memory::load(&port.received[peer * kSignalStride + buffer]);
  }

  // Waits for the count-th: then the data of all requests before it is there.
  OFFCORE_INLINE static unsigned wait(const RequestPort& port, unsigned peer, unsigned buffer,
                                      Word count, Word limit_ns = 0) {
    if (peer >= port.ranks || buffer >= port.buffers) return refuse(port, peer).fault;
    return wait_word(port, peer, &port.received[peer * kSignalStride + buffer], count, limit_ns);
  }

  // Waits until a word that the peer raises is that large.
  OFFCORE_INLINE static unsigned wait_word(const RequestPort& port, unsigned peer, const Word* word,
                                           Word count, Word limit_ns = 0) {
    return spin(port, peer, limit_ns, [&] { return Memory::load(word) >= count; });
  }

 private:
  OFFCORE_INLINE static bool named(const RequestPort& port, unsigned peer, unsigned dst,
                                   unsigned src) {
    return peer < port.ranks && peer != port.rank && dst < port.buffers && src < port.buffers;
  }

  OFFCORE_INLINE static PutTicket refuse(const RequestPort& port, unsigned peer) {
    complain(port, kInvalid);
    return {0, peer, kInvalid};
  }

  OFFCORE_INLINE static void complain(const RequestPort& port, unsigned fault) {
    Memory::store(&port.complaints[fault], 1u);
  }

  // A place that stays empty: nothing behind it is ever taken.
  OFFCORE_INLINE static PutTicket give_up(const RequestPort& port, unsigned peer, unsigned fault) {
    if (fault == kTimeout) fault = kFull;
    if (fault == kFull) complain(port, kFull);
    return {0, peer, fault};
  }

  OFFCORE_INLINE static PutTicket push_chunks(const RequestPort& port, unsigned op, unsigned peer,
                                              unsigned dst, unsigned src, Word chunk, Word chunks) {
    if (chunk > kChunksMax || chunks > kChunksMax || !named(port, peer, dst, src)) {
      return refuse(port, peer);
    }
    const Word word = chunks_word(op, peer, dst, src, chunk, chunks);
    if (port.start != nullptr) return start(port, peer, word);
    return push(port, peer, &word, 1);
  }

  OFFCORE_INLINE static PutTicket push(const RequestPort& port, unsigned peer, const Word* words,
                                       unsigned count) {
    if (port.start != nullptr) return refuse(port, peer);  // no schedule has such a request
    const typename Memory::Lanes lanes(reinterpret_cast<Word>(port.tail) + count);
    Word position = 0;
    unsigned fault = kNone;
    if (lanes.leads()) {
      const Word all = Word{count} * lanes.size();
      const Word head = Memory::peek(port.head);  // with the next one under way
      position = Memory::add(port.tail, all);
      fault = make_room(port, position + all, head);
    }
    fault = lanes.tell(fault);
    if (fault != kNone) return give_up(port, peer, fault);
    position = lanes.tell(position) + Word{count} * lanes.place();
    const Word slots = Word{1} << port.slots_log2;
    for (unsigned i = 0; i < count; ++i) {
      Word* slot = &port.slots[(position + i) & (slots - 1)];
      const Word word = words[i] | lap_of(position + i, port.slots_log2);
      if (i == 0) {
        Memory::store(slot, word);
      } else {
        Memory::append(slot, word);
      }
    }
    lanes.meet();
    return {position + count, peer, kNone};
  }

  // Waits until the ring takes all words before `end`.
  OFFCORE_INLINE static unsigned make_room(const RequestPort& port, Word end, Word head) {
    const auto fits = [&] { return end - head <= Word{1} << port.slots_log2; };
    if (fits()) return kNone;
    return spin<true>(port, port.rank, 0, [&] {
      head = Memory::peek(port.head);
      return fits();
    });
  }

  // Armed: the peer's next request lies in its queue already, and starts by this swap.
  OFFCORE_INLINE static PutTicket start(const RequestPort& port, unsigned peer, Word word) {
    Word* const count = &port.start[peer];
    const unsigned period = port.period[peer];
    const Word* const planned = port.schedule + port.first[peer];
    if (period == 0) return refuse(port, peer);
    const typename Memory::Lanes lanes(reinterpret_cast<Word>(count));
    for (;;) {
      const Word before = lanes.tell(lanes.leads() ? Memory::peek(count) : 0);
      if (before >= kClosed) {
        const unsigned fault = unsigned(Memory::load(port.fault_here));  // it may be seen later
        return give_up(port, peer, fault == kNone ? unsigned{kStopped} : fault);
      }
      const Word number = before + lanes.place();
      if (!lanes.all(planned[period == 1 ? 0 : number % period] == word)) {
        return refuse(port, peer);
      }
      Word found = 0;
      if (lanes.leads()) found = Memory::swap(count, before, before + lanes.size());
      if (lanes.tell(found) == before) return {number + 1, peer, kNone};
    }
  }

  // Until it is ready, an engine has failed (this rank's or the peer's), or the limit is over.
  template <bool Patient = false, typename Ready>
  OFFCORE_INLINE static unsigned spin(const RequestPort& port, unsigned peer, Word limit_ns,
                                      const Ready& ready) {
    if (limit_ns == 0) limit_ns = port.limit_ns;
    Word began_ns = 0;
    for (unsigned looks = 1;; ++looks) {
      if (ready()) return kNone;
      if (looks % 64 == 0) {
        unsigned fault = unsigned(Memory::load(&port.fault[port.rank]));
        if (fault == kNone) fault = unsigned(Memory::load(&port.fault[peer]));
        if (fault == kNone && looks % 4096 == 0) fault = unsigned(Memory::load(port.fault_here));
        if (fault != kNone) return ready() ? unsigned{kNone} : fault;
        const Word now_ns = Memory::now_ns();
        if (began_ns == 0) began_ns = now_ns;
        if (now_ns - began_ns > limit_ns) {
          complain(port, kTimeout);
          return kTimeout;
        }
      }
      Patient ? Memory::rest(looks) : Memory::pause(looks);
    }
  }
};

#if !defined(__CUDACC__) && !defined(__CUDACC_RTC__)

// The engine's side of a ring: one thread takes the words in the order of their positions.
template <typename Memory>
class RequestReader {
 public:
  RequestReader(const Word* slots, unsigned slots_log2) : slots_(slots), log2_(slots_log2) {}

  Word position() const { return position_; }

  // The next request's words, if all of them are there: how many; else 0.
  unsigned take(Word (&words)[2]) {
    if (!look(position_, words[0])) return 0;
    const unsigned count = words_of(op_of(words[0]));
    if (count == 2 && !look(position_ + 1, words[1])) return 0;
    position_ += count;
    return count;
  }

 private:
  bool look(Word position, Word& word) const {
    word = Memory::load(&slots_[position & ((Word{1} << log2_) - 1)]);
    const bool here = (word & kLapBit) == lap_of(position, log2_);
    word &= ~kLapBit;
    return here;
  }

  const Word* slots_;
  unsigned log2_;
  Word position_ = 0;
};

#endif

}  // namespace offcore::proxy
