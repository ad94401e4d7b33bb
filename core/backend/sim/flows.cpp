#include "core/backend/sim/flows.h"

#include <algorithm>
#include <limits>

namespace offcore::sim {
namespace {

constexpr double kRounding = 1 + 1e-9;
constexpr double kWeightMin = 1e-12;
constexpr double kRateMinGbps = 1e-9;  // a flow always ends

}  // namespace

Flows::Flows(const Machine& machine, Rank ranks, uint32_t engines) : paths_(machine, ranks) {
  const std::vector<double>& capacities = paths_.capacities_gbps();
  first_engine_ = static_cast<uint32_t>(capacities.size());
  resources_.resize(capacities.size() + engines);
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
  flow.alone_gbps = std::numeric_limits<double>::infinity();
  for (uint32_t k = 0; k < flow.count; ++k) {
    const Resource& resource = resources_[flow.resource[k]];
    flow.alone_gbps = std::min(flow.alone_gbps, resource.capacity / flow.weight[k]);
  }
  for (uint32_t k = 0; k < flow.count; ++k) {
    Resource& resource = resources_[flow.resource[k]];
    resource.flows.push_back(index);
    resource.wanted += flow.alone_gbps * flow.weight[k];
    touch(flow.resource[k]);
  }
  return index;
}

void Flows::end(uint32_t index) {
  const Flow& flow = flows_[index];
  for (uint32_t k = 0; k < flow.count; ++k) {
    Resource& resource = resources_[flow.resource[k]];
    std::erase(resource.flows, index);
    resource.wanted -= flow.alone_gbps * flow.weight[k];
    if (resource.flows.empty()) resource.wanted = 0;  // no rounding left behind
    touch(flow.resource[k]);
  }
  free_.push_back(index);
}

double Flows::end_ns(uint32_t index) const {
  const Flow& flow = flows_[index];
  return flow.since_ns + flow.left_bytes / flow.rate_gbps;
}

void Flows::touch(uint32_t resource) { touched_.push_back(resource); }

const std::vector<uint32_t>& Flows::settle(double now_ns) {
  changed_.clear();
  if (touched_.empty()) return changed_;
  collect();
  share();
  for (const uint32_t index : joined_flows_) {
    Flow& flow = flows_[index];
    const double rate = std::max(flow.share_gbps, kRateMinGbps);
    if (rate == flow.rate_gbps) continue;
    flow.left_bytes = std::max(0.0, flow.left_bytes - flow.rate_gbps * (now_ns - flow.since_ns));
    flow.since_ns = now_ns;
    flow.rate_gbps = rate;
    changed_.push_back(index);
  }
  return changed_;
}

// Gathers what is joined to the touched resources by crowded ones. A resource that no longer is
// crowded, but was, still joins: its flows go faster now.
void Flows::collect() {
  ++visit_;
  joined_resources_.clear();
  joined_flows_.clear();
  const auto visit_resource = [&](uint32_t index) {
    Resource& resource = resources_[index];
    if (resource.visit == visit_) return;
    resource.visit = visit_;
    const bool crowded = resource.wanted > resource.capacity * kRounding;
    if (crowded || resource.crowded) joined_resources_.push_back(index);
    resource.crowded = crowded;
  };
  const auto visit_flow = [&](uint32_t index) {
    Flow& flow = flows_[index];
    if (flow.visit == visit_) return;
    flow.visit = visit_;
    flow.share_gbps = -1;
    joined_flows_.push_back(index);
    for (uint32_t k = 0; k < flow.count; ++k) visit_resource(flow.resource[k]);
  };
  for (const uint32_t index : touched_) {
    // A flow that just began has no rate yet, crowded or not.
    for (const uint32_t flow : resources_[index].flows) {
      if (flows_[flow].rate_gbps == 0) visit_flow(flow);
    }
    visit_resource(index);
  }
  touched_.clear();
  for (size_t i = 0; i < joined_resources_.size(); ++i) {
    for (const uint32_t flow : resources_[joined_resources_[i]].flows) visit_flow(flow);
  }
  std::erase_if(joined_resources_, [&](uint32_t index) { return !resources_[index].crowded; });
}

// The rate that each of a resource's open flows can have. (What rounding has left of a weight that
// should be gone must not count.)
double Flows::level_of(const Resource& resource) {
  return std::max(0.0, resource.left) / std::max(resource.weight, kWeightMin);
}

// Max-min: raises all rates together; who meets a limit keeps that rate.
void Flows::share() {
  for (const uint32_t index : joined_resources_) {
    Resource& resource = resources_[index];
    resource.left = resource.capacity;
    resource.open = static_cast<uint32_t>(resource.flows.size());
    resource.weight = 0;
    for (const uint32_t flow_index : resource.flows) {
      const Flow& flow = flows_[flow_index];
      for (uint32_t k = 0; k < flow.count; ++k) {
        if (flow.resource[k] == index) resource.weight += flow.weight[k];
      }
    }
  }
  size_t open = joined_flows_.size();
  while (open > 0) {
    double level = std::numeric_limits<double>::infinity();
    for (const uint32_t index : joined_resources_) {
      const Resource& resource = resources_[index];
      if (resource.open > 0) level = std::min(level, level_of(resource));
    }
    size_t fixed = 0;
    for (const uint32_t index : joined_flows_) {
      const Flow& flow = flows_[index];
      if (flow.share_gbps >= 0 || flow.alone_gbps > level * kRounding) continue;
      fix(index, flow.alone_gbps);
      ++fixed;
    }
    if (fixed == 0) {
      for (const uint32_t resource_index : joined_resources_) {
        Resource& resource = resources_[resource_index];
        if (resource.open == 0) continue;
        if (level_of(resource) > level * kRounding) continue;
        for (const uint32_t index : resource.flows) {
          if (flows_[index].share_gbps >= 0) continue;
          fix(index, level);
          ++fixed;
        }
      }
    }
    open -= fixed;
  }
}

void Flows::fix(uint32_t index, double rate_gbps) {
  Flow& flow = flows_[index];
  flow.share_gbps = rate_gbps;
  for (uint32_t k = 0; k < flow.count; ++k) {
    Resource& resource = resources_[flow.resource[k]];
    if (!resource.crowded) continue;
    resource.left -= rate_gbps * flow.weight[k];
    resource.weight -= flow.weight[k];
    --resource.open;
  }
}

}  // namespace offcore::sim
