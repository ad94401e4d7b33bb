// The cost model: a program's estimated time on a machine, phase by phase. What choose() asks, and
// what the simulator must agree with in shape (same parameters, no event queue here).
#pragma once
#include <limits>

#include "core/ir/program.h"
#include "core/machine/machine.h"

namespace offcore {

// The four phases of DMA-Latte section 3.2.2, along the path that finishes last.
struct Phases {
  double control_ns = 0;   // commands created by the host
  double schedule_ns = 0;  // doorbell, wake-up, fetch; for a prelaunched queue its start word
  double copy_ns = 0;      // data moves
  double sync_ns = 0;      // signals, and the waits that end the operation
  double total_ns() const { return control_ns + schedule_ns + copy_ns + sync_ns; }
};

inline constexpr double kNoLimit = std::numeric_limits<double>::infinity();

// What takes `limit_ns` or longer is not followed to its end: then the total is the time that it
// takes at least.
Phases estimate(const Program& program, const Machine& machine, double limit_ns = kNoLimit);

}  // namespace offcore
