// Producers that race for the ring of core/proxy/ring.h, and its engine: for the thread sanitizer.
// Before each request its producer writes a value into memory of its own, which the engine reads
// once the request has come, without an order of its own. UNORDERED: the ring's words release
// nothing, which the sanitizer has to see.
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "core/proxy/host_calls.h"
#include "studies/requests/numbered.h"

namespace {

using namespace offcore::proxy;

#ifdef UNORDERED
struct Words : HostWords {
  static void store(Word* at, Word value) { append(at, value); }
  static void store(unsigned* at, unsigned value) { HostWords::store(at, value); }
};
#else
using Words = HostWords;
#endif

constexpr unsigned kProducers = 4;
constexpr Word kEach = 20'000;
constexpr unsigned kSlotsLog2 = 6;  // many laps

Word values[kProducers][kEach];

struct Calls : RequestCalls<Words> {
  static PutTicket put(const RequestPort& port, unsigned peer, unsigned producer, unsigned src,
                       Word number, Word chunks) {
    values[producer][number] = number ^ producer;
    return RequestCalls::put(port, peer, producer, src, number, chunks);
  }
  static PutTicket put_bytes(const RequestPort& port, unsigned peer, unsigned producer, Word number,
                             unsigned src, Word src_offset, Word bytes) {
    values[producer][number] = number ^ producer;
    return RequestCalls::put_bytes(port, peer, producer, number, src, src_offset, bytes);
  }
};

}  // namespace

int main() {
  std::vector<Word> slots(Word{1} << kSlotsLog2);
  Word tail = 0, head = 0, taken = 0;
  const Word faults[2] = {};
  unsigned complaints[8] = {};
  RequestPort port{};
  port.slots = slots.data();
  port.tail = &tail;
  port.head = &head;
  port.taken = &taken;
  port.fault = port.fault_here = faults;
  port.complaints = complaints;
  port.limit_ns = 30'000'000'000;
  port.slots_log2 = kSlotsLog2;
  port.ranks = 2;
  port.buffers = kProducers;
  std::vector<std::thread> producers;
  for (unsigned own = 0; own < kProducers; ++own) {
    producers.emplace_back([&, own] {
      if (offcore::push_numbered<Calls>(port, own, kEach) > 0) std::_Exit(2);  // refused
    });
  }
  RequestReader<Words> reader(slots.data(), kSlotsLog2);
  std::vector<uint64_t> next(kProducers);
  Word wrong = 0;
  Word refreshed = 0;
  Word words[2] = {};
  for (Word count = 0; count < kProducers * kEach;) {
    if (reader.take(words) == 0) {
      sched_yield();
      continue;
    }
    ++count;
    const Word own = words[0] >> 48 & 63;  // the producer
    wrong +=
        !offcore::is_numbered(words, next) || values[own][next[own] - 1] != ((next[own] - 1) ^ own);
    if (reader.position() - refreshed < slots.size() / 4) continue;
    refreshed = reader.position();
    HostWords::store(&taken, refreshed);
    HostWords::store(&head, refreshed);
  }
  for (std::thread& one : producers) one.join();
  std::printf("%llu requests, %llu wrong\n", kProducers * kEach, wrong);
  return wrong == 0 ? 0 : 1;
}
