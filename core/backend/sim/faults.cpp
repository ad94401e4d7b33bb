#include "core/backend/sim/faults.h"

#include <algorithm>

#include "core/base/error.h"

namespace offcore::sim {
namespace {

constexpr std::string_view kFaultNames[] = {"slow_engine", "late_signal", "lost_signal",
                                            "flipped_byte", "dead_rank"};

}  // namespace

std::string_view to_string(Fault::Kind kind) { return kFaultNames[static_cast<size_t>(kind)]; }

Fault::Kind parse_fault_kind(std::string_view name) {
  for (size_t i = 0; i < std::size(kFaultNames); ++i) {
    if (name == kFaultNames[i]) return static_cast<Fault::Kind>(i);
  }
  fail(Code::invalid, "unknown fault '", name,
       "'; known: slow_engine, late_signal, lost_signal, flipped_byte, dead_rank");
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

Fault random_fault(uint64_t seed, const Program& program) {
  const auto pick = [&](uint64_t counter, uint64_t choices) {
    return mix(seed, counter) % choices;
  };
  struct FaultPlace {
    const Queue* queue;
    uint32_t signals = 0;
    uint32_t moves = 0;
  };
  std::vector<FaultPlace> places;
  for (const Queue& queue : program.queues) {
    FaultPlace place{&queue};
    for (const Command& command : queue.commands) {
      place.signals += command.op == Op::signal;
      place.moves += moves_data(command.op);
    }
    places.push_back(place);
  }
  Fault fault{.kind = static_cast<Fault::Kind>(pick(0, std::size(kFaultNames)))};
  const bool signal =
      fault.kind == Fault::Kind::late_signal || fault.kind == Fault::Kind::lost_signal;
  std::erase_if(places, [&](const FaultPlace& place) {
    if (fault.kind == Fault::Kind::flipped_byte) return place.moves == 0;
    return signal ? place.signals == 0 : place.queue->index == kCallerQueue;
  });
  if (places.empty()) fail(Code::invalid, "the program has no queue for ", to_string(fault.kind));
  const FaultPlace& place = places[pick(1, places.size())];
  fault.rank = place.queue->rank;
  fault.queue = place.queue->index;
  if (fault.kind == Fault::Kind::flipped_byte) fault.nth = pick(2, place.moves);
  if (signal) fault.nth = pick(2, place.signals);
  fault.factor = 2 + static_cast<double>(pick(3, 30));
  fault.ns = static_cast<int64_t>(pick(4, 20000));
  return fault;
}

// The finalizer of a well-known 64-bit generator (splitmix).
uint64_t mix(uint64_t seed, uint64_t counter) {
  uint64_t x = seed + 0x9e3779b97f4a7c15u * (counter + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace offcore::sim
