// Whether a call lists a number twice. A bit each: a call touches few lines of the caches.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace offcore::kv {

class Listed {
 public:
  // Numbers lie below so many from now on.
  void hold(uint64_t numbers) {
    if (words_.size() * kBits < numbers) words_.resize((numbers + kBits - 1) / kBits);
  }
  // The first one that was listed before.
  std::optional<int64_t> twice(std::span<const int64_t> numbers) {
    std::optional<int64_t> found;
    for (const int64_t number : numbers) {
      uint64_t& word = words_[static_cast<uint64_t>(number) / kBits];
      const uint64_t bit = uint64_t{1} << (static_cast<uint64_t>(number) % kBits);
      if ((word & bit) != 0) {
        found = number;
        break;
      }
      word |= bit;
    }
    for (const int64_t number : numbers) words_[static_cast<uint64_t>(number) / kBits] = 0;
    return found;
  }

 private:
  static constexpr uint64_t kBits = 64;
  std::vector<uint64_t> words_;  // none is set between calls
};

}  // namespace offcore::kv
