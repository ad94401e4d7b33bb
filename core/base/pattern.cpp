#include "core/base/pattern.h"

#include <algorithm>
#include <cstring>

namespace offcore {
namespace {

constexpr uint64_t kWord = sizeof(uint64_t);

// Words of the stream: an odd multiplier makes neighbours differ in every byte, the shift brings
// the well-mixed upper half down.
uint64_t word_at(uint64_t seed, uint64_t index) {
  uint64_t value = (index + 1) * 0x9e3779b97f4a7c15 + seed * 0xd1342543de82ef95;
  value ^= value >> 29;
  return value * 0xbf58476d1ce4e5b9;
}

// Calls visit(position in the data, word, first byte of the word, bytes) over the whole range.
template <typename Visit>
void for_words(uint64_t bytes, uint64_t seed, uint64_t offset, Visit visit) {
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t skip = (offset + done) % kWord;
    const uint64_t take = std::min(kWord - skip, bytes - done);
    visit(done, word_at(seed, (offset + done) / kWord), skip, take);
    done += take;
  }
}

}  // namespace

void fill_pattern(std::span<std::byte> out, uint64_t seed, uint64_t offset) {
  for_words(out.size(), seed, offset, [&](uint64_t at, uint64_t word, uint64_t skip, uint64_t n) {
    if (n == kWord) {
      std::memcpy(out.data() + at, &word, kWord);
    } else {
      std::memcpy(out.data() + at, reinterpret_cast<const char*>(&word) + skip, n);
    }
  });
}

uint64_t count_wrong(std::span<const std::byte> data, uint64_t seed, uint64_t offset) {
  uint64_t wrong = 0;
  for_words(data.size(), seed, offset, [&](uint64_t at, uint64_t word, uint64_t skip, uint64_t n) {
    uint64_t seen = 0;
    if (n == kWord) {
      std::memcpy(&seen, data.data() + at, kWord);
      if (seen == word) return;
    }
    const auto* expected = reinterpret_cast<const std::byte*>(&word) + skip;
    for (uint64_t i = 0; i < n; ++i) wrong += data[at + i] != expected[i];
  });
  return wrong;
}

}  // namespace offcore
