// Faults that the simulator can inject: what a machine may do wrong, from a seed.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "core/backend/options.h"
#include "core/ir/program.h"

namespace offcore::sim {

std::string_view to_string(Fault::Kind kind);
Fault::Kind parse_fault_kind(std::string_view name);  // throws invalid, naming the known ones
std::string to_string(const Fault& fault);            // "lost_signal queue 0.1 nth 2"

// A well spread 64-bit hash of (seed, counter): all of the simulator's randomness.
uint64_t mix(uint64_t seed, uint64_t counter);

}  // namespace offcore::sim
