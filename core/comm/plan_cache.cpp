#include "core/comm/plan_cache.h"

#include <utility>

#include "core/comm/cached_plan.h"

namespace offcore {

std::shared_ptr<CachedPlan> PlanCache::find(const std::string& key) {
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return nullptr;
  const auto kept = found->second;
  if (!kept->pinned) recent_.splice(recent_.begin(), recent_, kept);
  return kept->plan;
}

void PlanCache::keep(std::string key, std::shared_ptr<CachedPlan> plan, bool pinned) {
  std::list<PlanEntry>& kept = pinned ? pinned_ : recent_;
  kept.push_front({.key = std::move(key), .plan = std::move(plan), .pinned = pinned});
  by_key_.emplace(kept.front().key, kept.begin());
  if (recent_.size() <= kDroppableMax) return;
  by_key_.erase(recent_.back().key);
  recent_.pop_back();
}

void PlanCache::clear() {
  by_key_.clear();
  recent_.clear();
  pinned_.clear();
}

}  // namespace offcore
