// Bits by number.
#pragma once
#include <cstdint>
#include <vector>

namespace offcore::mcast {

class Bitmap {
 public:
  void resize(uint64_t bits) { words_.assign((bits + 63) / 64, 0); }  // all clear
  bool empty() const { return words_.empty(); }
  uint64_t bytes() const { return words_.size() * 8; }

  bool test(uint64_t bit) const { return (words_[bit / 64] >> (bit % 64)) & 1; }
  // Whether it was clear.
  bool set(uint64_t bit) {
    uint64_t& word = words_[bit / 64];
    const uint64_t mask = uint64_t{1} << (bit % 64);
    const bool clear = (word & mask) == 0;
    word |= mask;
    return clear;
  }
  void clear(uint64_t bit) { words_[bit / 64] &= ~(uint64_t{1} << (bit % 64)); }

  // The first bit at or after `from` that is clear (set); `end` where none is before it.
  uint64_t find_clear(uint64_t from, uint64_t end) const { return find(from, end, ~uint64_t{0}); }
  uint64_t find_set(uint64_t from, uint64_t end) const { return find(from, end, 0); }

 private:
  uint64_t find(uint64_t from, uint64_t end, uint64_t flip) const {
    while (from < end) {
      const uint64_t word = (words_[from / 64] ^ flip) >> (from % 64);
      if (word != 0) {
        const uint64_t found = from + static_cast<uint64_t>(__builtin_ctzll(word));
        return found < end ? found : end;
      }
      from = (from / 64 + 1) * 64;
    }
    return end;
  }

  std::vector<uint64_t> words_;
};

}  // namespace offcore::mcast
