#include "core/ir/word_numbers.h"

#include <algorithm>

namespace offcore {

WordNumbers::WordNumbers(const Program& program) : homes_(program.ranks + size_t{1}) {
  for (const Queue& queue : program.queues) {
    for (const Command& command : queue.commands) {
      if (command.op != Op::signal && command.op != Op::poll) continue;
      for (uint32_t row = 0; row < command.rows; ++row) {
        const Slice word = row_of(command.dst, command.dst_step, row, program.ranks);
        WordRange& range = homes_[word.rank == kHostRank ? program.ranks : word.rank];
        range.begin = std::min(range.begin, word.offset);
        range.end = std::max(range.end, word.offset + 1);
      }
    }
  }
  for (WordRange& range : homes_) {
    range.number = count_;
    if (range.end > 0) count_ += range.end - range.begin;
  }
}

}  // namespace offcore
