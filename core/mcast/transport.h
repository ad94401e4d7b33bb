// What the protocol needs of a network.
//
// The protocol (Endpoint) knows no socket, thread or clock. A transport has a control thread, which
// makes all calls of Endpoint that are not marked "any thread", one at a time, and on which all
// calls below but wake() are made, from inside those calls. It also has a receive worker for each
// subgroup (or one for several), which hands datagrams to Endpoint::receiver(subgroup), and send
// workers as it likes. See docs/decisions/0005-mcast.md.
#pragma once
#include <span>

#include "core/mcast/wire.h"

namespace offcore::mcast {

// Nothing here blocks, and nothing calls the endpoint back from inside. A transport outlives its
// endpoint, whose destructor sends and stops.
class Transport {
 public:
  virtual ~Transport() = default;

  // Reliable, and in order between two ranks, but for data. A connection that fails, or cannot be
  // made in time, is reported by Endpoint::on_peer_lost; messages to that rank are then dropped.
  virtual void send(GroupRank to, const Message& message) = 0;
  // A reply or share with its data, which stays where it is until the receiver has said that it has
  // it (`final`, `taken`), or stop(). Messages without data may overtake it.
  virtual void send(GroupRank to, const Message& reply, std::span<const std::byte> data) = 0;
  // Whether data to that rank, of a sequence's operations, is still to be read.
  virtual bool holds_data(GroupRank to, Sequence sequence) const = 0;

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

}  // namespace offcore::mcast
