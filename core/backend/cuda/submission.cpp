#include "core/backend/cuda/submission.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "core/backend/wakeup.h"
#include "core/ir/text.h"

namespace offcore::cuda {
namespace {

bool is_private(const Program& program, const Slice& slice) {
  const Buffer& buffer = program.buffers[slice.buffer];
  return buffer.kind == Buffer::Home::local && buffer.name == "scratch";
}

// Splits an engine queue of an armed program; false where it cannot be.
bool split(const Program& program, const std::vector<Command>& commands, ArmedQueue& result) {
  std::set<BufferId> late_buffers;
  bool ordered = false;  // something in `ahead` orders data among itself
  size_t at = 0;
  while (at < commands.size() && commands[at].op == Op::poll)
    result.polls.push_back(commands[at++]);
  for (; at < commands.size() && commands[at].op != Op::poll; ++at) {
    const Command& command = commands[at];
    const bool window = program.buffers[command.dst.buffer].kind == Buffer::Home::window;
    if (moves_data(command.op) && !window && !is_private(program, command.dst)) {
      result.late.push_back(command);
      late_buffers.insert(command.dst.buffer);
      continue;
    }
    ordered = ordered || command.op == Op::fence || command.op == Op::timestamp;
    result.ahead.push_back(command);
  }
  result.rest.assign(commands.begin() + static_cast<std::ptrdiff_t>(at), commands.end());
  if (result.late.empty()) return true;
  return !ordered &&
         std::none_of(result.ahead.begin(), result.ahead.end(), [&](const Command& command) {
           return moves_data(command.op) && late_buffers.contains(command.src.buffer);
         });
}

void place_caller(const std::vector<Command>& commands, LocalProgram& local) {
  const auto first_poll =
      std::find_if(commands.begin(), commands.end(),
                   [](const Command& command) { return command.op == Op::poll; });
  local.leading = static_cast<size_t>(first_poll - commands.begin());
  const auto simple = [](Op op) {
    return [op](const Command& command) {
      return command.op == op || command.op == Op::timestamp || command.op == Op::fence;
    };
  };
  local.joined = std::all_of(commands.begin(), first_poll, simple(Op::signal)) &&
                 std::all_of(first_poll, commands.end(), simple(Op::poll));
}

}  // namespace

std::shared_ptr<const CudaProgram> compile(std::shared_ptr<const Program> program,
                                           const std::vector<std::shared_ptr<LocalGpu>>& devices) {
  CudaProgram compiled;
  for (uint32_t device = 0; device < devices.size(); ++device) {
    compiled.locals.push_back({.rank = devices[device]->rank(), .device = device});
  }
  for (uint32_t index = 0; index < program->queues.size(); ++index) {
    const Queue& queue = program->queues[index];
    const auto local =
        std::find_if(compiled.locals.begin(), compiled.locals.end(),
                     [&](const LocalProgram& candidate) { return candidate.rank == queue.rank; });
    if (local == compiled.locals.end()) continue;
    const Command* copied = nullptr;  // the last one
    for (const Command& command : queue.commands) {
      compiled.timed = compiled.timed || command.op == Op::timestamp;
      if (command.op == Op::swap) {
        fail(Code::unsupported, "no GPU of NVIDIA swaps: legalize the program for its machine");
      }
      if (copied != nullptr && same_bases(*copied, command)) continue;
      collect_bases(*program, command, compiled.bases);
      if (command.op == Op::copy) copied = &command;
    }
    if (queue.index == kCallerQueue) {
      local->caller = index;
      place_caller(queue.commands, *local);
    } else {
      local->engines.push_back(index);
    }
  }
  for (LocalProgram& local : compiled.locals) {
    if (program->mode != Mode::armed || !local.joined) continue;
    for (uint32_t engine : local.engines) {
      if (!split(*program, program->queues[engine].commands, local.aheads.emplace_back())) {
        local.aheads.clear();
        break;
      }
    }
  }
  compiled.program = std::move(program);
  return std::make_shared<const CudaProgram>(std::move(compiled));
}

bool CudaSubmission::ended() {
  const std::scoped_lock lock(mutex);
  if (end_ns >= 0) return true;
  bool all = true;  // each is asked: one that waits for a GPU that has failed is never passed
  for (RankPart& part : parts) {
    part.ended = part.ended || part.done == nullptr || part.done->passed();
    all = all && part.ended;
  }
  if (all) end_ns = now_ns();
  return all;
}

uint32_t CudaSubmission::poisoned() const {
  if (const uint32_t by = dead.load(std::memory_order_acquire); by != 0) return by;
  const std::scoped_lock lock(mutex);
  if (end_ns >= 0) return 0;  // its owner may be gone, and its wakeups with that
  for (const LocalProgram& local : compiled->locals) {
    const Wakeup& wakeup = *launch.wakeups[local.rank];
    if (const uint32_t by = wakeup.poison.load(std::memory_order_acquire); by != 0) return by;
  }
  return 0;
}

void CudaSubmission::poison(Rank by) const {
  const std::scoped_lock lock(mutex);
  if (end_ns >= 0) return;
  for (Wakeup* wakeup : launch.wakeups) offcore::poison(*wakeup, by);
}

Report CudaSubmission::report() const {
  Report report;
  report.time_ns = end_ns - launch_ns;
  report.phases.control_ns = static_cast<double>(control_ns);
  for (const RankPart& part : parts) {
    part.stats.add_to(report);
    for (const TimestampEvent& stamp : part.stats.stamps) {
      if (report.timestamps_ns.size() <= stamp.number) {
        report.timestamps_ns.resize(stamp.number + 1u, -1);
      }
      const double us = stamp.event.us_since(*part.start);
      report.timestamps_ns[stamp.number] = part.start_ns + std::llround(us * 1e3);
    }
  }
  return report;
}

std::vector<CUdeviceptr> CudaSubmission::awaited(uint32_t device,
                                                 const MappingTable& mappings) const {
  std::set<CUdeviceptr> words;
  const Program& program = *compiled->program;
  const LocalProgram& local = compiled->locals[device];
  std::vector<uint32_t> queues = local.engines;
  if (local.caller) queues.push_back(*local.caller);
  for (uint32_t queue : queues) {
    for (const Command& command : program.queues[queue].commands) {
      if (command.op != Op::poll) continue;
      for (uint32_t row = 0; row < command.rows; ++row) {
        const Slice word = row_of(command.dst, command.dst_step, row, program.ranks);
        std::byte* base = launch.binding.base(kFlagBuffer, word.rank);
        CUdeviceptr address = reinterpret_cast<CUdeviceptr>(base);
        if (mappings.find(base) == nullptr) {
          check(Driver::get().cuMemHostGetDevicePointer(&address, base, 0),
                "cuMemHostGetDevicePointer");
        }
        words.insert(address + word.offset * kWordBytes);
      }
    }
  }
  return {words.begin(), words.end()};
}

std::string CudaSubmission::position(const std::vector<std::shared_ptr<LocalGpu>>& devices) const {
  constexpr uint32_t kListed = 16;
  const Program& program = *compiled->program;
  std::string text;
  uint32_t stuck = 0;
  const auto reached = [&](const LocalGpu& device, const Command& command) {
    for (uint32_t row = 0; row < command.rows; ++row) {
      const Slice word = row_of(command.dst, command.dst_step, row, program.ranks);
      uint32_t value = 0;
      device.gpu().copy(&value,
                        launch.binding.base(kFlagBuffer, word.rank) + word.offset * kWordBytes,
                        sizeof value);
      if (!reached_value(value, launch.epoch + command.value)) return false;
    }
    return true;
  };
  for (const LocalProgram& local : compiled->locals) {
    std::vector<uint32_t> queues = local.engines;
    if (local.caller) queues.push_back(*local.caller);
    for (uint32_t index : queues) {
      const Queue& queue = program.queues[index];
      const auto blocked =
          std::find_if(queue.commands.begin(), queue.commands.end(), [&](const Command& command) {
            return command.op == Op::poll && !reached(*devices[local.device], command);
          });
      if (blocked == queue.commands.end() || ++stuck > kListed) continue;
      text += cat(text.empty() ? "" : "; ", "queue ", queue_name(queue), " at command ",
                  blocked - queue.commands.begin(), " (", print(*blocked, program), ")");
    }
  }
  if (stuck > kListed) text += cat("; and ", stuck - kListed, " more queues");
  if (stuck > 0) return text;
  return "every poll has what it waits for; the driver does not show which copy is under way";
}

}  // namespace offcore::cuda
