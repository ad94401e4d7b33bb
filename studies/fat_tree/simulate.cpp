#include "studies/fat_tree/simulate.h"

#include <map>
#include <utility>

#include "core/base/error.h"
#include "studies/fat_tree/schedules.h"

namespace offcore::tree {
namespace {

using Make = Made (*)(Fabric&, const Load&);

const std::map<std::pair<std::string, std::string>, Make>& algorithms() {
  static const std::map<std::pair<std::string, std::string>, Make> table = {
      {{"all_gather", "multicast"}, make_multicast},
      {{"all_gather", "ring"}, make_ring},
      {{"all_gather", "linear"}, make_linear},
      {{"all_gather", "doubling"}, make_doubling},
      {{"broadcast", "multicast"}, make_multicast},
      {{"broadcast", "knomial"}, make_knomial},
      {{"broadcast", "binary_tree"}, make_binary_tree},
      {{"broadcast", "scatter_ring"}, make_scatter_ring},
      {{"reduce_scatter", "ring"}, make_ring},
      {{"reduce_scatter", "in_network"}, make_in_network},
  };
  return table;
}

Made make(Fabric& fabric, const Load& load) {
  const auto found = algorithms().find({load.op, load.algorithm});
  if (found == algorithms().end()) {
    std::string known;
    for (const auto& [name, unused] : algorithms())
      if (name.first == load.op) known += (known.empty() ? "" : ", ") + name.second;
    fail(Code::invalid, "no algorithm '", load.algorithm, "' of ", load.op,
         known.empty() ? ": there are broadcast, all_gather, reduce_scatter" : ": there are ",
         known);
  }
  if (load.bytes < 0 || load.root < 0 || load.root >= fabric.tree().hosts() || load.loss < 0 ||
      load.loss > 1 || load.alpha_ns < 0)
    fail(Code::invalid, "a load has bytes, a root among the hosts, a loss from 0 to 1");
  return found->second(fabric, load);
}

// Both ends of a link. A trunk's port p of a leaf leads to spine p % spines.
std::pair<std::string, std::string> ends(const FatTree& tree, int link) {
  const TreeShape& shape = tree.shape();
  const int owner = tree.owner_of(link);
  const Tier tier = tree.tier_of(link);
  std::pair<std::string, std::string> up;
  if (tier <= Tier::host_down) {
    up = {cat("host", owner), cat("leaf", tree.leaf_of(owner))};
  } else if (tier <= Tier::leaf_down) {
    const int first = tree.leaf_up(owner, 0), second = tree.leaf_down(owner, 0);
    const int port = link - (tier == Tier::leaf_up ? first : second);
    const int spine = tree.pod_of(owner) * shape.spines + port % shape.spines;
    up = {cat("leaf", owner, ".", port), cat("spine", spine)};
  } else {
    const int pod = owner / shape.spines;
    // Cores are numbered by the spine of each pod that they hang on, and its port.
    const int first = tier == Tier::spine_up ? tree.spine_up(pod, 0) : tree.spine_down(pod, 0);
    up = {cat("spine", owner), cat("core", link - first)};
  }
  const bool is_up = tier == Tier::host_up || tier == Tier::leaf_up || tier == Tier::spine_up;
  return is_up ? up : std::pair{up.second, up.first};
}

}  // namespace

Simulated simulate(const TreeShape& shape, const Wire& wire, const std::vector<Load>& loads) {
  if (loads.empty() || loads.size() > 16) fail(Code::invalid, "a run has 1 to 16 loads");
  Fabric fabric(shape, wire, static_cast<int>(loads.size()));
  std::vector<Made> made;
  std::vector<Schedule*> schedules;
  int reductions = 0;
  for (const Load& load : loads) {
    made.push_back(make(fabric, load));
    made.back()->lane = static_cast<int>(made.size()) - 1;
    schedules.push_back(made.back().get());
    reductions += load.algorithm == "in_network";
  }
  if (reductions > 1) fail(Code::invalid, "switches combine for one load of a run");
  fabric.run(schedules);

  Simulated result;
  result.events = fabric.events();
  for (const Made& one : made) {
    if (!one->finished()) fail(Code::timeout, "a simulated host waits for ever: please report it");
    result.outcomes.push_back(one->outcome());
  }
  const FatTree& tree = fabric.tree();
  for (int link = 0; link < tree.links(); ++link) {
    const LinkCount& count = fabric.links()[static_cast<size_t>(link)];
    auto [from, to] = ends(tree, link);
    result.ports.push_back(
        {std::move(from), std::move(to), count.bytes, count.packets, count.queue_bytes_max});
    result.link_bytes += count.bytes;
    result.switch_bytes += count.bytes * (tree.tier_of(link) <= Tier::host_down ? 1 : 2);
  }
  return result;
}

}  // namespace offcore::tree
