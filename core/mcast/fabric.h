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

class Fabric {
 public:
  // A communicator for each group, which is every rank's but for its rank. They share the network,
  // and their datagrams reach each other's receivers.
  Fabric(std::vector<Group> groups, const Faults& faults);
  ~Fabric();
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  Endpoint& endpoint(Rank rank, size_t communicator) {
    return *station(rank, communicator).endpoint;
  }
  int64_t now_ns() const { return now_ns_; }

  // Chosen faults.
  void drop(Rank receiver, Rank source, uint32_t psn);    // once
  void slow(Rank rank) { station(rank, 0).slow = true; }  // at communicator 0
  // No datagram, and no message where `reliable_too`, passes between two sides in this time.
  void cut(const std::set<Rank>& side, int64_t from_ns, int64_t until_ns, bool reliable_too);
  // The rank does nothing more after so many calls of its endpoint of communicator 0. Peers are
  // told `told_ns` later; negative: never.
  void kill(Rank rank, uint64_t after_calls, int64_t told_ns);
  bool dead(Rank rank) const { return station(rank, 0).dead; }
  uint64_t calls(Rank rank) const { return station(rank, 0).calls; }

  // A stranger's: reaches a rank's communicator 0 now.
  void inject(Rank to, uint32_t subgroup, std::span<const std::byte> bytes, uint32_t segment_bytes);
  void inject(Rank to, Rank from, const Message& message);

  // Runs until nothing is left to do or this time has come. False: something is left.
  bool run_until(int64_t until_ns);

 private:
  struct Station;
  struct Sending {
    Part part;
    uint32_t index = 0;
  };
  struct Datagram {
    uint32_t subgroup = 0;
    std::vector<std::byte> bytes;
  };
  using Shared = std::shared_ptr<const Datagram>;
  struct Cut {
    std::set<Rank> side;
    int64_t from_ns, until_ns;
    bool reliable_too;
  };
  struct Event {
    int64_t at_ns;
    uint64_t number;  // those of one time keep their order
    Station* station;
    std::function<void(Station&)> run;
    bool operator>(const Event& other) const {
      return std::tie(at_ns, number) > std::tie(other.at_ns, other.number);
    }
  };

  struct Station : Transport {
    Station(Fabric& fabric, const Group& group, size_t communicator);
    ~Station() override { endpoint.reset(); }  // it says goodbye by way of the rest
    void send(Rank to, const Message& message) override;
    void send(Rank to, const Message& reply, std::span<const std::byte> data) override;
    bool holds_data(Rank) const override { return false; }  // it is copied
    void multicast(const Part& part) override;
    void wake() override;
    void stop() override;

    Fabric& fabric;
    const Group group;
    const size_t communicator;
    const Rank rank;
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

  Station& station(Rank rank, size_t communicator) const;
  void at(int64_t at_ns, Station& station, std::function<void(Station&)> run);
  void after_call(Station& node);
  void send_next(Station& node);
  void deliver(Station& from, Station& to, const Shared& datagram);
  void arrive(Station& to, const Shared& datagram);
  void drain(Station& node);
  void hand_over(Station& station, uint32_t subgroup, std::span<const std::byte> buffer,
                 uint32_t segment);
  int64_t drain_ns(const Station& node, uint64_t bytes) const;
  void carry(Station& from, Rank to, const Message& message, std::vector<std::byte> data);
  int64_t opens_ns(Rank a, Rank b, bool reliable) const;  // when a cut between them ends; or now
  double chance();

  const Rank ranks_;
  const Faults faults_;
  std::vector<std::unique_ptr<Station>> stations_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  uint64_t events_made_ = 0;
  int64_t now_ns_ = 0;
  uint64_t random_;
  std::set<std::tuple<Rank, Rank, uint32_t>> drops_;
  std::vector<Cut> cuts_;
};

}  // namespace offcore::mcast
