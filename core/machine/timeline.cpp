#include "core/machine/timeline.h"

#include <algorithm>

#include "core/base/error.h"
#include "core/ir/serial_order.h"

namespace offcore {
namespace {

bool in_program(const Slice& slice, int64_t step, uint32_t rows, const Program& program) {
  if (slice.rank != kHostRank && slice.rank >= program.ranks) return false;
  if (slice.rank == kHostRank && step == kRankStep && rows > 1) return false;
  if (slice.buffer != kFlagBuffer) return slice.buffer < program.buffers.size();
  const int64_t words = program.flag_words;
  const int64_t first = static_cast<int64_t>(slice.offset);
  if (first < 0 || first >= words) return false;
  if (step == kRankStep || rows == 1) return true;
  return step > -words && step < words && first + step * (rows - 1) >= 0 &&
         first + step * (rows - 1) < words;
}

}  // namespace

void check_places(const Program& program) {
  if (program.ranks == 0) fail(Code::verify, "bounds: the program has no ranks");
  for (const Queue& queue : program.queues) {
    for (size_t i = 0; i < queue.commands.size(); ++i) {
      const Command& command = queue.commands[i];
      if (command.op == Op::reduce) {
        for (uint32_t row = 0; row < command.rows; ++row) {
          const Slice source = source_of(command, row);
          if (in_program(source, 0, 1, program) && source.buffer != kFlagBuffer) continue;
          fail(Code::verify, "bounds: queue ", queue_name(queue), ", command ", i,
               " (reduce): a source that the program has not got");
        }
      }
      const bool data = moves_data(command.op);
      const bool flags = command.op == Op::signal || command.op == Op::poll;
      const bool good =
          queue.rank < program.ranks && command.rows >= 1 &&
          ((!data && !flags) || (in_program(command.dst, command.dst_step, command.rows, program) &&
                                 data == (command.dst.buffer != kFlagBuffer))) &&
          (!data || (in_program(command.src, command.src_step, command.rows, program) &&
                     command.src.buffer != kFlagBuffer));
      if (!good) {
        fail(Code::verify, "bounds: queue ", queue_name(queue), ", command ", i, " (",
             to_string(command.op),
             "): a rank, buffer or flag word that the program does not have");
      }
    }
  }
}

SubmitTimes::SubmitTimes(const Program& program, const Machine& machine)
    : queues_(program.queues.size()) {
  if (program.mode == Mode::armed) return;
  if (program.mode == Mode::eager && interleaved(program)) {
    step_by_step(program, machine);
  } else {
    queue_by_queue(program, machine);
  }
}

void SubmitTimes::queue_by_queue(const Program& program, const Machine& machine) {
  const Cost& cost = machine.cost;
  std::vector<Moment> hosts(host_threads(machine, program.ranks));
  std::vector<double> doorbells(hosts.size(), 0);

  // One round per queue of a rank: turn[rank] lists the rank's engine queues.
  std::vector<std::vector<uint32_t>> turns;
  uint32_t position = 0;
  for (uint32_t i = 0; i < program.queues.size(); ++i) {
    const Queue& queue = program.queues[i];
    position = i > 0 && program.queues[i - 1].rank == queue.rank ? position + 1 : 0;
    if (queue.index == kCallerQueue) continue;
    if (position >= turns.size()) turns.resize(position + 1);
    turns[position].push_back(i);
  }
  for (const std::vector<uint32_t>& turn : turns) {
    for (const uint32_t i : turn) {
      const Queue& queue = program.queues[i];
      const uint32_t thread = host_thread_of(machine, queue.rank);
      Moment& host = hosts[thread];
      if (program.mode == Mode::eager) {  // captured commands were created before the launch
        host = host.after(&Phases::control_ns,
                          cost.control_ns * static_cast<double>(queue.commands.size()));
      }
      const double doorbell_ns =
          cost.doorbell_ns * (1 + doorbells[thread]++ * cost.doorbell_growth);
      host = host.after(&Phases::schedule_ns, doorbell_ns);
      queues_[i] = host;
    }
  }
  for (uint32_t i = 0; i < program.queues.size(); ++i) {
    const Queue& queue = program.queues[i];
    if (queue.index == kCallerQueue) queues_[i] = hosts[host_thread_of(machine, queue.rank)];
  }
}

// A caller's commands are enqueued as the others are: they cost what theirs do.
void SubmitTimes::step_by_step(const Program& program, const Machine& machine) {
  const Cost& cost = machine.cost;
  const bool streams = machine.native.signals_aside;
  std::vector<Moment> hosts(host_threads(machine, program.ranks));
  for (const Queue& queue : program.queues) commands_.emplace_back(queue.commands.size());
  for (const SerialStep& step : serial_order(program)) {
    const Queue& queue = program.queues[step.queue];
    Moment& host = hosts[host_thread_of(machine, queue.rank)];
    std::vector<Moment>& commands = commands_[step.queue];
    if (streams && program.reduction.has_value() && queue.index == kCallerQueue) {
      host = host.after(&Phases::control_ns, cost.control_ns);  // a kernel takes them all
      const Moment started = host.after(&Phases::schedule_ns, cost.launch_ns);
      std::fill(commands.begin() + step.first, commands.begin() + step.last, started);
      continue;
    }
    for (uint32_t command = step.first; command < step.last; ++command) {
      host = host.after(&Phases::control_ns, cost.control_ns);
      commands[command] = host;
    }
    host = host.after(&Phases::schedule_ns, cost.doorbell_ns);
    if (streams) continue;  // each call rings
    std::fill(commands.begin() + step.first, commands.begin() + step.last, host);
  }
}

double engine_gbps(const Command& command, const Machine& machine) {
  if (command.op == Op::swap) return machine.links.swap_gbps;
  if (is_bcst(command)) return machine.links.bcst_gbps;
  return command.rows > 1 ? machine.links.strided_gbps : machine.links.engine_gbps;
}

}  // namespace offcore
