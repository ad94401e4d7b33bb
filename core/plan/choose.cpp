// Which variant: the tuned table's, else the cheapest by the cost model.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/error.h"
#include "core/machine/cost.h"
#include "core/plan/plan.h"
#include "core/plan/reduction.h"

namespace offcore {

namespace {

constexpr double kSlotsGain = 0.97;  // less is not worth the memory
// A lane has three slots of its largest call. One in a single piece is as large as the output.
constexpr uint64_t kSlotsBytesMax = 64 << 20;
constexpr uint64_t kChunkedBytesMin = 1 << 20;  // below that a queue that only drains costs more

struct TunedCall {
  std::string_view op;
  uint64_t ranks;
  bool in_place;
  uint64_t total_bytes;
};

TunedCall call_of(const Moves& moves, uint64_t total_bytes) {
  return {moves.op, moves.ranks, moves.in_place, total_bytes};
}

bool fits(const TunedRow& row, const TunedCall& call) {
  return row.op == call.op && row.ranks == call.ranks && row.in_place == call.in_place &&
         row.bytes_min <= call.total_bytes && call.total_bytes <= row.bytes_max;
}

// How far what a row measured is from what is asked for: the slots count most, then the entry
// round, then the form of signals.
unsigned distance(const TunedRow& row, const Machine& machine, const ProtocolForm& form) {
  return (row.staged != form.staged ? 4u : 0u) +
         (row.entry != (form.entry || form.captured) ? 2u : 0u) +
         (row.signals != machine.signals ? 1u : 0u);
}

// The first of the nearest rows that fit and can be had, or null: even the farthest is a better
// guess than the model's.
template <typename Possible>
const TunedRow* nearest(const TunedCall& call, const Machine& machine, const ProtocolForm& form,
                        const Possible& possible) {
  const TunedRow* best = nullptr;
  unsigned least = std::numeric_limits<unsigned>::max();
  for (const TunedRow& row : machine.tuned) {
    const unsigned away = distance(row, machine, form);
    if (away >= least || !fits(row, call) || !possible(row)) continue;
    best = &row;
    least = away;
  }
  return best;
}

std::optional<Variant> tuned(const Moves& moves, uint64_t total_bytes, const Machine& machine,
                             const ProtocolForm& form) {
  const TunedCall call = call_of(moves, total_bytes);
  const TunedRow* row = nearest(call, machine, form, [&](const TunedRow& one) {
    return why_not(moves, parse_variant(one.variant), form).empty();
  });
  return row == nullptr ? std::nullopt : std::optional(parse_variant(row->variant));
}

// Of the buffers that a staged program has slots for.
uint64_t window_bytes(const Moves& moves) {
  uint64_t bytes = 0;
  for (size_t id = kFlagBuffer + 1; id < moves.buffers.size(); ++id) {
    if (moves.buffers[id].kind == Buffer::Home::window) bytes += moves.buffers[id].bytes;
  }
  return bytes;
}

}  // namespace

Choice choose(const Moves& moves, uint64_t total_bytes, const Machine& machine,
              const ProtocolForm& form, const Deadline& deadline) {
  if (const Variant chunks{.kind = Variant::Shape::pipelined};
      window_bytes(moves) > kSlotsBytesMax && why_not(moves, chunks, form).empty()) {
    return {.variant = chunks};
  }
  if (const auto variant = tuned(moves, total_bytes, machine, form)) {
    return {.variant = *variant, .tuned = true};
  }
  Choice best;
  double best_ns = kNoLimit;
  bool native = false;
  for (const Variant& variant : variants_of(moves, form)) {
    // Prelaunch pays only where a caller repeats the operation on the same buffers: it is chosen by
    // the caller or by a measured table, never by the model.
    if (variant.prelaunch) continue;
    if (variant.kind == Variant::Shape::pipelined && window_bytes(moves) < kChunkedBytesMin) {
      continue;
    }
    if (deadline.passed()) {
      fail(Code::timeout, "choosing a variant for ", moves.op, " takes more than ",
           shown_s(deadline.wait_ns()), " s: pass a longer timeout, or name a variant");
    }
    const Program program = legalize(lower(moves, variant, machine, form), machine);
    const double above_ns = std::nextafter(best_ns, kNoLimit);  // as long is followed to its end
    const double ns = estimate(program, machine, above_ns).total_ns();
    if (ns < best_ns || (ns == best_ns && program.native && !native)) {
      best_ns = ns;
      native = program.native;
      best.variant = parse_variant(program.variant);  // with the chunks that it has
    }
  }
  if (best_ns == kNoLimit) {
    fail(Code::unsupported, moves.op, moves.in_place ? " in place" : "",
         ": no variant can do this on ", machine.name);
  }
  return best;
}

std::string tuned_variant(const ReductionPlan& plan, const Machine& machine,
                          const ProtocolForm& form) {
  if (form.captured) return "";  // another program: not in chunks, and no table measures it
  const uint64_t total = std::accumulate(plan.parts.begin(), plan.parts.end(), uint64_t{0});
  const TunedCall call{plan.op, plan.parts.size(), plan.in_place, total};
  const TunedRow* row = nearest(call, machine, form, [&](const TunedRow& one) {
    if (one.variant != "pipelined" && one.variant != "one_shot") {
      fail(Code::invalid, "the tuned table has ", one.variant, " for ", plan.op,
           ": it has the variants pipelined and one_shot");
    }
    return one.variant == "pipelined" || one_shot_fits(plan);
  });
  return row == nullptr ? "" : row->variant;
}

bool slots_win(const Moves& moves, uint64_t total_bytes, const Machine& machine) {
  if (!moves.full_exchange || total_bytes > kSlotsBytesMax) return false;
  const TunedCall call = call_of(moves, total_bytes);
  double best_us[2] = {std::numeric_limits<double>::infinity(),
                       std::numeric_limits<double>::infinity()};
  for (const TunedRow& row : machine.tuned) {
    const bool promised = !row.entry && !row.staged;
    if (promised || row.signals != machine.signals || !fits(row, call)) continue;
    // Beyond the size that it was measured at, which may be the last one, time goes with bytes.
    const double larger =
        row.bytes == 0 ? 1.0 : static_cast<double>(total_bytes) / static_cast<double>(row.bytes);
    best_us[row.staged] = std::min(best_us[row.staged], row.time_us * std::max(1.0, larger));
  }
  return std::isfinite(best_us[0]) && best_us[1] < kSlotsGain * best_us[0];
}

}  // namespace offcore
