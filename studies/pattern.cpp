#include "studies/pattern.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace offcore {
namespace {

constexpr uint64_t kWord = sizeof(uint64_t);
constexpr uint64_t kStep = 0x9e3779b97f4a7c15;

// A word of the stream from what counts up by a step a word: an odd multiplier makes neighbours
// differ in every byte, the shift brings the well-mixed upper half down.
uint64_t word_of(uint64_t count) { return (count ^ (count >> 29)) * 0xbf58476d1ce4e5b9; }

}  // namespace

void fill_pattern(std::span<std::byte> out, uint64_t seed, uint64_t offset) {
  uint64_t count = (offset / kWord + 1) * kStep + seed * 0xd1342543de82ef95;
  std::byte* at = out.data();
  uint64_t left = out.size();
  const auto put_part = [&](uint64_t skip, uint64_t bytes) {
    const uint64_t word = word_of(count);
    std::memcpy(at, reinterpret_cast<const std::byte*>(&word) + skip, bytes);
    at += bytes;
    left -= bytes;
  };
  if (const uint64_t skip = offset % kWord; skip != 0 && left > 0) {
    put_part(skip, std::min(kWord - skip, left));
    count += kStep;
  }
  for (; left >= kWord; at += kWord, left -= kWord, count += kStep) {
    const uint64_t word = word_of(count);
    std::memcpy(at, &word, kWord);
  }
  if (left > 0) put_part(0, left);
}

uint64_t count_wrong(std::span<const std::byte> data, uint64_t seed, uint64_t offset) {
  std::array<std::byte, 4096> expected;
  uint64_t wrong = 0;
  for (uint64_t done = 0; done < data.size(); done += expected.size()) {
    const auto seen = data.subspan(done, std::min(expected.size(), data.size() - done));
    fill_pattern({expected.data(), seen.size()}, seed, offset + done);
    if (std::memcmp(seen.data(), expected.data(), seen.size()) == 0) continue;
    for (uint64_t i = 0; i < seen.size(); ++i) wrong += seen[i] != expected[i];
  }
  return wrong;
}

}  // namespace offcore
