// Bytes in flight as fluid flows that share links and engines max-min fairly.
//
// A flow occupies the resources of its path and its engine. An engine is a resource of capacity 1
// (its time); a flow that writes at r GB/s on an engine good for g GB/s of this kind takes r / g of
// it. A resource that its flows could fill has a level, which none of their rates exceeds; a flow
// has the lowest of its resources' levels. When a flow starts or ends, the levels of its resources
// are worked out again, then those of the resources whose flows have changed with them, until none
// does: the rates then are max-min fair, since each flow is bounded by a full resource that gives
// nobody more.
#pragma once
#include <cstdint>
#include <limits>
#include <vector>

#include "core/machine/machine.h"

namespace offcore {

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
    double since_ns = 0;    // left_bytes is of this moment
    double alone_gbps = 0;  // its rate were it alone
    double share_gbps = 0;  // what settle works out
    uint32_t count = 0;
    uint32_t resource[kResourcesMax] = {};
    double weight[kResourcesMax] = {};
    bool given = false;  // another share since the last settle
  };
  struct Resource {
    double capacity = 0;
    double wanted = 0;  // by its flows, each as if alone
    double used = 0;    // by their shares
    std::vector<uint32_t> flows;
    bool pending = false;  // its level may be another
  };
  struct Bounded {
    double limit_gbps;
    double weight;
  };

  void look_at(uint32_t resource);
  double limit_of(const Flow& flow, uint32_t except) const;
  void give(uint32_t flow, double gbps);
  double level_of(uint32_t resource);
  void share(uint32_t resource);

  Resources paths_;
  uint32_t first_engine_;
  std::vector<Resource> resources_;
  std::vector<double> levels_;  // by resource: no share of it is larger
  std::vector<Flow> flows_;
  std::vector<uint32_t> free_;
  double tolerance_;  // a level that is off by this part is left as it is
  // Scratch of settle.
  std::vector<uint32_t> started_;
  std::vector<uint32_t> pending_;
  std::vector<uint32_t> given_;
  std::vector<uint32_t> changed_;
  std::vector<Bounded> bounded_;
};

}  // namespace offcore
