// What the protocol needs of a network, and a rank that runs on one.
//
// The protocol (Endpoint) knows no socket, thread or clock. A transport has a control thread, which
// makes all calls of Endpoint that are not marked "any thread", one at a time, and on which all
// calls below but wake() are made, from inside those calls. It also has a receive worker for each
// subgroup (or one for several), which hands datagrams to Endpoint::receiver(subgroup), and send
// workers as it likes. See docs/decisions/0005-mcast.md.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/base/fork.h"
#include "core/mcast/wire.h"

namespace offcore::mcast {

class Endpoint;

// Nothing here blocks, and nothing calls the endpoint back from inside. A transport outlives its
// endpoint, whose destructor sends and stops.
class Transport {
 public:
  virtual ~Transport() = default;

  // Reliable, and in order between two ranks. A connection that fails, or cannot be made in time,
  // is reported by Endpoint::on_peer_lost; messages to that rank are then dropped.
  virtual void send(GroupRank to, const Message& message) = 0;
  // A reply with its data, which stays where it is until the receiver has said `final`, or stop().
  virtual void send(GroupRank to, const Message& reply, std::span<const std::byte> data) = 0;
  // Whether data of replies to that rank is still to be read.
  virtual bool holds_data(GroupRank to) const = 0;

  // Begins to send a part's chunks over its subgroup, in order. Once the network has taken the last
  // one, Endpoint::on_sent is called on the control thread. The data stays until then, or stop().
  virtual void multicast(const BlockPart& part) = 0;

  // Any thread, and cheap where nobody sleeps: the control thread calls Endpoint::on_time soon.
  virtual void wake() = 0;

  // The communicator has failed or is closed. When this returns, no thread reads or writes a buffer
  // of an operation any more. Messages sent after it are dropped; those sent before still go out,
  // but not replies.
  virtual void stop() = 0;
};

// An endpoint that runs: a transport with its threads. What the API holds; made by the transport.
// The destructor closes it.
class EndpointNode : public OfProcess {
 public:
  EndpointNode() : OfProcess("the multicast communicator") {}
  virtual ~EndpointNode() = default;
  // What peers need to reach this rank, as bytes for the rendezvous.
  virtual std::string address() const = 0;
  // Begins, with the addresses of all ranks. Connections may be made when first needed.
  virtual void start(const Group& group, const std::vector<std::string>& addresses,
                     const Deadline& deadline) = 0;
  virtual Endpoint& endpoint() = 0;  // after start
  // Says goodbye to the peers and returns once they know, 1.5 s later at most. Operations
  // that have not ended fail as cancelled. Any thread but the node's own.
  virtual void close() = 0;
  // What the transport counts itself (bytes sent, system calls, drops in the kernel), by name.
  virtual std::vector<std::pair<std::string, uint64_t>> counters() const = 0;
};

}  // namespace offcore::mcast
