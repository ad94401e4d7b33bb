#include "core/machine/flows.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace offcore {
namespace {

constexpr double kRounding = 1 + 1e-9;
constexpr double kWeightMin = 1e-12;
constexpr double kRateMinGbps = 1e-9;  // a flow always ends
constexpr double kNoLevel = std::numeric_limits<double>::infinity();
constexpr uint32_t kNone = UINT32_MAX;
// Levels depend on each other, less and less with each step: among more ranks than these, a level
// that would change by less than kCoarse stays. Whole collectives then take within 2e-5 as long.
constexpr Rank kRanksExact = 64;
constexpr double kRoundingOnly = 1e-12;
constexpr double kCoarse = 2e-3;

}  // namespace

Flows::Flows(const Machine& machine, Rank ranks, uint32_t engines)
    : paths_(machine, ranks), tolerance_(ranks <= kRanksExact ? kRoundingOnly : kCoarse) {
  const std::vector<double>& capacities = paths_.capacities_gbps();
  first_engine_ = static_cast<uint32_t>(capacities.size());
  resources_.resize(capacities.size() + engines);
  levels_.resize(resources_.size(), kNoLevel);
  for (size_t i = 0; i < capacities.size(); ++i) resources_[i].capacity = capacities[i];
  for (size_t i = first_engine_; i < resources_.size(); ++i) resources_[i].capacity = 1;
}

void Flows::set_engine_speed(uint32_t engine, double speed) {
  resources_[first_engine_ + engine].capacity = speed;
}

uint32_t Flows::start(Rank dst, Rank src, uint32_t engine, double engine_gbps, double bytes,
                      double now_ns) {
  if (free_.empty()) {
    free_.push_back(static_cast<uint32_t>(flows_.size()));
    flows_.emplace_back();
  }
  const uint32_t index = free_.back();
  free_.pop_back();
  Flow& flow = flows_[index];
  flow = Flow{.left_bytes = bytes, .since_ns = now_ns};
  const Resources::Path path = paths_.path(src, dst);
  for (uint32_t k = 0; k < path.count; ++k) {
    flow.resource[k] = path.index[k];
    flow.weight[k] = 1;
  }
  flow.resource[path.count] = first_engine_ + engine;
  flow.weight[path.count] = 1 / engine_gbps;
  flow.count = path.count + 1;
  flow.alone_gbps = kNoLevel;
  for (uint32_t k = 0; k < flow.count; ++k) {
    const Resource& resource = resources_[flow.resource[k]];
    flow.alone_gbps = std::min(flow.alone_gbps, resource.capacity / flow.weight[k]);
  }
  for (uint32_t k = 0; k < flow.count; ++k) {
    Resource& resource = resources_[flow.resource[k]];
    resource.flows.push_back(index);
    resource.wanted += flow.alone_gbps * flow.weight[k];
  }
  started_.push_back(index);
  return index;
}

void Flows::end(uint32_t index) {
  const Flow& flow = flows_[index];
  std::erase(started_, index);
  for (uint32_t k = 0; k < flow.count; ++k) {
    Resource& resource = resources_[flow.resource[k]];
    std::erase(resource.flows, index);
    resource.wanted -= flow.alone_gbps * flow.weight[k];
    resource.used -= flow.share_gbps * flow.weight[k];
    if (resource.flows.empty()) resource.wanted = resource.used = 0;  // no rounding left behind
    look_at(flow.resource[k]);
  }
  free_.push_back(index);
}

double Flows::end_ns(uint32_t index) const {
  const Flow& flow = flows_[index];
  return flow.since_ns + flow.left_bytes / flow.rate_gbps;
}

const std::vector<uint32_t>& Flows::settle(double now_ns) {
  for (const uint32_t index : started_) give(index, limit_of(flows_[index], kNone));
  started_.clear();
  for (size_t i = 0; i < pending_.size(); ++i) {
    resources_[pending_[i]].pending = false;
    share(pending_[i]);
  }
  pending_.clear();
  changed_.clear();
  for (const uint32_t index : given_) {
    Flow& flow = flows_[index];
    flow.given = false;
    const double rate = std::max(flow.share_gbps, kRateMinGbps);
    if (rate == flow.rate_gbps) continue;
    flow.left_bytes = std::max(0.0, flow.left_bytes - flow.rate_gbps * (now_ns - flow.since_ns));
    flow.since_ns = now_ns;
    flow.rate_gbps = rate;
    changed_.push_back(index);
  }
  given_.clear();
  return changed_;
}

// A resource without a level that still has room bounds nobody.
void Flows::look_at(uint32_t index) {
  Resource& resource = resources_[index];
  if (resource.pending) return;
  if (levels_[index] == kNoLevel && resource.used <= resource.capacity * kRounding) return;
  resource.pending = true;
  pending_.push_back(index);
}

// What a flow can have by all its resources but one.
double Flows::limit_of(const Flow& flow, uint32_t except) const {
  double limit = flow.alone_gbps;
  for (uint32_t k = 0; k < flow.count; ++k) {
    if (flow.resource[k] != except) limit = std::min(limit, levels_[flow.resource[k]]);
  }
  return limit;
}

void Flows::give(uint32_t index, double gbps) {
  Flow& flow = flows_[index];
  const double more = gbps - flow.share_gbps;
  if (more == 0 && flow.rate_gbps > 0) return;
  flow.share_gbps = gbps;
  for (uint32_t k = 0; k < flow.count; ++k) {
    resources_[flow.resource[k]].used += more * flow.weight[k];
    look_at(flow.resource[k]);
  }
  if (flow.given) return;
  flow.given = true;
  given_.push_back(index);
}

// The level at which a resource's flows that could have more just fill it, given what the others'
// other resources leave them.
double Flows::level_of(uint32_t index) {
  const Resource& resource = resources_[index];
  if (resource.wanted <= resource.capacity * kRounding) return kNoLevel;
  bounded_.clear();
  double weight = 0;
  for (const uint32_t flow_index : resource.flows) {
    const Flow& flow = flows_[flow_index];
    for (uint32_t k = 0; k < flow.count; ++k) {
      if (flow.resource[k] != index) continue;
      bounded_.push_back({limit_of(flow, index), flow.weight[k]});
      weight += flow.weight[k];
    }
  }
  double left = resource.capacity;
  while (true) {
    const double level = std::max(0.0, left) / std::max(weight, kWeightMin);
    const size_t open = bounded_.size();
    std::erase_if(bounded_, [&](const Bounded& flow) {
      if (flow.limit_gbps > level) return false;
      left -= flow.limit_gbps * flow.weight;
      weight -= flow.weight;
      return true;
    });
    if (bounded_.empty()) return kNoLevel;
    if (bounded_.size() == open) return level;
  }
}

void Flows::share(uint32_t index) {
  const double old = levels_[index];
  const double level = level_of(index);
  if (level == old || std::abs(level - old) <= tolerance_ * std::min(level, old)) return;
  levels_[index] = level;
  for (const uint32_t flow : resources_[index].flows) {
    give(flow, std::min(limit_of(flows_[flow], index), level));
  }
}

}  // namespace offcore
