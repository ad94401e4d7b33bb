// Signals amid a queue's data, from a stream of their own.
#include <algorithm>

#include "core/backend/cuda/stream_encoder.h"

namespace offcore::cuda {

size_t signals_aside(std::span<const Command> queue) {
  const auto last = std::find_if(queue.rbegin(), queue.rend(),
                                 [](const Command& command) { return moves_data(command.op); });
  const auto end = static_cast<size_t>(queue.rend() - last);
  const auto signals = [&](size_t from, size_t to, const auto& wanted) {
    return std::any_of(
        queue.begin() + static_cast<ptrdiff_t>(from), queue.begin() + static_cast<ptrdiff_t>(to),
        [&](const Command& command) { return command.op == Op::signal && wanted(command); });
  };
  if (!signals(0, end, [](const Command&) { return true; })) return 0;
  const bool again = signals(end, queue.size(), [&](const Command& late) {
    return signals(0, end, [&](const Command& early) { return early.dst == late.dst; });
  });
  return again ? queue.size() : end;
}

void StreamEncoder::send_aside(CUstream stream, const Command* end) {
  aside_ = stream;
  aside_end_ = end;
  passed_.emplace(device_.event());
}

void StreamEncoder::signal_aside(const Command& command) {
  if (aside_ops_.empty()) {
    flush_copies();
    flush_ops();
    passed_->record(stream_);
    passed_->enqueue_wait(aside_);
  }
  for (uint32_t row = 0; row < command.rows; ++row) {
    if (aside_ops_.size() == kMemOpsMax) flush_aside();
    aside_ops_.push_back(
        {.operation = kOpWrite32,
         .address = place(row_of(command.dst, command.dst_step, row, program_.ranks)).address,
         .value = launch_.epoch + command.value});
  }
}

void StreamEncoder::flush_aside() {
  if (aside_ops_.empty()) return;
  submitted(Driver::get().cuStreamBatchMemOp(aside_, static_cast<unsigned>(aside_ops_.size()),
                                             aside_ops_.data(), 0),
            "cuStreamBatchMemOp");
  aside_ops_.clear();
}

}  // namespace offcore::cuda
