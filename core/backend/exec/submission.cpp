#include "core/backend/exec/submission.h"

#include <algorithm>
#include <array>

#include "core/backend/wakeup.h"
#include "core/ir/serial_order.h"
#include "core/ir/text.h"

namespace offcore::exec {

std::vector<Rank> sorted_ranks(std::vector<Rank> local_ranks, Rank ranks) {
  std::sort(local_ranks.begin(), local_ranks.end());
  const bool twice =
      std::adjacent_find(local_ranks.begin(), local_ranks.end()) != local_ranks.end();
  if (local_ranks.empty() || twice || local_ranks.back() >= ranks) {
    fail(Code::invalid, "local_ranks must be distinct and not empty, each below world_size ",
         ranks);
  }
  return local_ranks;
}

CompiledProgram::CompiledProgram(std::shared_ptr<const Program> program_, Rank ranks,
                                 std::span<const Rank> local_ranks, bool pack, bool engines)
    : program(std::move(program_)),
      reduces(program->reduction.has_value()),
      interleaved(offcore::interleaved(*program)) {
  if (program->ranks != ranks) {
    fail(Code::invalid, "a program of ", program->ranks, " ranks cannot run on a backend of ",
         ranks);
  }
  if (program->only && !std::ranges::equal(local_ranks, std::array{*program->only})) {
    fail(Code::invalid, "the queues of rank ", *program->only,
         " alone run only where it is the one local rank");
  }
  const auto check_pages = [&](const Command& command) {
    const Buffer::Home dst = program->buffers[command.dst.buffer].kind;
    const Buffer::Home src = program->buffers[command.src.buffer].kind;
    if (dst != Buffer::Home::paged && src != Buffer::Home::paged) return;
    const bool host = dst == Buffer::Home::host || src == Buffer::Home::host;
    if (host ? engines : pack) return;
    fail(Code::unsupported, program->op, ": this backend has no ", host ? "engines" : "cores",
         " that copy pages");
  };
  for (Rank rank : local_ranks) locals.emplace_back().rank = rank;
  for (uint32_t index = 0; index < program->queues.size(); ++index) {
    const Queue& queue = program->queues[index];
    const auto local = std::find_if(locals.begin(), locals.end(),
                                    [&](const RankQueues& one) { return one.rank == queue.rank; });
    if (local == locals.end()) continue;
    local->queues.push_back(index);
    if (queue.index == kCallerQueue) {
      local->caller = queue.commands;
    } else {
      local->engines.push_back(index);
    }
    const Command* copied = nullptr;  // the last one
    for (const Command& command : queue.commands) {
      swaps |= command.op == Op::swap;
      if (command.op == Op::timestamp) timestamps = std::max(timestamps, command.value + 1u);
      if (copied != nullptr && same_bases(*copied, command)) continue;
      collect_bases(*program, command, bases);
      if (command.op != Op::copy) continue;
      copied = &command;
      check_pages(command);
    }
  }
}

void CompiledProgram::check(const Launch& launch) const {
  if (launch.binding.ranks() != program->ranks || launch.wakeups.size() != program->ranks ||
      launch.binding.buffers() != program->buffers.size() ||
      (!launch.streams.empty() && launch.streams.size() != locals.size()) ||
      std::find(launch.wakeups.begin(), launch.wakeups.end(), nullptr) != launch.wakeups.end()) {
    fail(Code::invalid, program->op, " needs bases of ", program->buffers.size(), " buffers at ",
         program->ranks, " ranks, a wakeup for each rank, and no streams or one for each of the ",
         locals.size(), " local ranks");
  }
  for (const auto& [buffer, rank] : bases) {
    if (launch.binding.base(buffer, rank) != nullptr) continue;
    fail(Code::invalid, "buffer ", program->buffers[buffer].name, " of ",
         rank == kHostRank ? "the host" : cat("rank ", rank), " is not mapped here");
  }
}

std::string print_position(const Program& program, std::span<const size_t> reached) {
  constexpr uint32_t kListed = 16;
  std::string text;
  uint32_t unfinished = 0;
  for (size_t i = 0; i < reached.size(); ++i) {
    const Queue& queue = program.queues[i];
    if (reached[i] >= queue.commands.size() || ++unfinished > kListed) continue;
    text += cat(text.empty() ? "" : "; ", "queue ", queue_name(queue), " at command ", reached[i],
                " (", print(queue.commands[reached[i]], program), ")");
  }
  if (unfinished > kListed) text += cat("; and ", unfinished - kListed, " more queues");
  return text;
}

Submission::Submission(std::shared_ptr<const CompiledProgram> of, const Launch& launch_,
                       size_t parts)
    : program(of->program),
      launch(launch_),
      timestamps_ns(of->timestamps, -1),
      parts_left(static_cast<uint32_t>(parts)),
      compiled_(std::move(of)) {}

void Submission::end() {
  const std::scoped_lock lock(mutex_);
  if (ended()) return;
  end_ns = now_ns();
  done_.store(true, std::memory_order_release);
}

uint32_t Submission::poisoned() {
  if (const uint32_t by = dead.load(std::memory_order_acquire); by != 0) return by;
  const std::scoped_lock lock(mutex_);
  if (ended()) return 0;  // its owner may be gone, and its wakeups with that
  for (const RankQueues& local : compiled_->locals) {
    const Wakeup& wakeup = *launch.wakeups[local.rank];
    if (const uint32_t by = wakeup.poison.load(std::memory_order_acquire); by != 0) return by;
  }
  return 0;
}

void Submission::poison(Rank by) {
  const std::scoped_lock lock(mutex_);
  if (ended()) return;
  for (Wakeup* wakeup : launch.wakeups) offcore::poison(*wakeup, by);
}

std::atomic_ref<uint32_t> Submission::word(const Slice& slice) const {
  return flag_word(launch.binding.base(kFlagBuffer, slice.rank), slice.offset);
}

void Submission::let_go(Freed& freed) {
  freed.push_back(std::move(launch.owner));
  std::move(kept.begin(), kept.end(), std::back_inserter(freed));
  kept.clear();
}

bool Submission::polled(const Command& poll) const {
  const uint32_t target = launch.epoch + poll.value;
  for (uint32_t row = 0; row < poll.rows; ++row) {
    const Slice place = row_of(poll.dst, poll.dst_step, row, program->ranks);
    if (!reached_value(read_word(place), target)) return false;
  }
  return true;
}

std::string Submission::position() const {
  std::vector<size_t> at(program->queues.size(), SIZE_MAX);
  try {
    for (const RankQueues& local : compiled_->locals) {
      for (uint32_t queue : local.queues) at[queue] = reached(queue);
    }
  } catch (const Error& held) {  // a GPU that is held does not tell, and the wait is over
    return held.message();
  }
  return print_position(*program, at);
}

Report Submission::report() const {
  Report report;
  report.time_ns = end_ns - launch_ns;
  report.timestamps_ns = timestamps_ns;
  report.phases.control_ns = static_cast<double>(control_ns);
  return report;
}

}  // namespace offcore::exec
