#include "core/ir/program.h"

#include <algorithm>

#include "core/base/error.h"

namespace offcore {

std::string_view to_string(Op op) {
  constexpr std::string_view kNames[] = {"copy",      "swap",  "poll",  "signal",
                                         "timestamp", "fence", "reduce"};
  return kNames[static_cast<size_t>(op)];
}

std::string_view to_string(Mode mode) {
  constexpr std::string_view kNames[] = {"eager", "capture", "armed"};
  return kNames[static_cast<size_t>(mode)];
}

std::string_view to_string(Protocol protocol) {
  constexpr std::string_view kNames[] = {"barrier", "credits", "eager", "promise"};
  return kNames[static_cast<size_t>(protocol)];
}

Role role_of(std::string_view name) {
  if (name == "in") return Role::input;
  if (name == "out") return Role::output;
  if (name == "slot") return Role::slot;
  return name == "scratch" ? Role::scratch : Role::data;
}

std::string_view to_string(Buffer::Home kind) {
  constexpr std::string_view kNames[] = {"window", "local", "host", "paged"};
  return kNames[static_cast<size_t>(kind)];
}

std::string queue_name(const Queue& queue) {
  if (queue.index == kCallerQueue) return cat(queue.rank, ".caller");
  return cat(queue.rank, ".", queue.index);
}

void collect_bases(const Program& program, const Command& command, Bases& bases) {
  const auto collect = [&](const Slice& slice, int64_t step) {
    const bool known = slice.buffer < program.buffers.size() &&
                       (slice.rank < program.ranks || slice.rank == kHostRank);
    if (!known) fail(Code::invalid, program.op, " is not a valid program: verify it first");
    const uint32_t walked = step == kRankStep ? std::min<uint32_t>(command.rows, program.ranks) : 1;
    for (uint32_t row = 0; row < walked; ++row) {
      const std::pair base(slice.buffer, row_of(slice, step, row, program.ranks).rank);
      const auto at = std::lower_bound(bases.begin(), bases.end(), base);
      if (at == bases.end() || *at != base) bases.insert(at, base);
    }
  };
  if (command.op == Op::timestamp || command.op == Op::fence) return;
  if (command.op == Op::reduce) {
    collect(command.dst, 0);
    collect(command.src, 0);
    if (command.own != kFlagBuffer) collect(source_of(command, command.value), 0);
    return;
  }
  collect(command.dst, command.dst_step);
  if (moves_data(command.op)) collect(command.src, command.src_step);
}

Counts count(const Program& program) {
  Counts counts;
  for (const Queue& queue : program.queues) {
    if (queue.index == kCallerQueue) continue;
    ++counts.engines;
    for (const Command& command : queue.commands) {
      ++counts.commands;
      if (command.op == Op::signal) counts.syncs += command.rows;
      if (!moves_data(command.op)) continue;
      ++counts.copies;
      counts.bytes += command.bytes * command.rows * (command.op == Op::swap ? 2 : 1);
    }
  }
  return counts;
}

bool copies_within(const Program& program, Rank rank) {
  const auto within = [&](const Command& command) {
    if (!moves_data(command.op)) return false;
    for (uint32_t row = 0; row < command.rows; ++row) {
      const Rank dst = row_of(command.dst, command.dst_step, row, program.ranks).rank;
      const Rank src = row_of(command.src, command.src_step, row, program.ranks).rank;
      if (dst == rank && src == rank) return true;
    }
    return false;
  };
  return std::any_of(program.queues.begin(), program.queues.end(), [&](const Queue& queue) {
    return queue.rank == rank && std::any_of(queue.commands.begin(), queue.commands.end(), within);
  });
}

}  // namespace offcore
