#include "core/proxy/virtual_events.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace offcore::proxy {

VirtualEvents::VirtualEvents(const Machine& machine, Rank ranks, uint32_t engines,
                             std::function<uint64_t()> draw)
    : machine_(machine),
      ranks_(ranks),
      engines_(engines),
      draw_(std::move(draw)),
      flows_(machine, ranks, engines) {}

void VirtualEvents::push(double ns, Act act, Over over) {
  events_.push_back({now_ns_ + ns, draw_(), std::move(act), std::move(over)});
  std::push_heap(events_.begin(), events_.end());
}

VirtualEvents::Event VirtualEvents::take() {
  std::pop_heap(events_.begin(), events_.end());
  Event event = std::move(events_.back());
  events_.pop_back();
  return event;
}

void VirtualEvents::flow(Rank dst, Rank src, uint32_t engine, double gbps, uint64_t bytes,
                         Act ended) {
  const uint32_t flow = flows_.start(dst, src, engine, gbps, static_cast<double>(bytes), now_ns_);
  if (flow >= ended_.size()) ended_.resize(flow + size_t{1});
  ended_[flow] = std::move(ended);
}

void VirtualEvents::drop_what_is_over() {
  while (!events_.empty() && events_.front().over && events_.front().over()) take();
}

double VirtualEvents::next_ns() const {
  double next = std::numeric_limits<double>::infinity();
  if (!events_.empty()) next = events_.front().at_ns;
  if (!ends_.empty()) next = std::min(next, ends_.first().at_ns);
  return next;
}

// The first thing that is due now.
void VirtualEvents::happen() {
  if (!ends_.empty() && ends_.first().at_ns <= now_ns_) {
    const uint32_t flow = ends_.first().flow;
    ends_.remove(flow);
    flows_.end(flow);
    std::exchange(ended_[flow], nullptr)();
  } else {
    take().act();
  }
}

void VirtualEvents::run() {
  for (drop_what_is_over(); !events_.empty() || !ends_.empty(); drop_what_is_over()) {
    now_ns_ = next_ns();
    while (next_ns() <= now_ns_) {
      happen();
      drop_what_is_over();
    }
    for (const uint32_t flow : flows_.settle(now_ns_)) {
      ends_.put({std::max(flows_.end_ns(flow), now_ns_), draw_(), flow});
    }
  }
}

void VirtualEvents::clear() {
  events_.clear();
  ended_.clear();
  ends_ = {};
  flows_ = Flows(machine_, ranks_, engines_);
}

}  // namespace offcore::proxy
