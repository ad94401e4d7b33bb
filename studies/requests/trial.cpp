#include "studies/requests/trial.h"

#include <atomic>
#include <barrier>
#include <bit>
#include <cstring>
#include <memory>
#include <thread>

#include "core/base/clock.h"
#include "core/base/threads.h"
#include "core/proxy/host_calls.h"
#include "studies/requests/numbered.h"

namespace offcore {
namespace {

using proxy::HostCalls;
using proxy::HostWords;
using proxy::RequestPort;
using proxy::Word;

std::byte stamp(uint64_t round, uint64_t chunk, uint64_t at) {
  return static_cast<std::byte>((round * 131 + chunk * 31 + at * 7) % 251);
}

// Threads that push as the lanes of a warp do: all of them come to every push.
class LaneWords : public HostWords {
 public:
  struct Warp {
    explicit Warp(uint32_t lanes) : size(lanes), meeting(lanes) {}
    const uint32_t size;
    std::barrier<> meeting;
    uint64_t told = 0;
  };
  static void enter(Warp& warp, uint32_t lane) {
    warp_ = &warp;
    lane_ = lane;
  }

  struct Lanes {
    explicit Lanes(Word) {}
    static unsigned size() { return warp_->size; }
    static unsigned place() { return lane_; }
    static bool leads() { return lane_ == 0; }
    template <typename T>
    static T tell(T value) {
      if (leads()) warp_->told = value;
      warp_->meeting.arrive_and_wait();
      const auto told = static_cast<T>(warp_->told);
      warp_->meeting.arrive_and_wait();
      return told;
    }
    static bool all(bool one) { return one; }
    static void meet() {}
  };

 private:
  static thread_local Warp* warp_;
  static thread_local uint32_t lane_;
};
thread_local LaneWords::Warp* LaneWords::warp_ = nullptr;
thread_local uint32_t LaneWords::lane_ = 0;

}  // namespace

RingTrial trial_ring(uint32_t producers, uint64_t requests, uint32_t slots, uint32_t lanes) {
  struct alignas(64) Line {
    Word word = 0;
  };
  std::vector<Word> ring(slots);
  std::vector<Word> none(proxy::kRanksMax);
  Line tail, head, taken, fault_here;
  unsigned complaints[8] = {};
  const unsigned log2 = static_cast<unsigned>(std::countr_zero(slots));
  RequestPort port{};
  port.slots = ring.data();
  port.tail = &tail.word;
  port.head = &head.word;
  port.taken = &taken.word;
  port.fault = none.data();
  port.fault_here = &fault_here.word;
  port.complaints = complaints;
  port.limit_ns = Word{60} * 1'000'000'000;
  port.slots_log2 = log2;
  port.ranks = 2;
  port.buffers = proxy::kBuffersMax;
  RingTrial trial;
  std::atomic<uint64_t> wrong{0};
  const int64_t began_ns = now_ns();
  std::vector<std::thread> threads;
  const uint64_t each = requests / producers;
  std::vector<std::unique_ptr<LaneWords::Warp>> warps;
  for (uint32_t producer = 0; producer < producers; ++producer) {
    if (producer % lanes == 0) warps.push_back(std::make_unique<LaneWords::Warp>(lanes));
    threads.emplace_back([&, producer, warp = warps.back().get()] {
      if (lanes == 1) {
        wrong += push_numbered<HostCalls>(port, producer, each);
        return;
      }
      LaneWords::enter(*warp, producer % lanes);
      wrong += push_numbered<proxy::RequestCalls<LaneWords>>(port, producer, each);
    });
  }
  proxy::RequestReader<HostWords> reader(ring.data(), log2);
  std::vector<uint64_t> next(producers);
  Word words[2] = {};
  Word refreshed = 0;
  for (uint64_t got = 0; got < each * producers;) {
    uint32_t empty = 0;
    while (reader.take(words) == 0 && ++empty < 10'000'000) HostWords::pause(empty);
    if (empty == 10'000'000) break;
    if (!is_numbered(words, next)) ++wrong;
    ++got;
    HostWords::store(&taken.word, reader.position());
    if (reader.position() - refreshed >= slots / 4) {
      refreshed = reader.position();
      HostWords::store(&head.word, refreshed);
    }
  }
  for (std::thread& thread : threads) thread.join();
  trial.time_ns = now_ns() - began_ns;
  for (const uint64_t got : next) wrong += got != each;
  wrong += reader.take(words) != 0;
  trial.wrong = wrong;
  return trial;
}

uint64_t trial_exchange(const std::vector<ExchangeEnd>& ends, uint32_t producers, uint64_t rounds,
                        uint64_t chunk_bytes) {
  const auto ranks = static_cast<uint32_t>(ends.size());
  const uint64_t port_chunks = 1;
  std::atomic<uint64_t> wrong{0};
  std::barrier<> round_over(static_cast<std::ptrdiff_t>(ranks) * producers);
  const auto check = [&](const ExchangeEnd& end, uint64_t chunk, uint64_t round) {
    const std::byte* at = end.receive + chunk * chunk_bytes;
    for (uint64_t i = 0; i < chunk_bytes; ++i) {
      if (at[i] != stamp(round, chunk, i)) return ++wrong, void();
    }
  };
  const auto produce = [&](uint32_t rank, uint32_t producer) {
    const ExchangeEnd& end = ends[rank];
    const uint64_t own = rank * uint64_t{producers} + producer;
    for (uint64_t round = 1; round <= rounds; ++round) {
      for (uint64_t i = 0; i < chunk_bytes; ++i) {
        end.send[own * chunk_bytes + i] = stamp(round, own, i);
      }
      std::vector<proxy::PutTicket> tickets;
      for (uint32_t peer = 0; peer < ranks; ++peer) {
        if (peer == rank) continue;
        tickets.push_back((round + producer) % 2 == 0
                              ? HostCalls::put_signal(*end.port, peer, 1, 0, own, port_chunks)
                              : HostCalls::put_bytes(*end.port, peer, 1, own * chunk_bytes, 0,
                                                     own * chunk_bytes, chunk_bytes, true));
      }
      for (uint32_t peer = 0; peer < ranks; ++peer) {
        if (peer == rank) continue;
        wrong += HostCalls::wait(*end.port, peer, 1, round * producers) != proxy::kNone;
        check(end, peer * uint64_t{producers} + producer, round);
      }
      for (const proxy::PutTicket& ticket : tickets) {
        wrong += HostCalls::wait_sent(*end.port, ticket) != proxy::kNone;
      }
      round_over.arrive_and_wait();
    }
  };
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    for (uint32_t producer = 0; producer < producers; ++producer) {
      threads.emplace_back(produce, rank, producer);
    }
  }
  for (std::thread& thread : threads) thread.join();
  return wrong;
}

uint64_t trial_soak(const RequestPort& sender, const RequestPort& receiver, const SoakShape& shape,
                    const Word* clocks) {
  std::atomic<uint64_t> failed{0};
  std::vector<std::thread> threads;
  for (uint32_t lane = 0; lane < shape.lanes; ++lane) {
    threads.emplace_back([&, lane] {
      failed += soak_lane<HostCalls>(sender, receiver.rank, shape, lane) != proxy::kNone;
    });
    if (clocks == nullptr) continue;
    threads.emplace_back([&, clock = clocks + lane * (kSoakClock / sizeof(Word))] {
      const Word last = shape.each / kSoakEvery;
      failed += soak_watch<HostWords>(clock, last, receiver.limit_ns) != proxy::kNone;
    });
  }
  failed += soak_signals<HostCalls>(receiver, sender.rank, shape) != proxy::kNone;
  for (std::thread& thread : threads) thread.join();
  return failed;
}

}  // namespace offcore
