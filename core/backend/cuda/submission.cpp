#include "core/backend/cuda/submission.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "core/backend/cuda/reduce_kernel.h"
#include "core/backend/cuda/spare_engines.h"

namespace offcore::cuda {
namespace {

bool is_private(const Program& program, const Slice& slice) {
  const Buffer& buffer = program.buffers[slice.buffer];
  return buffer.kind == Buffer::Home::local && buffer.role == Role::scratch;
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

void place_caller(LocalProgram& local) {
  const std::span<const Command> commands = local.caller;
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

bool within(const Program& program, const Command& command) {
  for (uint32_t row = 0; row < command.rows; ++row) {
    if (row_of(command.dst, command.dst_step, row, program.ranks).rank !=
        row_of(command.src, command.src_step, row, program.ranks).rank) {
      return false;
    }
  }
  return true;
}

// Gives spare engines their share of what the rank keeps, where large copies of it have a queue of
// their own. Not beside copies to and from the host, which those engines make.
void share_own(const Program& program, LocalProgram& local) {
  uint64_t own = 0;
  uint64_t pushed = 0;
  uint64_t moved = 0;
  for (size_t i = 0; i < local.engines.size(); ++i) {
    const std::vector<Command>& commands = program.queues[local.engines[i]].commands;
    uint64_t kept = 0;
    bool alone = true;
    for (const Command& command : commands) {
      const uint64_t bytes = command.bytes * command.rows;
      alone = alone && command.op == Op::copy && command.rows == 1 &&
              bytes >= SpareEngines::kCopyMin && within(program, command);
      if (!moves_data(command.op)) continue;
      if (command.dst.rank == kHostRank || command.src.rank == kHostRank) return;
      (within(program, command) ? kept : pushed) += bytes;
    }
    if (alone && kept > own) {
      moved += std::exchange(own, kept);
      local.spared = i;
    } else {
      moved += kept;
    }
  }
  local.spare_bytes = SpareEngines::share(own, pushed, moved);
}

// How a program whose queues wait for each other is enqueued.
void serialize(CudaProgram& compiled) {
  for (const SerialStep& step : serial_order(*compiled.program)) {
    const Queue& queue = compiled.program->queues[step.queue];
    for (LocalProgram& local : compiled.gpus) {
      if (local.rank != queue.rank) continue;
      const auto gpu = static_cast<uint32_t>(&local - compiled.gpus.data());
      auto& serial = compiled.serial;
      if (!serial.empty() && serial.back().step.queue == step.queue) {
        serial.back().step.last = step.last;  // nothing of this process lies between them
      } else {
        serial.push_back({.gpu = gpu, .step = step});
      }
    }
  }
  for (LocalProgram& local : compiled.gpus) {
    local.leading = 0;
    local.joined = false;
  }
  compiled.one_stream = compiled.program->mode == Mode::capture;
}

}  // namespace

bool packs(const std::vector<std::shared_ptr<LocalGpu>>& devices) {
  return std::all_of(devices.begin(), devices.end(),
                     [](const auto& device) { return device->pack_kernel() != nullptr; });
}

std::shared_ptr<const CudaProgram> compile(std::shared_ptr<const Program> program, Rank ranks,
                                           const std::vector<std::shared_ptr<LocalGpu>>& devices) {
  std::vector<Rank> local_ranks;
  for (const auto& device : devices) local_ranks.push_back(device->rank());
  const auto compiled =
      std::make_shared<CudaProgram>(std::move(program), ranks, local_ranks, packs(devices));
  const auto& queues = compiled->program->queues;
  if (compiled->swaps) {
    fail(Code::unsupported, "no GPU of NVIDIA swaps: legalize the program for its machine");
  }
  compiled->devices = devices;
  for (const exec::RankQueues& own : compiled->locals) {
    LocalProgram& local = compiled->gpus.emplace_back(
        LocalProgram{own, static_cast<uint32_t>(compiled->gpus.size())});
    place_caller(local);
    for (const uint32_t queue : local.queues) {
      for (const Command& command : queues[queue].commands) {
        if (moves_data(command.op)) compiled->bytes += command.bytes * command.rows;
      }
    }
    if (compiled->program->mode == Mode::eager) share_own(*compiled->program, local);
    if (compiled->program->mode != Mode::armed || !local.joined) continue;
    for (uint32_t engine : local.engines) {
      if (!split(*compiled->program, queues[engine].commands, local.aheads.emplace_back())) {
        local.aheads.clear();
        break;
      }
    }
  }
  if (compiled->interleaved) serialize(*compiled);
  for (size_t i = 0; compiled->reduces && i < devices.size(); ++i) {
    devices[i]->gpu().reduce_kernels().prepare(*compiled->program->reduction);
  }
  return compiled;
}

bool CudaSubmission::poll() {
  if (ended()) return true;
  {
    const std::scoped_lock lock(mutex_);
    bool all = true;  // each is asked: one that waits for a GPU that has failed is never passed
    for (RankPart& part : parts) {
      part.ended = part.ended || part.done == nullptr || part.done->passed();
      all = all && part.ended;
    }
    if (!all) return false;
  }
  end();
  return true;
}

Report CudaSubmission::report() const {
  Report report = Submission::report();
  for (const RankPart& part : parts) {
    part.stats.add_to(report);
    for (const TimestampEvent& stamp : part.stats.stamps) {
      const double us = stamp.event.us_since(*part.start);
      report.timestamps_ns[stamp.number] = part.start_ns + std::llround(us * 1e3);
    }
  }
  return report;
}

std::vector<CUdeviceptr> CudaSubmission::awaited(uint32_t device,
                                                 const MappingTable& mappings) const {
  std::set<CUdeviceptr> words;
  for (uint32_t queue : compiled.gpus[device].queues) {
    for (const Command& command : program->queues[queue].commands) {
      if (command.op != Op::poll) continue;
      for (uint32_t row = 0; row < command.rows; ++row) {
        const Slice word = row_of(command.dst, command.dst_step, row, program->ranks);
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

size_t CudaSubmission::reached(uint32_t queue) const {
  const std::vector<Command>& commands = program->queues[queue].commands;
  if (ended()) return commands.size();
  const auto blocked = std::find_if(commands.begin(), commands.end(), [&](const Command& command) {
    return command.op == Op::poll && !polled(command);
  });
  return static_cast<size_t>(blocked - commands.begin());
}

uint32_t CudaSubmission::read_word(const Slice& word) const {
  uint32_t value = 0;
  const std::byte* base = launch.binding.base(kFlagBuffer, word.rank);
  compiled.devices.front()->gpu().read(&value, base + word.offset * kWordBytes, sizeof value);
  return value;
}

}  // namespace offcore::cuda
