// The reliable connections of a rank: one for every peer that it talks with, made when it is first
// needed by whichever side sends first. Where both do at once there are two, and each side keeps
// sending on its own, so that messages stay in order.
//
// Either side begins with a hello that proves that it knows the communicator's secret; strangers
// are hung up on. A rank that stops ends the connection that it sends on, once everything has gone
// out on it, and reads the others until its peers have ended theirs: so its end is never ahead of
// its words, nor are those lost with a connection that is reset. All of it happens on one loop.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/mcast/group.h"
#include "core/mcast/udp/address.h"
#include "core/mcast/udp/counter.h"
#include "core/mcast/udp/loop.h"
#include "core/mcast/udp/message_stream.h"

namespace offcore::mcast {

// Whom peers' messages are for. Not called from inside send() or stop().
class PeerListener {
 public:
  virtual ~PeerListener() = default;
  virtual std::span<std::byte> place_of(GroupRank from, const Message& reply) = 0;
  virtual void on_message(GroupRank from, const Message& message) = 0;
  virtual void on_lost(GroupRank rank, const std::string& reason) = 0;  // once for each, then never
};

class Peers {
 public:
  // Listens there, on a port that the kernel picks, in a namespace (see in_namespace).
  Peers(Loop& loop, const Address& at, int namespace_fd, PeerListener& listener);
  ~Peers();

  Address address() const { return address_; }

  // On the loop, all of them.
  void start(const Group& group, std::vector<Address> addresses);
  void send(GroupRank to, const Message& message, std::span<const std::byte> data = {});
  bool holds_data(GroupRank to,
                  Sequence sequence) const;  // of a send(), which the kernel has not taken yet
  // Touches nobody's data any more; messages that are queued still go out, for 1.5 s at most.
  void stop();

  void wait_stopped();  // any other thread, after stop()

  struct PeerCounters {
    Counter connections;
    Counter strangers;  // connections that were hung up on
  };
  const PeerCounters& counters() const { return counters_; }

 private:
  struct PeerLink;
  void accept();
  PeerLink& open(GroupRank to);
  PeerLink& adopt(Descriptor socket);
  void on_ready(PeerLink& link);
  bool on_message(PeerLink& link, const Message& message);
  bool on_hello(PeerLink& link, const Message& message);
  void settle(PeerLink& link);  // after its queue has changed
  void end(PeerLink& link, const std::string& reason);
  void remove(PeerLink& link);
  void let_go(GroupRank rank);
  void lose(GroupRank rank, const std::string& reason);
  void hang_up_on_strangers();
  void look_whether_stopped(bool late);

  Loop& loop_;
  const int namespace_fd_;
  PeerListener& events_;
  Descriptor listener_;
  Address address_;
  std::optional<Group> group_;
  std::vector<Address> addresses_;
  std::unordered_map<int, std::unique_ptr<PeerLink>> links_;
  std::vector<PeerLink*> outgoing_;  // by rank
  std::vector<bool> lost_;           // or has said goodbye
  bool stopped_ = false;             // but what is queued may still go out
  PeerCounters counters_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool silent_ = false;  // nothing is open any more
};

}  // namespace offcore::mcast
