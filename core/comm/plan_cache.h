// The plans that a communicator keeps, by cache key.
//
// Their number is bounded: of those that can be made again, the ones used last stay. What a rank
// drops is its own affair. It makes the plan anew at the next call of the key, and takes from its
// peers' records where the data lands (see Communicator::negotiate); nobody else has to have
// dropped it. Launches under way and captured graphs keep what they need of a plan that has been
// dropped.
#pragma once
#include <cstddef>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

namespace offcore {

struct CachedPlan;  // what a communicator keeps for a plan key

class PlanCache {
 public:
  static constexpr size_t kDroppableMax = 512;

  // Counts as a use. Null: there is none.
  std::shared_ptr<CachedPlan> find(const std::string& key);
  // Of a key that has none. `pinned`: never dropped, as making it again would take all ranks.
  void keep(std::string key, std::shared_ptr<CachedPlan> plan, bool pinned);
  void clear();
  size_t size() const { return by_key_.size(); }

  // The first plan that fits, or null.
  template <typename Fits>
  std::shared_ptr<CachedPlan> find_if(const Fits& fits) const {
    for (const auto* kept : {&pinned_, &recent_}) {
      for (const PlanEntry& one : *kept) {
        if (fits(*one.plan)) return one.plan;
      }
    }
    return nullptr;
  }

 private:
  struct PlanEntry {
    std::string key;
    std::shared_ptr<CachedPlan> plan;
    bool pinned;
  };

  std::list<PlanEntry> recent_;  // the one used last comes first
  std::list<PlanEntry> pinned_;
  std::unordered_map<std::string_view, std::list<PlanEntry>::iterator> by_key_;
};

}  // namespace offcore
