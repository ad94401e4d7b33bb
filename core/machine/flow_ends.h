// When each flow ends: a heap that knows the place of every flow, so that a flow whose rate changes
// moves in it. (Most flows that share a link change whenever one of them begins or ends.)
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

namespace offcore {

class FlowEnds {
 public:
  struct End {
    double at_ns;
    uint64_t tie;
    uint32_t flow;
  };

  bool empty() const { return heap_.empty(); }
  const End& first() const { return heap_.front(); }

  // Puts or moves the flow.
  void put(const End& end) {
    if (end.flow >= places_.size()) places_.resize(end.flow + size_t{1}, kNone);
    if (places_[end.flow] == kNone) {
      places_[end.flow] = static_cast<uint32_t>(heap_.size());
      heap_.push_back(end);
    } else {
      heap_[places_[end.flow]] = end;
    }
    sift(places_[end.flow]);
  }

  // Also one that was never put.
  void remove(uint32_t flow) {
    if (flow >= places_.size() || places_[flow] == kNone) return;
    const uint32_t place = std::exchange(places_[flow], kNone);
    const End last = heap_.back();
    heap_.pop_back();
    if (last.flow == flow) return;
    set(place, last);
    sift(place);
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  static bool before(const End& a, const End& b) {
    return a.at_ns != b.at_ns ? a.at_ns < b.at_ns : a.tie < b.tie;
  }

  void set(uint32_t place, const End& end) {
    heap_[place] = end;
    places_[end.flow] = place;
  }

  void sift(uint32_t place) {
    const End end = heap_[place];
    while (place > 0 && before(end, heap_[(place - 1) / 2])) {
      set(place, heap_[(place - 1) / 2]);
      place = (place - 1) / 2;
    }
    while (true) {
      uint32_t child = 2 * place + 1;
      if (child + 1 < heap_.size() && before(heap_[child + 1], heap_[child])) ++child;
      if (child >= heap_.size() || !before(heap_[child], end)) break;
      set(place, heap_[child]);
      place = child;
    }
    set(place, end);
  }

  std::vector<End> heap_;
  std::vector<uint32_t> places_;  // by flow; kNone: not in it
};

}  // namespace offcore
