// Packets through a fat-tree in virtual time: first come, first served at every link, replicated
// (multicast) or combined (reduction) in switches. One thread, deterministic: equal times are
// served in the order in which they were made.
//
// A link is a number: when it is free again. So a packet costs one event a hop, and none on its
// last: a schedule hears of datagrams ahead of their time, and asks for a timer where it must act.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <queue>
#include <unordered_map>
#include <vector>

#include "studies/fat_tree/topology.h"

namespace offcore::tree {

using Time = int64_t;  // picoseconds
inline constexpr Time kPerNs = 1000;

struct Wire {
  double gbitps = 56;           // 1e9 bits a second, of a link in each direction
  double hop_ns = 300;          // from a link's start to the next one's, packets of no length
  bool cut_through = true;      // a switch sends on what it has not yet wholly received
  int packet_bytes = 4096;      // payload of one packet
  int segment_bytes = 0;        // simulated as one (0: packet_bytes); headers count for each packet
  int datagram_header = 0;      // bytes on the wire beside the payload of a multicast packet
  int stream_header = 0;        // the same of a unicast packet
  int ack_bytes = 0;            // sent back for unicast packets, counted and taken to cost no time
  int ack_packets = 2;          // how many of them one acknowledges
  double datagram_send_ns = 0;  // a host's work for each datagram it sends
  double datagram_recv_ns = 0;  // a receive worker's for each datagram
  int recv_workers = 1;         // a host's: packets are sent to them in turn
  double message_ns = 0;        // a host's work before a unicast message leaves
};

class Schedule;

enum class TreeMessageKind : uint8_t { unicast, multicast, reduce };

struct TreeMessage {
  Schedule* owner = nullptr;
  TreeMessageKind kind = TreeMessageKind::unicast;
  int src = 0;
  int dst = 0;  // multicast: the group
  int tag = 0;  // the schedule's
  int part = 0;
  int64_t bytes = 0;
};

// What runs on the hosts: one object for all of them.
class Schedule {
 public:
  virtual ~Schedule() = default;
  virtual void start() = 0;
  virtual void sent(const TreeMessage&, Time) {}  // its last packet has left the host
  virtual void arrived(int /*host*/, const TreeMessage&, Time) {}
  // Told ahead: `when` is not before now.
  virtual void datagram(int /*host*/, const TreeMessage&, int /*packet*/, Time /*when*/) {}
  virtual void timer(int /*host*/, int /*tag*/, Time) {}

  int lane = 0;  // hosts send packets of their lanes in turn
};

struct LinkCount {
  int64_t bytes = 0;
  int64_t packets = 0;
  int64_t queue_bytes_max = 0;
};

class Fabric {
 public:
  Fabric(const TreeShape& shape, const Wire& wire, int lanes);

  void send(const TreeMessage& message, Time now);
  void at(Time when, Schedule& schedule, int host, int tag);
  void run(const std::vector<Schedule*>& schedules);

  const FatTree& tree() const { return tree_; }
  const Wire& wire() const { return wire_; }
  const std::vector<LinkCount>& links() const { return links_; }
  int64_t events() const { return events_; }
  int segment_bytes() const { return segment_bytes_; }
  int packets_of(int64_t bytes) const;
  Time wire_time(int64_t bytes) const { return static_cast<Time>(double(bytes) * ps_per_byte_); }

 private:
  enum class LinkEventKind : uint8_t { ready, inject, hop, arrive, timer };
  struct LinkEvent {
    Time when;
    int64_t order;
    LinkEventKind what;
    int place;    // the host; of a hop how many links lie behind (unicast), else the last of them
    int message;  // the flight; of a timer its tag
    int packet;
    Schedule* schedule;
    bool operator>(const LinkEvent& other) const {
      return when != other.when ? when > other.when : order > other.order;
    }
  };
  struct MessageInFlight {
    TreeMessage message;
    Route route;
    int packets = 0;
    int injected = 0;
    int arrived = 0;
    int uses = 0;  // events that name it
  };
  struct Nic {
    std::vector<std::deque<int>> lanes;
    std::size_t turn = 0;
    int leaving = -1;  // a flight whose last packet is on its way out
    bool busy = false;
  };

  void post(Time when, LinkEventKind what, int place, int message, int packet);
  void handle(const LinkEvent& event);
  void enqueue(int message, Time now);
  void inject(int host, Time now);
  void unicast(int message, int packet, int hops, Time now);
  void multicast(int message, int packet, int link, Time now);
  void reduce(int message, int packet, int link, Time now);
  struct Junction {
    uint64_t place;  // which switch
    int inputs;      // from how many links contributions come
    int output;      // the link that their sum takes
  };
  Junction junction(int link, int dst) const;
  void to_hosts(int message, int packet, int leaf, int except, Time now);
  void to_leaves(int message, int packet, int pod, int except, Time now);
  void forward(int message, int packet, int link, Time now);
  struct Passage {
    Time next, tail;
  };
  Passage pass(int link, int64_t bytes, int64_t packets, Time now);
  int64_t payload(const MessageInFlight& flight, int packet) const;
  int64_t wire_packets(int64_t payload) const;
  int64_t wire_bytes(const MessageInFlight& flight, int packet) const;
  void drop(int message);

  FatTree tree_;
  Wire wire_;
  int segment_bytes_;
  double ps_per_byte_;
  Time hop_time_;
  std::vector<Time> free_;
  std::vector<LinkCount> links_;
  std::vector<Nic> nics_;
  std::vector<Time> worker_free_;
  std::vector<MessageInFlight> flights_;
  std::vector<int> unused_;
  std::unordered_map<uint64_t, int> combined_;
  std::priority_queue<LinkEvent, std::vector<LinkEvent>, std::greater<>> events_due_;
  int64_t order_ = 0, events_ = 0;
};

}  // namespace offcore::tree
