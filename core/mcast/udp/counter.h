// A count that one thread makes and any thread may read.
#pragma once
#include <atomic>
#include <cstdint>

namespace offcore::mcast {

class Counter {
 public:
  void add(uint64_t n) {
    value_.store(value_.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
  operator uint64_t() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

}  // namespace offcore::mcast
