// Bytes in flight as fluid flows that share links and engines max-min fairly.
//
// A flow occupies the resources of its path and its engine. An engine is a resource of capacity 1
// (its time); a flow that writes at r GB/s on an engine good for g GB/s of this kind takes r / g of
// it. Where every resource of a flow has room for all its flows at full speed nothing is shared, so
// only the flows joined by crowded resources are worked out again when one starts or ends.
#pragma once
#include <cstdint>
#include <vector>

#include "core/machine/machine.h"

namespace offcore::sim {

class Flows {
 public:
  Flows(const Machine& machine, Rank ranks, uint32_t engines);

  // 1 is the engine's own speed; a slow one has less.
  void set_engine_speed(uint32_t engine, double speed);
  // Begins a flow at `now_ns`. Its rate holds after settle().
  uint32_t start(Rank dst, Rank src, uint32_t engine, double engine_gbps, double bytes,
                 double now_ns);
  void end(uint32_t flow);
  // Shares the resources after starts and ends. Returns the flows whose rate changed.
  const std::vector<uint32_t>& settle(double now_ns);
  // When the flow ends at its present rate.
  double end_ns(uint32_t flow) const;

 private:
  static constexpr uint32_t kResourcesMax = 4;
  struct Flow {
    double left_bytes = 0;
    double rate_gbps = 0;
    double since_ns = 0;     // left_bytes is of this moment
    double alone_gbps = 0;   // its rate were it alone
    double share_gbps = -1;  // what settle works out; -1: not yet
    uint32_t count = 0;
    uint32_t resource[kResourcesMax] = {};
    double weight[kResourcesMax] = {};
    uint32_t visit = 0;
  };
  struct Resource {
    double capacity = 0;
    double wanted = 0;  // by its flows, each as if alone
    std::vector<uint32_t> flows;
    uint32_t visit = 0;
    bool crowded = false;  // at the last settle
    // While settling: what is left for how many flows of what weight.
    double left = 0;
    double weight = 0;
    uint32_t open = 0;
  };

  void touch(uint32_t resource);
  static double level_of(const Resource& resource);
  void collect();
  void share();
  void fix(uint32_t flow, double rate_gbps);

  Resources paths_;
  uint32_t first_engine_;
  std::vector<Resource> resources_;
  std::vector<Flow> flows_;
  std::vector<uint32_t> free_;
  uint32_t visit_ = 1;
  // Scratch of settle: the resources touched since the last, and the part they are joined to.
  std::vector<uint32_t> touched_;
  std::vector<uint32_t> joined_resources_;
  std::vector<uint32_t> joined_flows_;
  std::vector<uint32_t> changed_;
};

}  // namespace offcore::sim
