// Collectives on a simulated fat-tree: what they take, and what every link carries.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "studies/fat_tree/fabric.h"

namespace offcore::tree {

// One collective. `bytes` is the total array: what a host holds after a broadcast or an all-gather,
// and before a reduce-scatter. All loads of a run begin together.
struct Load {
  std::string op;         // broadcast, all_gather, reduce_scatter
  std::string algorithm;  // see the tables in simulate.cpp
  int64_t bytes = 0;
  int root = 0;
  int chains = 1;             // multicast: hosts that send at once
  int radix = 2;              // knomial
  int segments = 1;           // knomial, binary_tree: a message is sent on in so many pieces
  double loss = 0;            // of datagrams, on the last link
  uint64_t seed = 1;          // of the losses
  double alpha_ns = 100'000;  // added to bytes / bandwidth: the cutoff timer
};

// Means over the hosts, which together make up the mean time of a host.
struct TreePhases {
  double barrier_ns = 0, multicast_ns = 0, fetch_ns = 0, handshake_ns = 0;
};

struct Outcome {
  std::vector<double> host_ns;  // when each host was done
  TreePhases phases;            // multicast only
  int64_t lost = 0, fetched = 0;
};

struct TreePort {
  std::string from, to;
  int64_t bytes = 0, packets = 0, queue_bytes_max = 0;
};

struct Simulated {
  std::vector<Outcome> outcomes;
  std::vector<TreePort> ports;  // a directed link each
  int64_t link_bytes = 0;       // every link, each direction once
  int64_t switch_bytes = 0;     // what switch ports sent and received: twice between two switches
  int64_t events = 0;
};

// Raises invalid for what cannot be.
Simulated simulate(const TreeShape& shape, const Wire& wire, const std::vector<Load>& loads);

}  // namespace offcore::tree
