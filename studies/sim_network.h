// A lossy network in memory: any number of endpoints in virtual time on one thread, for tests and
// for trying the protocol against what a real network does once a month.
//
// Everything is drawn from a seed, so a run repeats exactly. A datagram leaves its root at link
// speed and reaches each other rank after a latency of its own, or not at all; a receiver may have
// a finite queue that it drains slowly. What was delivered together is handed over as one buffer,
// as GRO does. Messages are reliable and keep their order, but a cut holds them up and death drops
// them.
#pragma once
#include <map>
#include <memory>
#include <queue>
#include <set>
#include <tuple>
#include <vector>

#include "core/mcast/endpoint.h"

namespace offcore::mcast {

struct Faults {
  uint64_t seed = 1;
  double loss = 0;         // of a datagram at a receiver
  double burst_begin = 0;  // chance, a datagram, that a receiver's burst of losses begins
  double burst_end = 0.2;  // chance, a datagram, that it ends
  double duplicate = 0;    // chance that a datagram comes twice
  double reorder = 0;      // chance that a datagram takes reorder_ns more
  int64_t reorder_ns = 50'000;
  int64_t latency_ns = 5'000;
  int64_t jitter_ns = 0;       // up to so much more, each datagram by itself
  int64_t gather_ns = 3'000;   // a receiver hands over what has come in this time
  uint64_t queue_bytes = 0;    // of a slow receiver; 0: nobody is slow
  double drain_bytes_s = 1e8;  // by a slow receiver
  uint32_t together = 8;       // datagrams handed over as one buffer, at most
  double scatter = 0.5;        // chance that a buffer is received scattered
};

class SimNetwork {
 public:
  // A communicator for each group, which is every rank's but for its rank. They share the network,
  // and their datagrams reach each other's receivers.
  SimNetwork(std::vector<Group> groups, const Faults& faults);
  ~SimNetwork();
  SimNetwork(const SimNetwork&) = delete;
  SimNetwork& operator=(const SimNetwork&) = delete;

  Endpoint& endpoint(GroupRank rank, size_t communicator) {
    return *host(rank, communicator).endpoint;
  }
  int64_t now_ns() const { return now_ns_; }

  // Chosen faults.
  void drop(GroupRank receiver, GroupRank source, uint32_t psn);  // once
  void slow(GroupRank rank) { host(rank, 0).slow = true; }        // at communicator 0
  // No datagram, and no message where `reliable_too`, passes between two sides in this time.
  void cut(const std::set<GroupRank>& side, int64_t from_ns, int64_t until_ns, bool reliable_too);
  // The rank does nothing more after so many calls of its endpoint of communicator 0. Peers are
  // told `told_ns` later; negative: never.
  void kill(GroupRank rank, uint64_t after_calls, int64_t told_ns);
  bool dead(GroupRank rank) const { return host(rank, 0).dead; }
  uint64_t calls(GroupRank rank) const { return host(rank, 0).calls; }

  // A stranger's: reaches a rank's communicator 0 now.
  void inject(GroupRank to, uint32_t subgroup, std::span<const std::byte> bytes,
              uint32_t segment_bytes);
  void inject(GroupRank to, GroupRank from, const Message& message);

  // Runs until nothing is left to do or this time has come. False: something is left.
  bool run_until(int64_t until_ns);

 private:
  struct NetworkHost;
  struct Sending {
    BlockPart part;
    uint32_t index = 0;
  };
  struct NetworkDatagram {
    uint32_t subgroup = 0;
    std::vector<std::byte> bytes;
  };
  using Shared = std::shared_ptr<const NetworkDatagram>;
  struct Cut {
    std::set<GroupRank> side;
    int64_t from_ns, until_ns;
    bool reliable_too;
  };
  struct NetworkEvent {
    int64_t at_ns;
    uint64_t number;  // those of one time keep their order
    NetworkHost* host;
    std::function<void(NetworkHost&)> run;
    bool operator>(const NetworkEvent& other) const {
      return std::tie(at_ns, number) > std::tie(other.at_ns, other.number);
    }
  };

  struct NetworkHost : Transport {
    NetworkHost(SimNetwork& network, const Group& group, size_t communicator);
    ~NetworkHost() override { endpoint.reset(); }  // it says goodbye by way of the rest
    void send(GroupRank to, const Message& message) override;
    void send(GroupRank to, const Message& reply, std::span<const std::byte> data) override;
    bool holds_data(GroupRank, Sequence) const override { return false; }  // it is copied
    void multicast(const BlockPart& part) override;
    void wake() override;
    void stop() override;

    SimNetwork& network;
    const Group group;
    const size_t communicator;
    const GroupRank rank;
    std::unique_ptr<Endpoint> endpoint;
    bool slow = false, dead = false, stopped = false, woken = false, burst = false;
    bool draining = false;
    uint64_t calls = 0, kill_after = UINT64_MAX;
    int64_t told_ns = -1;
    int64_t timer_ns = kNever;  // what is in the queue of events
    std::queue<Sending> sending;
    std::queue<Shared> arrived;  // and not handed over
    uint64_t arrived_bytes = 0;
    std::vector<int64_t> last_ns;  // when the last message to each rank arrives
  };

  NetworkHost& host(GroupRank rank, size_t communicator) const;
  void at(int64_t at_ns, NetworkHost& host, std::function<void(NetworkHost&)> run);
  void after_call(NetworkHost& node);
  void send_next(NetworkHost& node);
  void deliver(NetworkHost& from, NetworkHost& to, const Shared& datagram);
  void arrive(NetworkHost& to, const Shared& datagram);
  void drain(NetworkHost& node);
  void hand_over(NetworkHost& host, uint32_t subgroup, std::span<const std::byte> buffer,
                 uint32_t segment);
  int64_t drain_ns(const NetworkHost& node, uint64_t bytes) const;
  void carry(NetworkHost& from, GroupRank to, const Message& message, std::vector<std::byte> data);
  int64_t opens_ns(GroupRank a, GroupRank b,
                   bool reliable) const;  // when a cut between them ends; or now
  double chance();

  const GroupRank ranks_;
  const Faults faults_;
  std::vector<std::unique_ptr<NetworkHost>> hosts_;
  std::priority_queue<NetworkEvent, std::vector<NetworkEvent>, std::greater<>> events_;
  uint64_t events_made_ = 0;
  int64_t now_ns_ = 0;
  uint64_t random_;
  std::set<std::tuple<GroupRank, GroupRank, uint32_t>> drops_;
  std::vector<Cut> cuts_;
};

}  // namespace offcore::mcast
