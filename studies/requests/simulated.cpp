#include "studies/requests/simulated.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <memory>
#include <random>
#include <semaphore>
#include <thread>
#include <utility>
#include <vector>

#include "core/proxy/ring.h"
#include "studies/requests/numbered.h"

namespace offcore {
namespace {

using proxy::RequestPort;
using proxy::Word;

// Assumed, in ns: a GPU's own memory, the host's own, a look again, a write across the link.
constexpr int64_t kGpuNs = 400;
constexpr int64_t kHostNs = 50;
constexpr int64_t kPauseNs = 100;
constexpr int64_t kPostedNs = 700;
constexpr int64_t kSubmitNs = 40'000;  // every few requests, the engine submits what has come
constexpr uint64_t kSubmitEvery = 64;
constexpr int64_t kLimitNs = 50'000'000;

// Who runs: one thread at a time hands over to the one that is due first.
class Turns {
 public:
  Turns(uint32_t threads, uint64_t seed) : random_(seed) {
    for (uint32_t i = 0; i < threads; ++i) threads_.push_back(std::make_unique<Turn>());
  }

  void begin() { hand_over(); }
  void enter(uint32_t thread) { threads_[thread]->go.acquire(); }
  void leave(uint32_t thread) {
    threads_[thread]->due_ns = kNever;
    hand_over();
  }

  // Lets that much time pass, and a little more or less.
  void pass(uint32_t thread, int64_t ns) {
    ++operations_;
    threads_[thread]->due_ns = now_ns_ + chance(ns);
    hand_over();
    threads_[thread]->go.acquire();
    for (size_t i = 0; i < posted_.size();) {
      if (posted_[i].due_ns > now_ns_) {
        ++i;
        continue;
      }
      *posted_[i].at = posted_[i].value;
      posted_[i] = posted_.back();
      posted_.pop_back();
    }
  }

  // A write that arrives later, whatever was written before.
  void post(Word* at, Word value) { posted_.push_back({now_ns_ + chance(kPostedNs), at, value}); }

  int64_t now_ns() const { return now_ns_; }
  uint64_t operations() const { return operations_; }
  bool over() const { return now_ns_ > kLimitNs; }

 private:
  static constexpr int64_t kNever = INT64_MAX;
  struct Turn {
    int64_t due_ns = 0;
    std::binary_semaphore go{0};
  };
  struct Posted {
    int64_t due_ns;
    Word* at;
    Word value;
  };

  int64_t chance(int64_t ns) {
    return ns / 2 + static_cast<int64_t>(random_() % static_cast<uint64_t>(ns));
  }

  void hand_over() {
    const auto first =
        std::min_element(threads_.begin(), threads_.end(),
                         [](const auto& a, const auto& b) { return a->due_ns < b->due_ns; });
    if ((*first)->due_ns == kNever) return;
    now_ns_ = std::max(now_ns_, (*first)->due_ns);
    (*first)->go.release();
  }

  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Turn>> threads_;
  std::vector<Posted> posted_;
  int64_t now_ns_ = 0;
  uint64_t operations_ = 0;
};

// The memory of a simulated thread.
class SimulatedWords {
 public:
  static Word load(const Word* at) { return pass(kGpuNs), *at; }
  static Word peek(const Word* at) { return pass(kGpuNs), *at; }
  static unsigned load(const unsigned* at) { return pass(kGpuNs), *at; }
  static void store(Word* at, Word value) { post(at, value); }
  static void store(unsigned* at, unsigned value) { pass(kGpuNs), *at = value; }
  static void append(Word* at, Word value) { post(at, value); }
  static Word add(Word* at, Word value) {
    pass(kGpuNs);
    return std::exchange(*at, *at + value);
  }
  static Word swap(Word* at, Word expected, Word value) {
    pass(kGpuNs);
    const Word found = *at;
    if (found == expected) *at = value;
    return found;
  }
  static Word now_ns() { return static_cast<Word>(turns_->now_ns()); }
  static void pause(unsigned) { pass(kPauseNs); }
  static void rest(unsigned) { ++waits_, pass(kPauseNs); }

  struct Lanes {  // a thread alone
    explicit Lanes(Word) {}
    static unsigned size() { return 1; }
    static unsigned place() { return 0; }
    static bool leads() { return true; }
    template <typename T>
    static T tell(T value) {
      return value;
    }
    static bool all(bool one) { return one; }
    static void meet() {}
  };

  // Runs as that thread, from its first turn to its last; how often it waited for room.
  static uint64_t run(Turns& turns, uint32_t thread, const std::function<void()>& body) {
    turns_ = &turns;
    thread_ = thread;
    waits_ = 0;
    turns.enter(thread);
    body();
    const uint64_t waits = waits_;
    turns.leave(thread);
    return waits;
  }
  static void pass(int64_t ns) { turns_->pass(thread_, ns); }
  static void post(Word* at, Word value) {
    turns_->post(at, value);
    pass(kHostNs);
  }

 private:
  static thread_local Turns* turns_;
  static thread_local uint32_t thread_;
  static thread_local uint64_t waits_;
};
thread_local Turns* SimulatedWords::turns_ = nullptr;
thread_local uint32_t SimulatedWords::thread_ = 0;
thread_local uint64_t SimulatedWords::waits_ = 0;

// The engine's looks at memory of its own host.
struct EngineWords {
  static Word load(const Word* at) { return SimulatedWords::pass(kHostNs), *at; }
};

}  // namespace

SimulatedRing simulate_ring(uint32_t producers, uint64_t requests, uint32_t slots, uint64_t seed) {
  std::vector<Word> ring(slots);
  std::vector<Word> none(proxy::kRanksMax);
  Word tail = 0, head = 0, taken = 0, fault_here = 0;
  unsigned complaints[8] = {};
  RequestPort port{};
  port.slots = ring.data();
  port.tail = &tail;
  port.head = &head;
  port.taken = &taken;
  port.fault = none.data();
  port.fault_here = &fault_here;
  port.complaints = complaints;
  port.limit_ns = kLimitNs;
  port.slots_log2 = static_cast<unsigned>(std::countr_zero(slots));
  port.ranks = 2;
  port.buffers = proxy::kBuffersMax;
  Turns turns(producers + 1, seed);
  SimulatedRing found;
  std::vector<uint64_t> wrong(producers), waits(producers);
  std::vector<std::thread> threads;
  for (uint32_t producer = 0; producer < producers; ++producer) {
    threads.emplace_back([&, producer] {
      waits[producer] = SimulatedWords::run(turns, producer, [&] {
        wrong[producer] =
            push_numbered<proxy::RequestCalls<SimulatedWords>>(port, producer, requests);
      });
    });
  }
  std::vector<uint64_t> next(producers);
  threads.emplace_back([&] {
    SimulatedWords::run(turns, producers, [&] {
      proxy::RequestReader<EngineWords> reader(ring.data(), port.slots_log2);
      Word words[2] = {};
      Word refreshed = 0;
      for (uint64_t got = 0; got < requests * producers && !turns.over();) {
        if (reader.take(words) == 0) continue;
        found.wrong += !is_numbered(words, next);
        if (++got % kSubmitEvery == 0) SimulatedWords::pass(kSubmitNs);
        if (reader.position() - refreshed < slots / 4) continue;
        refreshed = reader.position();
        SimulatedWords::post(&head, refreshed);
      }
      found.wrong += reader.take(words) != 0;
    });
  });
  turns.begin();
  for (std::thread& thread : threads) thread.join();
  for (uint32_t producer = 0; producer < producers; ++producer) {
    found.wrong += wrong[producer] + (next[producer] != requests);
    found.waits += waits[producer];
  }
  found.time_ns = turns.now_ns();
  found.operations = turns.operations();
  return found;
}

}  // namespace offcore
