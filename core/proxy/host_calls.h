// Requests by threads of this host: they reach all memory of the port by ordinary loads and stores.
#pragma once
#include <sched.h>

#include "core/base/clock.h"
#include "core/proxy/ring.h"

namespace offcore::proxy {

struct HostWords {
  static Word load(const Word* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
  static Word peek(const Word* at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
  static unsigned load(const unsigned* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
  static void store(Word* at, Word value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
  static void store(unsigned* at, unsigned value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
  static void append(Word* at, Word value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }
  static Word add(Word* at, Word count) { return __atomic_fetch_add(at, count, __ATOMIC_RELAXED); }
  static Word swap(Word* at, Word found, Word value) {
    __atomic_compare_exchange_n(at, &found, value, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
    return found;
  }
  static Word now_ns() { return static_cast<Word>(offcore::now_ns()); }
  static void pause(unsigned looks) {
    if (looks % 64 == 0) {
      sched_yield();
    } else {
      pause_briefly();
    }
  }
  static void rest(unsigned looks) { pause(looks); }

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
};

using HostCalls = RequestCalls<HostWords>;

}  // namespace offcore::proxy
