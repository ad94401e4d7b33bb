// Numbers the flag words that a program names. Where they live in host memory there are many, and
// none in the ranks'.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/ir/program.h"

namespace offcore {

class WordNumbers {
 public:
  explicit WordNumbers(const Program& program);
  size_t count() const { return count_; }
  size_t of(const Slice& word) const {
    const WordRange& range = homes_[word.rank == kHostRank ? homes_.size() - 1 : word.rank];
    return range.number + (word.offset - range.begin);
  }

 private:
  struct WordRange {
    uint64_t begin = UINT64_MAX;  // the words named lie in [begin, end)
    uint64_t end = 0;
    size_t number = 0;  // of the first
  };
  std::vector<WordRange> homes_;  // of the ranks, then the host's
  size_t count_ = 0;
};

}  // namespace offcore
