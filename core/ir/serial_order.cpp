#include "core/ir/serial_order.h"

#include <algorithm>
#include <map>

namespace offcore {
namespace {

class SerialOrder {
 public:
  explicit SerialOrder(const Program& program)
      : program_(program), next_(program.queues.size(), 0) {}

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

  std::pair<Rank, uint64_t> word(const Command& command, uint32_t row) const {
    const Slice place = row_of(command.dst, command.dst_step, row, program_.ranks);
    return {place.rank, place.offset};
  }

  void signal(const Command& command) {
    for (uint32_t row = 0; row < command.rows; ++row) words_[word(command, row)] = command.value;
  }

  bool passes(const Command& command) const {
    if (command.op != Op::poll) return true;
    for (uint32_t row = 0; row < command.rows; ++row) {
      const auto found = words_.find(word(command, row));
      if (found == words_.end() || found->second < command.value) return false;
    }
    return true;
  }

  const Program& program_;
  std::vector<uint32_t> next_;
  std::map<std::pair<Rank, uint64_t>, uint16_t> words_;
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
