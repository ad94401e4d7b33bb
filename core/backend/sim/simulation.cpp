#include "core/backend/sim/simulation.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/base/error.h"

namespace offcore::sim {
namespace {

// Whether a caller's signal follows its reduction directly: who reduces also signals, at no cost.
bool behind_reduce(const Queue& queue, size_t at) {
  while (at > 0 && queue.commands[at].op == Op::signal) --at;
  return queue.commands[at].op == Op::reduce;
}

// Whether there are only polls and signals between a caller's command and a reduction before it.
bool goes_on_reducing(const Queue& queue, size_t at) {
  while (at > 0) {
    const Op op = queue.commands[--at].op;
    if (op != Op::signal && op != Op::poll) return op == Op::reduce;
  }
  return false;
}

uint32_t data_end_of(const Queue& queue) {
  const auto last = std::find_if(queue.commands.rbegin(), queue.commands.rend(),
                                 [](const Command& command) { return moves_data(command.op); });
  return static_cast<uint32_t>(queue.commands.rend() - last);
}

constexpr double kNever = std::numeric_limits<double>::infinity();

}  // namespace

Simulation::Simulation(SimState& state, const Program& program, const Launch& launch)
    : state_(state),
      program_(program),
      launch_(launch),
      cost_(state.machine.cost),
      flows_(state.machine, state.ranks, static_cast<uint32_t>(program.queues.size())),
      actors_(program.queues.size()),
      submit_times_(program, state.machine),
      asides_(state.machine.native.signals_aside && submit_times_.serial()),
      hosts_(host_threads(state.machine, state.ranks)),
      numbers_(program),
      changed_(numbers_.count()),
      parked_(numbers_.count()),
      unbound_words_(numbers_.count(), launch.epoch),
      noticed_(hosts_.size() == 1 ? numbers_.count() : 0),
      killer_(program.ranks, -1) {}

SimOutcome Simulation::run() {
  prepare();
  while (next_ns() != kNever) {
    now_ns_ = next_ns();
    while (next_ns() == now_ns_) {
      if (flow_is_next()) {
        end_flow(flow_ends_.first().flow);
        continue;
      }
      const SimEvent event = events_.top();
      events_.pop();
      handle(event);
    }
    settle_flows();
  }
  SimOutcome outcome;
  finish(outcome);
  state_.clock_ns += now_ns_;
  return outcome;
}

void Simulation::prepare() {
  size_t commands = 0;
  for (const Queue& queue : program_.queues) commands += queue.commands.size();
  report_.commands.reserve(commands);
  runs_.resize(commands);
  for (uint32_t i = 0; i < actors_.size(); ++i) {
    const Queue& queue = program_.queues[i];
    SimQueue& actor = actors_[i];
    actor.queue = &queue;
    actor.index = i;
    actor.engine = i;
    actor.caller = queue.index == kCallerQueue;
    if (asides_ && !actor.caller) actor.aside_end = data_end_of(queue);
    first_command_.push_back(static_cast<uint32_t>(report_.commands.size()));
    for (const Fault& fault : state_.options.faults) {
      if (fault.rank != queue.rank || fault.queue != queue.index) continue;
      actor.faults.push_back(fault);
      if (fault.kind == Fault::Kind::slow_engine) actor.slowdown *= fault.factor;
    }
    flows_.set_engine_speed(i, 1 / actor.slowdown);
    Moment& host = hosts_[host_thread_of(state_.machine, queue.rank)];
    if (!queue.commands.empty()) {
      host = latest(host, submit_times_.at(i, 0));
      push(fetched(actor).at_ns, SimEventKind::step, i);
    }
    for (uint32_t k = 0; k < queue.commands.size(); ++k) {
      CommandTime time{.queue = i, .command = k, .start_ns = -1, .end_ns = -1, .phases = {}};
      const bool created = !actor.caller && program_.mode == Mode::eager;
      time.phases.control_ns = created ? cost_.control_ns : 0;
      report_.commands.push_back(time);
      if (queue.commands[k].op != Op::timestamp) continue;
      const size_t needed = queue.commands[k].value + size_t{1};
      if (report_.timestamps_ns.size() < needed) report_.timestamps_ns.resize(needed, -1);
    }
  }
  for (Rank rank = 0; rank < launch_.wakeups.size() && rank < program_.ranks; ++rank) {
    const uint32_t poison = launch_.wakeups[rank]->poison.load();
    if (poison == 0) continue;
    kill(rank);
    killer_[rank] = static_cast<int>(poison) - 1;
  }
  for (const Fault& fault : state_.options.faults) {
    if (fault.kind != Fault::Kind::dead_rank || fault.rank >= program_.ranks) continue;
    push(std::max(0.0, static_cast<double>(fault.ns) - state_.clock_ns), SimEventKind::death,
         fault.rank);
  }
}

uint64_t Simulation::next_tie() { return state_.draw(); }

void Simulation::push(double at_ns, SimEventKind what, uint32_t subject, uint32_t detail) {
  events_.push({std::max(at_ns, now_ns_), next_tie(), what, subject, detail});
}

bool Simulation::flow_is_next() const {
  if (flow_ends_.empty() || events_.empty()) return !flow_ends_.empty();
  const FlowEnds::End& end = flow_ends_.first();
  const SimEvent& event = events_.top();
  return end.at_ns != event.at_ns ? end.at_ns < event.at_ns : end.tie < event.tie;
}

double Simulation::next_ns() const {
  if (flow_is_next()) return flow_ends_.first().at_ns;
  return events_.empty() ? kNever : events_.top().at_ns;
}

void Simulation::handle(const SimEvent& event) {
  switch (event.what) {
    case SimEventKind::step:
      return step(actors_[event.subject]);
    case SimEventKind::flow_begins:
      return begin_flows(actors_[event.subject], event.detail);
    case SimEventKind::order_ends:
      return end_order(actors_[event.subject], event.detail);
    case SimEventKind::death:
      if (std::any_of(actors_.begin(), actors_.end(), [&](const SimQueue& actor) {
            return actor.queue->rank == event.subject &&
                   (actor.next < actor.queue->commands.size() || actor.running > 0 || actor.busy);
          })) {
        kill(static_cast<Rank>(event.subject));
        killer_[event.subject] = static_cast<int>(event.subject);
      }
      return;
  }
}

void Simulation::settle_flows() {
  for (const uint32_t flow : flows_.settle(now_ns_)) {
    flow_ends_.put({std::max(flows_.end_ns(flow), now_ns_), next_tie(), flow});
  }
}

// Armed queues have been fetched before the launch.
Moment Simulation::fetched(const SimQueue& actor) const {
  const Moment& submitted = submit_times_.at(actor.index, actor.next);
  if (actor.caller || program_.mode == Mode::armed) return submitted;
  const double fetch_ns = cost_.fetch_ns * (actor.next + 1);
  return submitted.after(&Phases::schedule_ns, (cost_.wake_ns + fetch_ns) * actor.slowdown);
}

// Begins every command that can begin now. Where one can begin later, another step is pushed.
void Simulation::step(SimQueue& actor) {
  while (!actor.dead && !actor.busy && actor.next < actor.queue->commands.size()) {
    const Command& command = actor.queue->commands[actor.next];
    const Moment ready = latest(fetched(actor), actor.ordered);
    if (!(moves_data(command.op) ? begin_data(actor, ready) : begin_order(actor, command, ready))) {
      return;
    }
  }
}

bool Simulation::begin_data(SimQueue& actor, const Moment& ready) {
  if (actor.running >= cost_.overlap) return false;  // the end of one of them steps again
  Moment start = latest(ready, actor.issue_from);
  if (actor.running + 1 == cost_.overlap) start = latest(start, actor.moved);
  if (start.at_ns > now_ns_) {
    push(start.at_ns, SimEventKind::step, actor.index);
    return false;
  }
  CommandRun& run = command_run(actor, actor.next);
  run.start = start;
  run.began = true;
  ++actor.running;
  actor.issue_from = start.after(&Phases::copy_ns, cost_.issue_ns * actor.slowdown);
  push(now_ns_ + cost_.setup_ns * actor.slowdown, SimEventKind::flow_begins, actor.index,
       actor.next);
  ++actor.next;
  return true;
}

bool Simulation::begin_order(SimQueue& actor, const Command& command, const Moment& ready) {
  if (actor.running > 0) return false;  // the end of the last of them steps again
  const Moment start = latest(ready, actor.moved);
  if (start.at_ns > now_ns_) {
    push(start.at_ns, SimEventKind::step, actor.index);
    return false;
  }
  if (command.op == Op::signal) return begin_signal(actor, command, start);
  if (command.op == Op::poll) return begin_poll(actor, command, start);
  if (command.op == Op::reduce) return begin_reduce(actor, command, start);
  CommandRun& run = command_run(actor, actor.next);
  run.start = start;
  run.began = true;
  if (command.op == Op::timestamp) {
    report_.timestamps_ns[command.value] = std::llround(now_ns_);
  }
  end_order(actor, actor.next);
  return true;
}

bool Simulation::begin_signal(SimQueue& actor, const Command& command, Moment start) {
  Moment end;
  if (actor.caller) {
    Moment& host = hosts_[host_thread_of(state_.machine, actor.queue->rank)];
    start = latest(start, host);
    if (start.at_ns > now_ns_) {
      push(start.at_ns, SimEventKind::step, actor.index);
      return false;
    }
    const double trigger_ns = behind_reduce(*actor.queue, actor.next) ? 0 : cost_.trigger_ns;
    host = end = start.after(&Phases::schedule_ns, trigger_ns * steps(command));
  } else {
    end = start.after(&Phases::sync_ns, cost_.sync_ns * steps(command) * actor.slowdown);
  }
  if (SimState::Done* done = done_of(actor)) {
    const uint32_t nth = done->signals + actor.asides;
    if (const Fault* late = fault_at(actor, Fault::Kind::late_signal, nth)) {
      end = end.after(&Phases::sync_ns, static_cast<double>(late->ns));
    }
  }
  CommandRun& run = command_run(actor, actor.next);
  run.start = start;
  run.began = true;
  if (actor.next < actor.aside_end) {  // by a stream of its own: the queue goes on
    end = end.after(&Phases::sync_ns, cost_.poll_ns * actor.slowdown);
    actor.signalled = latest(actor.signalled, end);
    ++actor.asides;
    push(actor.signalled.at_ns, SimEventKind::order_ends, actor.index, actor.next);
    actor.ordered = actor.issue_from = start;
    ++actor.next;
    return true;
  }
  actor.busy = true;
  end = latest(end, actor.signalled);
  actor.ordered = end;
  push(end.at_ns, SimEventKind::order_ends, actor.index, actor.next);
  return false;
}

bool Simulation::begin_reduce(SimQueue& actor, const Command& command, const Moment& start) {
  CommandRun& run = command_run(actor, actor.next);
  run.start = start;
  run.began = true;
  actor.busy = true;
  const bool goes_on = asides_ && actor.caller && goes_on_reducing(*actor.queue, actor.next);
  actor.ordered = start.after(
      &Phases::copy_ns, reduce_ns(command, state_.machine) - (goes_on ? cost_.trigger_ns : 0));
  push(actor.ordered.at_ns, SimEventKind::order_ends, actor.index, actor.next);
  return false;
}

bool Simulation::begin_poll(SimQueue& actor, const Command& command, const Moment& start) {
  CommandRun& run = command_run(actor, actor.next);
  if (!run.began) run.start = start;
  run.began = true;
  const Moment* change = nullptr;
  if (!reached(command, &change)) {
    for (uint32_t row = 0; row < command.rows; ++row) {
      std::vector<uint32_t>& parked = parked_[index_of(command, row)];
      if (std::find(parked.begin(), parked.end(), actor.index) == parked.end()) {
        parked.push_back(actor.index);
      }
    }
    return false;
  }
  Moment end;
  if (asides_ && actor.caller && goes_on_reducing(*actor.queue, actor.next)) {
    end = latest(start, *change);  // a kernel that reduces several chunks waits for them itself
  } else if (actor.caller) {
    Moment& host = hosts_[host_thread_of(state_.machine, actor.queue->rank)];
    Moment seen = latest(start, *change);
    const uint32_t words = unnoticed(command, seen);
    if (words > 0) seen = latest(seen, host);
    if (seen.at_ns > now_ns_) {
      push(seen.at_ns, SimEventKind::step, actor.index);
      return false;
    }
    end = seen.after(&Phases::sync_ns, cost_.host_poll_ns * words);
    if (words > 0) host = end;
    notice(command, end);
  } else if (asides_) {  // a wait of a stream's takes as long where nothing is waited for
    end = latest(start, *change).after(&Phases::schedule_ns, cost_.poll_ns * actor.slowdown);
  } else {
    // The engine looks again and again: it sees a change poll_ns later, and an old one at once.
    end = latest(start, change->after(&Phases::schedule_ns, cost_.poll_ns * actor.slowdown));
  }
  actor.busy = true;
  actor.ordered = end;
  push(end.at_ns, SimEventKind::order_ends, actor.index, actor.next);
  return false;
}

// How many words of a caller's poll its host thread has yet to read, and (into `seen`) when it has
// read the others. The one thread of all ranks reads a word once, for everyone who waits for it.
uint32_t Simulation::unnoticed(const Command& command, Moment& seen) const {
  if (hosts_.size() > 1) return steps(command);
  uint32_t words = 0;
  for (uint32_t row = 0; row < command.rows; ++row) {
    const Noticed& noticed = noticed_[index_of(command, row)];
    if (noticed.value >= command.value) {
      seen = latest(seen, noticed.at);
    } else {
      ++words;
    }
  }
  return words;
}

void Simulation::notice(const Command& command, const Moment& at) {
  if (hosts_.size() > 1) return;
  for (uint32_t row = 0; row < command.rows; ++row) {
    Noticed& noticed = noticed_[index_of(command, row)];
    if (noticed.value < command.value) noticed = {command.value, at};
  }
}

void Simulation::begin_flows(SimQueue& actor, uint32_t index) {
  if (actor.dead) return;
  const Command& command = actor.queue->commands[index];
  CommandRun& run = command_run(actor, index);
  move_half(command, false);
  const double gbps = engine_gbps(command, state_.machine);
  for_each_flow(command, program_.ranks, [&](Rank dst, Rank src, uint64_t bytes) {
    const uint32_t flow =
        flows_.start(dst, src, actor.engine, gbps, static_cast<double>(bytes), now_ns_);
    if (flow >= flow_uses_.size()) flow_uses_.resize(flow + 1);
    flow_uses_[flow] = {actor.index, index, true};
    ++run.flows;
  });
}

void Simulation::end_flow(uint32_t flow) {
  FlowUse& use = flow_uses_[flow];
  use.active = false;
  flow_ends_.remove(flow);
  flows_.end(flow);
  SimQueue& actor = actors_[use.actor];
  if (--command_run(actor, use.command).flows == 0) end_data(actor, use.command);
}

void Simulation::end_data(SimQueue& actor, uint32_t index) {
  const Command& command = actor.queue->commands[index];
  CommandRun& run = command_run(actor, index);
  run.ended = true;
  move_half(command, true);
  if (SimState::Done* done = done_of(actor)) {
    if (fault_at(actor, Fault::Kind::flipped_byte, done->moves) != nullptr) flip_byte(command);
    ++done->moves;
  }
  const Moment end = run.start.after(&Phases::copy_ns, now_ns_ - run.start.at_ns);
  CommandTime& time = report_.commands[first_command_[actor.index] + index];
  time.start_ns = std::llround(run.start.at_ns);
  time.end_ns = std::llround(now_ns_);
  time.phases.schedule_ns = actor.caller ? 0 : cost_.fetch_ns;
  time.phases.copy_ns = now_ns_ - run.start.at_ns;
  actor.moved = latest(actor.moved, end);
  --actor.running;
  step(actor);
}

void Simulation::end_order(SimQueue& actor, uint32_t index) {
  if (actor.dead) return;
  const Command& command = actor.queue->commands[index];
  CommandRun& run = command_run(actor, index);
  run.ended = true;
  const bool aside = command.op == Op::signal && index < actor.aside_end;
  if (!aside && !actor.busy) actor.ordered = run.start;  // a timestamp or a fence takes no time
  CommandTime& time = report_.commands[first_command_[actor.index] + index];
  time.start_ns = std::llround(run.start.at_ns);
  time.end_ns = std::llround(now_ns_);
  const double took_ns = now_ns_ - run.start.at_ns;
  if (command.op == Op::reduce) {
    time.phases.copy_ns = took_ns;
    reduce_bytes(command);
  } else if ((command.op == Op::signal) == !actor.caller) {
    time.phases.sync_ns = took_ns;
  } else {
    time.phases.schedule_ns = took_ns;
  }
  const bool busy = !aside && std::exchange(actor.busy, false);
  if (aside) {
    --actor.asides;
  } else {
    ++actor.next;
    actor.issue_from = actor.ordered;
  }
  if (command.op == Op::signal) {
    SimState::Done* done = done_of(actor);
    const bool lost =
        done != nullptr && fault_at(actor, Fault::Kind::lost_signal, done->signals) != nullptr;
    if (done != nullptr) ++done->signals;
    if (!lost) store(command);
    for (uint32_t row = 0; !lost && row < command.rows; ++row) {
      const size_t word = index_of(command, row);
      changed_[word] = aside ? run.start.after(&Phases::sync_ns, took_ns) : actor.ordered;
      for (const uint32_t parked : std::exchange(parked_[word], {})) {
        push(now_ns_, SimEventKind::step, parked);
      }
    }
  }
  if (busy) step(actor);
}

void Simulation::kill(Rank rank) {
  for (SimQueue& actor : actors_) {
    if (actor.queue->rank == rank) actor.dead = true;
  }
  for (uint32_t flow = 0; flow < flow_uses_.size(); ++flow) {
    FlowUse& use = flow_uses_[flow];
    if (!use.active || !actors_[use.actor].dead) continue;
    use.active = false;
    flow_ends_.remove(flow);
    flows_.end(flow);
  }
}

Simulation::CommandRun& Simulation::command_run(const SimQueue& actor, uint32_t index) {
  return runs_[first_command_[actor.index] + index];
}

// A command of several flag words is one step only where the machine has such commands.
uint32_t Simulation::steps(const Command& command) const {
  return state_.machine.native.strided_flags ? 1 : command.rows;
}

size_t Simulation::index_of(const Command& command, uint32_t row) const {
  return numbers_.of(row_of(command.dst, command.dst_step, row, program_.ranks));
}

SimState::Done* Simulation::done_of(const SimQueue& actor) {
  if (actor.faults.empty()) return nullptr;
  return &state_.done[{actor.queue->rank, actor.queue->index}];
}

const Fault* Simulation::fault_at(const SimQueue& actor, Fault::Kind kind, uint32_t nth) const {
  for (const Fault& fault : actor.faults) {
    if (fault.kind == kind && fault.nth == nth) return &fault;
  }
  return nullptr;
}

}  // namespace offcore::sim
