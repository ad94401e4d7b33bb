// A rank of a communicator on UDP multicast and TCP.
//
// Its parts live on loops: the control thread on one, each subgroup's receiving and sending on
// others or on the same one. Loops may be shared by many nodes.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/mcast/endpoint.h"
#include "core/mcast/udp/loop.h"
#include "core/mcast/udp/multicast.h"
#include "core/mcast/udp/peers.h"
#include "core/mcast/udp/receive_path.h"
#include "core/mcast/udp/sender.h"

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
using LoopList = std::vector<std::shared_ptr<Loop>>;
struct Loops : OfProcess {
  Loops() : OfProcess("the multicast threads") {}

  std::shared_ptr<Loop> control;
  LoopList receive;  // subgroup s is received on s modulo their number
  LoopList send;

  // New ones. `spin_ns`: see Loop.
  static Loops start(uint32_t receive_workers, uint32_t send_workers, int64_t spin_ns = 0);
};

// What a rank tells the others, as text.
struct PeerAddress {
  uint64_t place = 0;           // who shares it gets multicast only by looping it back
  uint32_t datagram_bytes = 0;  // the largest that it sends or receives
  uint32_t buffer_bytes = 0;    // of a receiving socket
  uint16_t port = 0;            // TCP
  uint16_t credit_port = 0;     // UDP
  std::string host;

  std::string text() const;
  static PeerAddress parse(const std::string& text);  // throws mismatch
};

class UdpNode final : public OfProcess, Transport, PeerListener {
 public:
  // Throws invalid (no such interface), driver (the system refuses a socket).
  UdpNode(const UdpOptions& options, Loops loops);
  ~UdpNode() override { close(); }

  // What peers need to reach this rank, as text for the rendezvous.
  std::string address() const { return card_.text(); }
  // Begins, with the addresses of all ranks. Connections are made when first needed.
  void start(const Group& group, const std::vector<std::string>& addresses);
  Endpoint& endpoint();  // after start
  // Says goodbye to the peers and returns once they know, 1.5 s later at most. Operations
  // that have not ended fail as cancelled. Any thread but the node's own.
  void close();
  // What the transport counts itself (bytes sent, system calls, drops in the kernel), by name.
  std::vector<std::pair<std::string, uint64_t>> counters() const;

 private:
  // Transport
  void send(GroupRank to, const Message& message) override { peers_->send(to, message); }
  void send(GroupRank to, const Message& reply, std::span<const std::byte> data) override {
    peers_->send(to, reply, data);
  }
  bool holds_data(GroupRank to, Sequence sequence) const override {
    return peers_->holds_data(to, sequence);
  }
  void multicast(const BlockPart& part) override { casters_[part.subgroup]->push(part); }
  void wake() override;
  void stop() override;
  // PeerListener
  std::span<std::byte> place_of(GroupRank from, const Message& reply) override {
    return endpoint_->place_of(from, reply);
  }
  void on_message(GroupRank from, const Message& message) override {
    endpoint_->on_message(from, message, now_ns());
    look_later();
  }
  void on_lost(GroupRank rank, const std::string& reason) override {
    endpoint_->on_peer_lost(rank, reason, now_ns());
    look_later();
  }

  void open_subgroups(const Group& group, bool loop);
  void look();
  void look_later();
  void receive(uint32_t subgroup);
  void on_credits();
  void answer(const std::byte* asked);
  Loop& loop_of(const LoopList& workers, uint32_t subgroup) const;

  const UdpOptions options_;
  const Loops loops_;
  Descriptor namespace_;
  Interface interface_;
  PeerAddress card_;
  std::unique_ptr<Peers> peers_;
  Descriptor credits_;  // UDP: to roots, and from leaves
  std::vector<Address> credit_addresses_;
  std::vector<std::unique_ptr<ReceiveSocket>> sockets_;  // by subgroup
  std::vector<std::unique_ptr<ReceivePath>> receive_paths_;
  std::vector<std::unique_ptr<Sender>> casters_;
  std::unique_ptr<Endpoint> endpoint_;
  uint32_t window_bytes_ = UINT32_MAX;
  std::atomic<uint64_t> receive_failures_{0};
  std::atomic<bool> woken_{false};
  bool stopped_ = false;
};

// Bytes of a chunk that fits a datagram on the way to every rank, by the addresses of all.
uint32_t chunk_bytes_for(const std::vector<std::string>& addresses, bool sealed);

}  // namespace offcore::mcast
