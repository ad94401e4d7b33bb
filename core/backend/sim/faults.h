// Faults that the simulator can inject: what a machine may do wrong, from a seed.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "core/ir/program.h"

namespace offcore::sim {

struct Fault {
  enum class Kind : uint8_t {
    slow_engine,   // everything that the queue's engine does takes `factor` times as long
    late_signal,   // the nth signal of the queue is seen `ns` later
    lost_signal,   // the nth signal of the queue never arrives
    flipped_byte,  // the nth copy or swap of the queue leaves one wrong byte
    dead_rank,     // the rank stops for ever, `ns` after the backend was made
  };
  Kind kind = Kind::slow_engine;
  Rank rank = 0;
  uint16_t queue = 0;  // kCallerQueue: the caller's
  uint32_t nth = 0;    // counted from 0, over all launches
  double factor = 1;
  int64_t ns = 0;
};

std::string_view to_string(Fault::Kind kind);
Fault::Kind parse_fault_kind(std::string_view name);  // throws invalid, naming the known ones
std::string to_string(const Fault& fault);            // "lost_signal queue 0.1 nth 2"

// A fault that a launch of this program meets.
Fault random_fault(uint64_t seed, const Program& program);

// A well spread 64-bit hash of (seed, counter): all of the simulator's randomness.
uint64_t mix(uint64_t seed, uint64_t counter);

}  // namespace offcore::sim
