#include "core/comm/known_shapes.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/base/error.h"

namespace offcore {

PlanShape shape_of(const Request& request, const Facts& facts, const Variant& variant,
                   const ProtocolForm& form, const Machine& machine) {
  Facts parts = facts;
  uint64_t unit = 0;
  for (const uint64_t count : parts.counts) unit = std::gcd(unit, count);
  if (unit != 0) {
    for (uint64_t& count : parts.counts) count /= unit;
  }
  return {.text = cat(describe(parts), facts.in_place ? " in place " : " apart ",
                      to_string(variant), " protocol=", to_string(request.protocol),
                      form.entry ? " entry" : "", form.staged ? " staged" : "",
                      form.captured ? " captured" : "", " machine=", digest(machine)),
          .unit = unit};
}

std::optional<KnownPart> KnownShapes::find(const PlanShape& shape) {
  const auto found = std::find_if(shapes_.begin(), shapes_.end(), [&](const KnownShape& known) {
    return known.text == shape.text && known.range.holds(shape.unit);
  });
  if (found == shapes_.end()) return std::nullopt;
  shapes_.splice(shapes_.begin(), shapes_, found);
  KnownPart part = found->part;
  const uint64_t from = found->range.unit();
  part.program = std::make_shared<const Program>(scaled(*part.program, from, shape.unit));
  part.counts.bytes = part.counts.bytes / from * shape.unit;
  return part;
}

void KnownShapes::keep(const PlanShape& shape, const ScaleRange& range, const Program& whole,
                       Rank rank, const Counts& counts, bool native) {
  if (shape.unit == 0 || !range.holds(shape.unit)) return;
  auto part = std::make_shared<const Program>(part_of(whole, rank));
  shapes_.push_front({.text = shape.text,
                      .range = range,
                      .part = {.program = std::move(part), .counts = counts, .native = native}});
  if (shapes_.size() > kMost) shapes_.pop_back();
}

}  // namespace offcore
