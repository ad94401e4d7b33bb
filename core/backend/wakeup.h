// The eventcount behind Wakeup: signal a word and wake, look and sleep, poison.
//
// No wake-up is lost: a waker stores its word and then reads `sleepers`; a sleeper constructs its
// Sleeper, which raises `sleepers`, then looks at the words it waits for, and only then sleeps. A
// fence stands between the two steps of each, so at least one of them sees the other. A waker that
// sees a sleeper raises `count`, on which the sleeper sleeps only while it has not changed. Where
// nobody sleeps the wakeup is only read: its cache line stays with everyone who looks at it.
// The words are futexes shared between processes. Sleeps are bounded all the same: a peer may be
// killed between its store and its wake-up.
#pragma once
#include <cstdint>

#include "core/backend/backend.h"

namespace offcore {

// A flag word of a buffer, as an atomic.
inline std::atomic_ref<uint32_t> flag_word(std::byte* flags, uint64_t word) {
  return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(flags + word * kWordBytes));
}

// Cyclically value >= target.
inline bool reached_value(uint32_t value, uint32_t target) {
  return static_cast<int32_t>(value - target) >= 0;
}

// Sets the word to `target` unless it is there or beyond already: a word never falls back.
inline void raise_word(std::atomic_ref<uint32_t> word, uint32_t target) {
  uint32_t value = word.load(std::memory_order_relaxed);
  while (!reached_value(value, target) &&
         !word.compare_exchange_weak(value, target, std::memory_order_release,
                                     std::memory_order_relaxed)) {
  }
}

// Tells the rank's sleepers that a word has changed. Call it after the word's release store.
void wake(Wakeup& wakeup);

// Makes every wait of the rank fail, naming `by`; the first to poison stays. Wakes the sleepers.
void poison(Wakeup& wakeup, Rank by);

class Sleeper {
 public:
  explicit Sleeper(Wakeup& wakeup);
  ~Sleeper();
  Sleeper(const Sleeper&) = delete;
  // Until a wake-up since construction (or since the last sleep), or the time is over.
  void sleep(int64_t wait_ns);

 private:
  Wakeup& wakeup_;
  uint32_t seen_;
};

}  // namespace offcore
