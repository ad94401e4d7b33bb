// A fat-tree of switches as numbers: hosts under leaves, leaves under spines and, where there are
// several pods, spines under cores. Links are directed and numbered, all of one kind together.
//
// A route takes one way up, chosen by its key (the destination of a unicast, the group of a
// multicast), and the only way down: what has one key meets at one switch.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace offcore::tree {

struct TreeShape {
  int hosts = 0;
  int hosts_per_leaf = 0;
  int leaf_ports = 0;      // of a leaf, towards its spines: port p leads to spine p % spines
  int spines = 0;          // of a pod
  int leaves_per_pod = 0;  // 0: one pod holds all
  int spine_ports = 0;     // of a spine, towards cores of its own; 0: no cores
};

enum class Tier : uint8_t { host_up, host_down, leaf_up, leaf_down, spine_up, spine_down };
inline constexpr int kTiers = 6;

struct Route {
  std::array<int, 6> links{};
  int length = 0;
  void add(int link) { links[static_cast<std::size_t>(length++)] = link; }
};

class FatTree {
 public:
  // Raises invalid where the numbers make no tree.
  explicit FatTree(const TreeShape& shape);

  const TreeShape& shape() const { return shape_; }
  int hosts() const { return shape_.hosts; }
  int leaves() const { return leaves_; }
  int pods() const { return pods_; }
  int links() const { return begin_[kTiers]; }

  int leaf_of(int host) const { return host / shape_.hosts_per_leaf; }
  int pod_of(int leaf) const { return leaf / leaves_per_pod_; }
  int leaf_first_host(int leaf) const { return leaf * shape_.hosts_per_leaf; }
  int leaf_end_host(int leaf) const;
  int pod_first_leaf(int pod) const { return pod * leaves_per_pod_; }
  int pod_end_leaf(int pod) const;

  Tier tier_of(int link) const;
  // The link's place among those of its kind, divided by its owner's ports: host, leaf or spine.
  int owner_of(int link) const;

  int host_up(int host) const { return host; }
  int host_down(int host) const { return begin_[1] + host; }
  int leaf_up(int leaf, int key) const { return begin_[2] + leaf_link(leaf, key); }
  int leaf_down(int leaf, int key) const { return begin_[3] + leaf_link(leaf, key); }
  int spine_up(int pod, int key) const { return begin_[4] + spine_link(pod, key); }
  int spine_down(int pod, int key) const { return begin_[5] + spine_link(pod, key); }

  Route route(int src, int dst) const;

 private:
  int leaf_link(int leaf, int key) const {
    return leaf * shape_.leaf_ports + key % shape_.leaf_ports;
  }
  int spine_link(int pod, int key) const {
    const int spine = pod * shape_.spines + key % shape_.leaf_ports % shape_.spines;
    return spine * shape_.spine_ports + key / shape_.leaf_ports % shape_.spine_ports;
  }

  TreeShape shape_;
  int leaves_ = 0, pods_ = 0, leaves_per_pod_ = 0;
  std::array<int, kTiers + 1> begin_{};  // the first link of each tier
};

}  // namespace offcore::tree
