// What the cost model and the simulator share: moments that know their phases, when each queue is
// submitted, and the bytes that a command makes flow.
//
// Where flags live in host memory, one host thread drives all ranks, as in DMA-Latte's prototype;
// where they live in the readers' memory, each rank has its own host thread.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/ir/word_numbers.h"
#include "core/machine/cost.h"

namespace offcore {

// A time since the launch and what it was spent on: phases.total_ns() == at_ns.
struct Moment {
  double at_ns = 0;
  Phases phases;

  Moment after(double Phases::* phase, double ns) const {
    Moment moment = *this;
    moment.at_ns += ns;
    moment.phases.*phase += ns;
    return moment;
  }
};

inline const Moment& latest(const Moment& a, const Moment& b) { return b.at_ns > a.at_ns ? b : a; }

inline uint32_t host_threads(const Machine& machine, Rank ranks) {
  return machine.flags == FlagHome::host ? 1 : ranks;
}
inline uint32_t host_thread_of(const Machine& machine, Rank rank) {
  return machine.flags == FlagHome::host ? 0 : rank;
}

// When the host is done with a queue's commands: for an engine queue its doorbell has been rung,
// for a caller queue the first one may run. A host thread goes queue by queue, round robin over its
// ranks; an interleaved program goes in its serial order, each rank's steps one after another.
// Armed queues were submitted before the launch.
class SubmitTimes {
 public:
  SubmitTimes(const Program& program, const Machine& machine);

  bool serial() const { return !commands_.empty(); }  // an interleaved program's
  // Indices into program.queues and the queue's commands.
  const Moment& at(uint32_t queue, uint32_t command) const {
    return serial() ? commands_[queue][command] : queues_[queue];
  }

 private:
  void queue_by_queue(const Program& program, const Machine& machine);
  void step_by_step(const Program& program, const Machine& machine);

  std::vector<Moment> queues_;
  std::vector<std::vector<Moment>> commands_;  // of interleaved programs
};

inline bool is_bcst(const Command& command) {
  return command.op == Op::copy && command.rows > 1 && command.src_step == 0;
}

// What an engine can write for this command, in 1e9 bytes a second.
double engine_gbps(const Command& command, const Machine& machine);

// How long a caller takes over a reduce command.
inline double reduce_ns(const Command& command, const Machine& machine) {
  const Cost& cost = machine.cost;
  const double bytes = static_cast<double>(command.bytes) * command.rows;
  const bool pushes = command.dst.rank != command.src.rank && cost.push_gbps > 0;
  return cost.trigger_ns + bytes / (pushes ? cost.push_gbps : cost.reduce_gbps);
}

// Calls flow(dst rank, src rank, bytes) for what a data command moves: rows between the same two
// ranks are one flow, and a swap flows both ways.
template <typename Flow>
void for_each_flow(const Command& command, Rank ranks, Flow&& flow) {
  const bool dst_walks = command.dst_step == kRankStep;
  const bool src_walks = command.src_step == kRankStep;
  const bool walks = command.rows > 1 && (dst_walks || src_walks);
  const uint32_t flows = walks ? command.rows : 1;
  const uint64_t bytes = walks ? command.bytes : command.bytes * command.rows;
  for (uint32_t row = 0; row < flows; ++row) {
    const Rank dst = row_of(command.dst, command.dst_step, row, ranks).rank;
    const Rank src = row_of(command.src, command.src_step, row, ranks).rank;
    flow(dst, src, bytes);
    if (command.op == Op::swap) flow(src, dst, bytes);
  }
}

// Throws verify where a command names a rank or a flag word that the program does not have. What
// follows here indexes by these.
void check_places(const Program& program);

}  // namespace offcore
