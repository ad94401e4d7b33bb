// A rank of a communicator on UDP multicast and TCP.
//
// Its parts live on loops: the control thread on one, each subgroup's receiving and sending on
// others or on the same one. Loops may be shared by many nodes.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/mcast/transport.h"
#include "core/mcast/udp/loop.h"
#include "core/mcast/udp/multicast.h"

namespace offcore::mcast {

struct UdpOptions {
  std::string interface;  // its name or an address of it; empty: see find_interface
  bool ipv6 = false;
  std::string multicast_group;  // the first subgroup's; empty: chosen by the communicator's tag
  uint16_t port = 0;            // of all subgroups; 0: chosen by the tag
  int hops = 1;
  bool gso = true;
  bool gro = true;
  uint32_t datagram_bytes = 0;      // of one datagram, at most; 0: what the interface's MTU allows
  uint32_t buffer_bytes = 4 << 20;  // of each socket; kernels give less unless told otherwise
  int namespace_fd = -1;            // network namespace of the sockets; -1: the caller's
};

// Whose threads a node runs on. No receive or send loops: the control loop does it. Nodes may share
// loops, if each is a control loop or a worker's for all of them.
struct Loops : OfProcess {
  Loops() : OfProcess("the multicast threads") {}

  std::shared_ptr<Loop> control;
  std::vector<std::shared_ptr<Loop>> receive;  // subgroup s is received on s modulo their number
  std::vector<std::shared_ptr<Loop>> send;

  // New ones. `spin_ns`: see Loop.
  static Loops start(uint32_t receive_workers, uint32_t send_workers, int64_t spin_ns = 0);
};

// Throws invalid (no such interface), driver (the system refuses a socket).
std::unique_ptr<EndpointNode> open_udp_node(const UdpOptions& options, Loops loops);

// Bytes of a chunk that fits a datagram on the way to every rank, by the addresses of all.
uint32_t chunk_bytes_for(const std::vector<std::string>& addresses, bool sealed);

}  // namespace offcore::mcast
