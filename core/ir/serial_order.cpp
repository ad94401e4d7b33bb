#include "core/ir/serial_order.h"

#include <algorithm>

#include "core/ir/word_numbers.h"

namespace offcore {
namespace {

class SerialOrder {
 public:
  explicit SerialOrder(const Program& program)
      : program_(program),
        next_(program.queues.size(), 0),
        numbers_(program),
        words_(numbers_.count(), kUnsignalled) {}

  std::vector<SerialStep> run() {
    // Reductions signal nothing that engines wait for first; a kernel then takes all that follows.
    if (!program_.reduction) pass(true);
    for (bool moved = true; moved;) {
      while (pass(false)) {
      }
      moved = pass(true);
    }
    return std::move(steps_);
  }

 private:
  bool pass(bool callers) {
    bool moved = false;
    for (uint32_t queue = 0; queue < program_.queues.size(); ++queue) {
      if ((program_.queues[queue].index == kCallerQueue) == callers) moved |= advance(queue);
    }
    return moved;
  }

  bool advance(uint32_t queue) {
    const std::vector<Command>& commands = program_.queues[queue].commands;
    uint32_t& next = next_[queue];
    const uint32_t first = next;
    while (next < commands.size() && passes(commands[next])) {
      if (commands[next].op == Op::signal) signal(commands[next]);
      ++next;
    }
    if (next > first) steps_.push_back({.queue = queue, .first = first, .last = next});
    return next > first;
  }

  size_t word(const Command& command, uint32_t row) const {
    return numbers_.of(row_of(command.dst, command.dst_step, row, program_.ranks));
  }

  void signal(const Command& command) {
    for (uint32_t row = 0; row < command.rows; ++row) words_[word(command, row)] = command.value;
  }

  bool passes(const Command& command) const {
    if (command.op != Op::poll) return true;
    for (uint32_t row = 0; row < command.rows; ++row) {
      if (words_[word(command, row)] < command.value) return false;
    }
    return true;
  }

  static constexpr int32_t kUnsignalled = -1;

  const Program& program_;
  std::vector<uint32_t> next_;
  const WordNumbers numbers_;
  std::vector<int32_t> words_;  // their values
  std::vector<SerialStep> steps_;
};

// Whether an engine queue polls behind its first data.
bool waits_amid(const Queue& queue) {
  if (queue.index == kCallerQueue) return false;
  const auto moves = [](const Command& command) { return moves_data(command.op); };
  const auto polls = [](const Command& command) { return command.op == Op::poll; };
  const auto first = std::find_if(queue.commands.begin(), queue.commands.end(), moves);
  return std::any_of(first, queue.commands.end(), polls);
}

bool signals(const Queue& queue) {
  return queue.index != kCallerQueue &&
         std::any_of(queue.commands.begin(), queue.commands.end(),
                     [](const Command& command) { return command.op == Op::signal; });
}

}  // namespace

std::vector<SerialStep> serial_order(const Program& program) { return SerialOrder(program).run(); }

bool interleaved(const Program& program) {
  if (program.mode == Mode::armed) return false;
  if (program.reduction.has_value()) return true;
  return std::any_of(program.queues.begin(), program.queues.end(), [&](const Queue& queue) {
    return waits_amid(queue) &&
           std::any_of(program.queues.begin(), program.queues.end(), [&](const Queue& other) {
             return &other != &queue && other.rank == queue.rank && signals(other);
           });
  });
}

}  // namespace offcore
