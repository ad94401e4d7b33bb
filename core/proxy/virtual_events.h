// What happens later in virtual time, and bytes that flow meanwhile. One thread.
#pragma once
#include <functional>
#include <vector>

#include "core/machine/flow_ends.h"
#include "core/machine/flows.h"

namespace offcore::proxy {

class VirtualEvents {
 public:
  using Act = std::function<void()>;
  using Over = std::function<bool()>;

  // `draw`: what orders events of equal time.
  VirtualEvents(const Machine& machine, Rank ranks, uint32_t engines,
                std::function<uint64_t()> draw);

  double now_ns() const { return now_ns_; }
  void after(double ns, Act act) { push(ns, std::move(act), nullptr); }
  // A limit: nothing happens, and no time passes for it, once it is `over`.
  void unless(Over over, double ns, Act act) { push(ns, std::move(act), std::move(over)); }
  // From `src` to `dst` by an engine of that rate; `ended` then.
  void flow(Rank dst, Rank src, uint32_t engine, double gbps, uint64_t bytes, Act ended);
  // Until nothing is left to happen.
  void run();
  void clear();

 private:
  struct Event {
    double at_ns;
    uint64_t tie;
    Act act;
    Over over;
    bool operator<(const Event& other) const {
      return at_ns != other.at_ns ? at_ns > other.at_ns : tie > other.tie;
    }
  };

  void push(double ns, Act act, Over over);
  Event take();
  void drop_what_is_over();
  double next_ns() const;
  void happen();

  const Machine machine_;
  const Rank ranks_;
  const uint32_t engines_;
  const std::function<uint64_t()> draw_;
  double now_ns_ = 0;
  std::vector<Event> events_;  // a heap
  Flows flows_;
  FlowEnds ends_;
  std::vector<Act> ended_;  // by flow
};

}  // namespace offcore::proxy
