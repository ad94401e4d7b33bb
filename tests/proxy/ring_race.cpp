// Producers that race for the ring of core/proxy/ring.h, and its engine: for the thread sanitizer.
// Each request says who pushed it and as which one, and has a value in the producer's own memory,
// which the engine reads without an order of its own. UNORDERED: the ring's words release nothing,
// which the sanitizer has to see.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "core/proxy/host_calls.h"

namespace {

using namespace offcore::proxy;

#ifdef UNORDERED
struct Words : HostWords {
  static void store(Word* at, Word value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }
  static void store(unsigned* at, unsigned value) { HostWords::store(at, value); }
};
#else
using Words = HostWords;
#endif
using Calls = RequestCalls<Words>;

constexpr unsigned kProducers = 4;
constexpr unsigned kRanks = kProducers + 1;  // a peer each, and the rank itself
constexpr Word kEach = 100'000;
constexpr unsigned kSlotsLog2 = 6;  // many laps

struct Ring {
  std::vector<Word> slots = std::vector<Word>(Word{1} << kSlotsLog2);
  Word tail = 0, head = 0, taken = 0;
  std::vector<Word> faults = std::vector<Word>(kRanks);
  std::vector<Word> sent = std::vector<Word>(kRanks);
  std::vector<Word> received = std::vector<Word>(kRanks * kSignalStride);
  unsigned complaints[8] = {};

  RequestPort port() {
    RequestPort made{};
    made.slots = slots.data();
    made.tail = &tail;
    made.head = &head;
    made.taken = &taken;
    made.sent = sent.data();
    made.received = received.data();
    made.fault = made.fault_here = faults.data();
    made.complaints = complaints;
    made.limit_ns = 30'000'000'000;
    made.slots_log2 = kSlotsLog2;
    made.rank = kProducers;
    made.ranks = kRanks;
    made.buffers = kProducers;
    return made;
  }
};

// A producer's requests are of one word and of two, in turns; `peer` says whose they are.
void produce(const RequestPort& port, unsigned own, std::vector<Word>& values) {
  for (Word i = 0; i < kEach; ++i) {
    values[i] = i ^ own;
    const PutTicket ticket = i % 3 == 0 ? Calls::put_bytes(port, own, 0, i, 1, 2 * i, 8)
                                        : Calls::put(port, own, 0, 1, i, 1);
    if (ticket.fault != kNone) {
      std::fprintf(stderr, "producer %u: fault %u\n", own, ticket.fault);
      std::_Exit(1);
    }
  }
}

}  // namespace

int main() {
  Ring ring;
  const RequestPort port = ring.port();
  std::vector<std::vector<Word>> values(kProducers, std::vector<Word>(kEach));
  std::vector<std::thread> producers;
  for (unsigned own = 0; own < kProducers; ++own) {
    producers.emplace_back([&, own] { produce(port, own, values[own]); });
  }
  RequestReader<Words> reader(ring.slots.data(), kSlotsLog2);
  Word next[kProducers] = {};
  Word wrong = 0;
  Word refreshed = 0;
  Word words[2] = {};
  for (Word count = 0; count < kProducers * kEach;) {
    if (reader.take(words) == 0) {
      sched_yield();
      continue;
    }
    ++count;
    const auto own = unsigned(words[0] >> 54 & 63);
    const Word i = next[own]++;
    wrong += values[own][i] != (i ^ own) || (op_of(words[0]) == kPutBytes) != (i % 3 == 0);
    if (i % 3 != 0) wrong += (words[0] >> kChunkBits & kChunksMax) != i;
    if (reader.position() - refreshed >= ring.slots.size() / 4) {
      refreshed = reader.position();
      HostWords::store(&ring.taken, refreshed);
      HostWords::store(&ring.head, refreshed);
    }
  }
  for (std::thread& one : producers) one.join();
  std::printf("%llu requests, %llu wrong\n", kProducers * kEach, wrong);
  return wrong == 0 ? 0 : 1;
}
