// Which variant: the tuned table's, else the cheapest by the cost model.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "core/base/error.h"
#include "core/machine/cost.h"
#include "core/plan/plan.h"

namespace offcore {

namespace {

constexpr double kSlotsGain = 0.97;  // less is not worth the memory
// A lane has three slots of its largest call. One in a single piece is as large as the output.
constexpr uint64_t kSlotsBytesMax = 64 << 20;
constexpr uint64_t kChunkedBytesMin = 1 << 20;  // below that a queue that only drains costs more

bool fits(const TunedRow& row, const Moves& moves, uint64_t total_bytes) {
  return row.op == moves.op && row.ranks == moves.ranks && row.in_place == moves.in_place &&
         row.bytes_min <= total_bytes && total_bytes <= row.bytes_max;
}

// How far what a row measured is from what is asked for: the slots count most, then the entry
// round, then the form of signals.
unsigned distance(const TunedRow& row, const Machine& machine, const ProtocolForm& form) {
  return (row.staged != form.staged ? 4u : 0u) +
         (row.entry != (form.entry || form.captured) ? 2u : 0u) +
         (row.signals != machine.signals ? 1u : 0u);
}

// The first of the nearest rows that fit: even the farthest is a better guess than the model's.
std::optional<Variant> tuned(const Moves& moves, uint64_t total_bytes, const Machine& machine,
                             const ProtocolForm& form) {
  std::optional<Variant> best;
  unsigned nearest = std::numeric_limits<unsigned>::max();
  for (const TunedRow& row : machine.tuned) {
    const unsigned away = distance(row, machine, form);
    if (away >= nearest || !fits(row, moves, total_bytes)) continue;
    const Variant variant = parse_variant(row.variant);
    if (!why_not(moves, variant, form).empty()) continue;
    best = variant;
    nearest = away;
  }
  return best;
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

bool slots_win(const Moves& moves, uint64_t total_bytes, const Machine& machine) {
  if (!moves.full_exchange || total_bytes > kSlotsBytesMax) return false;
  double best_us[2] = {std::numeric_limits<double>::infinity(),
                       std::numeric_limits<double>::infinity()};
  for (const TunedRow& row : machine.tuned) {
    const bool promised = !row.entry && !row.staged;
    if (promised || row.signals != machine.signals || !fits(row, moves, total_bytes)) continue;
    // Beyond the size that it was measured at, which may be the last one, time goes with bytes.
    const double larger =
        row.bytes == 0 ? 1.0 : static_cast<double>(total_bytes) / static_cast<double>(row.bytes);
    best_us[row.staged] = std::min(best_us[row.staged], row.time_us * std::max(1.0, larger));
  }
  return std::isfinite(best_us[0]) && best_us[1] < kSlotsGain * best_us[0];
}

}  // namespace offcore
