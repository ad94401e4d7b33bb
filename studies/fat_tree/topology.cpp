#include "studies/fat_tree/topology.h"

#include <algorithm>

#include "core/base/error.h"

namespace offcore::tree {
namespace {

constexpr int kHostsMax = 1 << 17;

}  // namespace

FatTree::FatTree(const TreeShape& shape) : shape_(shape) {
  if (shape.hosts < 1 || shape.hosts > kHostsMax || shape.hosts_per_leaf < 1)
    fail(Code::invalid, "a fat-tree has 1 to ", kHostsMax, " hosts, and at least one on a leaf");
  leaves_ = (shape.hosts + shape.hosts_per_leaf - 1) / shape.hosts_per_leaf;
  leaves_per_pod_ = shape.leaves_per_pod > 0 ? shape.leaves_per_pod : leaves_;
  pods_ = (leaves_ + leaves_per_pod_ - 1) / leaves_per_pod_;
  if (leaves_ > 1 && (shape.spines < 1 || shape.leaf_ports < shape.spines))
    fail(Code::invalid, leaves_, " leaves need spines, and each leaf a port to every spine");
  if (pods_ > 1 && shape.spine_ports < 1)
    fail(Code::invalid, pods_, " pods need cores: spine_ports says how many each spine has");
  const int leaf_links = leaves_ > 1 ? leaves_ * shape.leaf_ports : 0;
  const int spine_links = pods_ > 1 ? pods_ * shape.spines * shape.spine_ports : 0;
  const std::array<int, kTiers> counts{shape.hosts, shape.hosts, leaf_links,
                                       leaf_links,  spine_links, spine_links};
  for (size_t tier = 0; tier < counts.size(); ++tier)
    begin_[tier + 1] = begin_[tier] + counts[tier];
}

int FatTree::leaf_end_host(int leaf) const {
  return std::min(shape_.hosts, (leaf + 1) * shape_.hosts_per_leaf);
}

int FatTree::pod_end_leaf(int pod) const { return std::min(leaves_, (pod + 1) * leaves_per_pod_); }

Tier FatTree::tier_of(int link) const {
  int tier = 0;
  while (link >= begin_[static_cast<size_t>(tier) + 1]) ++tier;
  return static_cast<Tier>(tier);
}

int FatTree::owner_of(int link) const {
  const Tier tier = tier_of(link);
  const int place = link - begin_[static_cast<size_t>(tier)];
  if (tier <= Tier::host_down) return place;
  return place / (tier <= Tier::leaf_down ? shape_.leaf_ports : shape_.spine_ports);
}

Route FatTree::route(int src, int dst) const {
  const int from = leaf_of(src), to = leaf_of(dst);
  Route route;
  route.add(host_up(src));
  if (from != to) {
    route.add(leaf_up(from, dst));
    if (pod_of(from) != pod_of(to)) {
      route.add(spine_up(pod_of(from), dst));
      route.add(spine_down(pod_of(to), dst));
    }
    route.add(leaf_down(to, dst));
  }
  route.add(host_down(dst));
  return route;
}

}  // namespace offcore::tree
