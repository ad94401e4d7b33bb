// One launch in virtual time: a discrete-event simulation of host threads, engines and links.
//
// A host thread creates and rings queue by queue, then runs its ranks' caller queues; an action of
// its takes its time, waiting does not. An engine fetches commands one after the other ahead of
// their execution. Copies of a group overlap as far as cost.overlap and cost.issue_ns allow, their
// bytes are flows (flows.h); half of a copy's bytes moves as it begins to flow and the rest as it
// ends, so that a program that does not wait for its data reads stale bytes. An ordering command
// waits for all earlier ones of its queue.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <queue>
#include <string>
#include <utility>
#include <vector>

#include "core/backend/backend.h"
#include "core/backend/sim/faults.h"
#include "core/backend/sim/sim.h"
#include "core/base/error.h"
#include "core/machine/flow_ends.h"
#include "core/machine/flows.h"
#include "core/machine/timeline.h"

namespace offcore::sim {

// What outlives a launch.
struct SimState {
  Machine machine;
  Rank ranks = 0;
  SimOptions options;
  double clock_ns = 0;
  uint64_t events = 0;  // so far: what ties are drawn from
  uint64_t draw() {
    const uint64_t counter = events++;
    return options.seed == 0 ? counter : mix(options.seed, counter);
  }
  using QueueKey = std::pair<Rank, uint16_t>;
  struct Done {
    uint32_t signals = 0;
    uint32_t moves = 0;
  };
  std::map<QueueKey, Done> done;  // only of queues that have faults
};

struct SimOutcome {
  Report report;
  std::optional<Code> failure;  // timeout or peer; none: complete
  std::string message;
};

class Simulation {
 public:
  Simulation(SimState& state, const Program& program, const Launch& launch);
  SimOutcome run();

 private:
  enum class SimEventKind : uint8_t { step, flow_begins, order_ends, death };
  struct SimEvent {
    double at_ns;
    uint64_t tie;
    SimEventKind what;
    uint32_t subject;  // an actor, or a rank for death
    uint32_t detail;   // a command
    bool operator<(const SimEvent& other) const {
      return at_ns != other.at_ns ? at_ns > other.at_ns : tie > other.tie;
    }
  };
  // A queue as it runs.
  struct SimQueue {
    const Queue* queue = nullptr;
    uint32_t index = 0;   // into program.queues
    uint32_t engine = 0;  // of Flows
    bool caller = false;
    bool dead = false;     // its rank is dead or poisoned
    bool busy = false;     // an ordering command is being executed
    uint32_t next = 0;     // the next command to begin
    uint32_t running = 0;  // data commands begun and not ended
    double slowdown = 1;
    uint32_t aside_end = 0;  // signals before it go by a stream of their own
    uint32_t asides = 0;     // of these, begun and not ended
    Moment signalled;        // the end of the last of them
    Moment ordered;          // the end of the last ordering command
    Moment moved;            // the end of the last data command
    Moment issue_from;       // the next copy of the group may begin
    std::vector<Fault> faults;
  };
  struct CommandRun {
    Moment start;
    uint32_t flows = 0;  // still flowing
    bool began = false;
    bool ended = false;
  };
  struct FlowUse {
    uint32_t actor = 0;
    uint32_t command = 0;
    bool active = false;
  };
  struct Noticed {
    uint32_t value = 0;
    Moment at;
  };

  void prepare();
  uint64_t next_tie();
  void push(double at_ns, SimEventKind what, uint32_t subject, uint32_t detail = 0);
  bool flow_is_next() const;
  double next_ns() const;
  void handle(const SimEvent& event);
  void settle_flows();

  Moment fetched(const SimQueue& actor) const;
  void step(SimQueue& actor);
  bool begin_data(SimQueue& actor, const Moment& ready);
  bool begin_order(SimQueue& actor, const Command& command, const Moment& ready);
  bool begin_signal(SimQueue& actor, const Command& command, Moment start);
  bool begin_reduce(SimQueue& actor, const Command& command, const Moment& start);
  bool begin_poll(SimQueue& actor, const Command& command, const Moment& start);
  uint32_t unnoticed(const Command& command, Moment& seen) const;
  void notice(const Command& command, const Moment& at);
  void begin_flows(SimQueue& actor, uint32_t index);
  void end_flow(uint32_t flow);
  void end_data(SimQueue& actor, uint32_t index);
  void end_order(SimQueue& actor, uint32_t index);
  void kill(Rank rank);

  CommandRun& command_run(const SimQueue& actor, uint32_t index);
  uint32_t steps(const Command& command) const;
  size_t index_of(const Command& command, uint32_t row) const;
  const Fault* fault_at(const SimQueue& actor, Fault::Kind kind, uint32_t nth) const;
  SimState::Done* done_of(const SimQueue& actor);

  std::atomic_ref<uint32_t> word_at(const Slice& word);
  bool reached(const Command& command, const Moment** change);
  void store(const Command& command);

  void move_half(const Command& command, bool second);
  void reduce_bytes(const Command& command);
  void flip_byte(const Command& command);

  void finish(SimOutcome& outcome);
  std::string stuck() const;
  void blame(SimOutcome& outcome) const;

  SimState& state_;
  const Program& program_;
  const Launch& launch_;
  const Cost& cost_;
  Flows flows_;
  double now_ns_ = 0;
  std::priority_queue<SimEvent> events_;
  FlowEnds flow_ends_;
  std::vector<SimQueue> actors_;
  std::vector<uint32_t> first_command_;  // of each queue, into runs_ and report_.commands
  std::vector<CommandRun> runs_;
  std::vector<FlowUse> flow_uses_;
  const SubmitTimes submit_times_;
  const bool asides_;          // signals amid data are a second stream's
  std::vector<Moment> hosts_;  // when each host thread is free
  const WordNumbers numbers_;
  std::vector<Moment> changed_;                // by word: its last change
  std::vector<std::vector<uint32_t>> parked_;  // by word: the actors that poll it
  std::vector<uint32_t> unbound_words_;
  std::vector<Noticed> noticed_;  // by word, where one host thread reads for all ranks
  std::vector<int> killer_;       // by rank: who poisoned it, -1 for none
  Report report_;
};

}  // namespace offcore::sim
