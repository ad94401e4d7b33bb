#include "core/backend/sim/faults.h"

#include "core/base/names.h"

namespace offcore::sim {
namespace {

constexpr std::string_view kFaultNames[] = {"slow_engine", "late_signal", "lost_signal",
                                            "flipped_byte", "dead_rank"};

}  // namespace

std::string_view to_string(Fault::Kind kind) { return kFaultNames[static_cast<size_t>(kind)]; }

Fault::Kind parse_fault_kind(std::string_view name) {
  return parse_name<Fault::Kind>("fault", name, kFaultNames);
}

std::string to_string(const Fault& fault) {
  const std::string queue =
      cat(to_string(fault.kind), " queue ",
          queue_name(Queue{.rank = fault.rank, .index = fault.queue, .commands = {}}));
  switch (fault.kind) {
    case Fault::Kind::slow_engine:
      return cat(queue, " factor ", fault.factor);
    case Fault::Kind::late_signal:
      return cat(queue, " nth ", fault.nth, " ns ", fault.ns);
    case Fault::Kind::lost_signal:
    case Fault::Kind::flipped_byte:
      return cat(queue, " nth ", fault.nth);
    case Fault::Kind::dead_rank:
      break;
  }
  return cat("dead_rank rank ", fault.rank, " ns ", fault.ns);
}

// The finalizer of a well-known 64-bit generator (splitmix).
uint64_t mix(uint64_t seed, uint64_t counter) {
  uint64_t x = seed + 0x9e3779b97f4a7c15u * (counter + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace offcore::sim
