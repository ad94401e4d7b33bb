// From moves to a program: lower, legalize, and the choice of a variant.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/machine/machine.h"
#include "core/plan/moves.h"
#include "core/plan/scale.h"
#include "core/plan/variant.h"

namespace offcore {

// What makes a program's protocol, and the captured form of one.
struct ProtocolForm {
  bool entry = true;    // peers write only after the owner has signalled that it entered
  bool staged = false;  // peers write into the lane's slot; the owner copies on into `out`
  // The program is captured in a graph: its values repeat, so every replay enters (`entry` holds
  // whatever it says), and nothing can be armed ahead.
  bool captured = false;
};

Protocol protocol_of(const ProtocolForm& form);

// Throws unsupported when the operation cannot have the variant (swap out of place, bcst without
// equal sources, ...). The result may hold commands the machine lacks: legalize expands them.
// `range`: see scale.h.
Program lower(const Moves& moves, const Variant& variant, const Machine& machine,
              const ProtocolForm& form, ScaleRange* range = nullptr);

// The same where the commands of the ranks' engine queues are given, by rank and queue. Nobody's
// queues begin before all ranks have entered, and no rank has finished before all queues have: what
// a queue touches is not asked. The variant is only a name.
using QueuedCommands = std::vector<std::vector<std::vector<Command>>>;
Program lower(const Moves& moves, const Variant& variant, const Machine& machine,
              const ProtocolForm& form, QueuedCommands queues);

// Rewrites commands that the machine lacks or whose limits they exceed; sets program.native. Throws
// unsupported where that takes more commands than anybody could check or enqueue.
Program legalize(Program program, const Machine& machine);

// lower, legalize, verify. Throws timeout. `range`: of a unit that divides all counts; it becomes
// that of the units for which this plan, scaled, is the plan.
std::shared_ptr<const Program> plan(const Moves& moves, const Variant& variant,
                                    const Machine& machine, const ProtocolForm& form,
                                    const Deadline& deadline = Deadline::never(),
                                    ScaleRange* range = nullptr);

// A program of protocol barrier in two: the entry signals of its callers alone, to be sent as soon
// as the buffers are free, and all the rest, which waits for them as before. Only together are they
// what verify has seen.
struct Credited {
  std::shared_ptr<const Program> credits;
  std::shared_ptr<const Program> rest;
};
Credited split_credits(const Program& program);

// Why no machine can move these so: the reason, or an empty string.
std::string why_not(const Moves& moves, const Variant& variant, const ProtocolForm& form);

// The variants that this operation can have, in the order of all_variants().
std::vector<Variant> variants_of(const Moves& moves, const ProtocolForm& form);

// The tuned table's variant, else the cheapest by the cost model. Throws timeout.
struct Choice {
  Variant variant;
  bool tuned = false;
};
Choice choose(const Moves& moves, uint64_t total_bytes, const Machine& machine,
              const ProtocolForm& form, const Deadline& deadline = Deadline::never());

// Whether the tuned table, with this form of signals, has slots faster than an entry round, where
// both can be had: in windows.
bool slots_win(const Moves& moves, uint64_t total_bytes, const Machine& machine);

}  // namespace offcore
