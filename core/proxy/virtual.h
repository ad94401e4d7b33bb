// Requests in virtual time, where a backend has it (sim). Simulated threads of GPUs push by the
// calls of ring.h into rings as kernels do, and engines answer by a machine's costs. One object has
// the rings, the engines and the threads of all ranks; nothing is concurrent, and the same calls
// give the same times.
//
//   proxy   a thread of the host takes all that has come (take_ns each), makes one copy of what
//           continues another, and submits a call a peer: control_ns and doorbell_ns, and copy_ns
//           for each further copy of it. Of an idle queue the engine wakes (wake_ns); it fetches
//           copy by copy (fetch_ns), and has `overlap` of a submission's under way at once,
//           setup_ns before the first byte of each. The words behind them are seen sync_ns later,
//           and hold nothing up.
//   armed   each request lies in its peer's queue already, which waits for the thread's word
//           (poll_ns). That the host parks later ones in time is assumed.
//   stores  the host's thread copies by itself, one request after the other, at store_gbps.
//   device  an external engine, one a rank, as paper 003's: it takes requests as they come,
//           device_overlap of them at once, reads across the link (device_trip_ns) and writes at
//           device_gbps, which is less than the link's by what the reads take of it. Half a trip
//           brings a request to it, and a word from it. It merges nothing.
//
// A thread's push takes it push_ns, alone or with the other lanes of a warp, and reach_ns later the
// host has it. A thread sees a word see_ns after it was written. Half of a copy's bytes move as it
// begins, the rest as it ends: who does not wait for a signal reads old bytes.
#pragma once
#include <deque>
#include <string_view>

#include "core/proxy/decode.h"
#include "core/proxy/host_calls.h"
#include "core/proxy/virtual_events.h"

namespace offcore::proxy {

enum class VirtualEngine : uint8_t { proxy, armed, stores, device };

// Throws invalid for a name of none, or a schedule that this engine cannot have.
VirtualEngine virtual_engine(std::string_view name, bool scheduled);

class VirtualRequests;

enum class VirtualCallKind : uint8_t { push, wait, wait_sent, flush, work };

// What a thread asks for.
struct VirtualCall {
  VirtualCallKind kind = VirtualCallKind::work;
  std::shared_ptr<const VirtualRequests> of = {};          // whose port it is a call of
  Rank rank = 0;                                           // whose GPU the thread runs on
  std::function<PutTicket(const RequestPort&)> push = {};  // as ring.h has it
  unsigned words = 0;                                      // of the ring, that it pushes
  unsigned peer = 0;
  unsigned buffer = 0;
  Word count = 0;
  PutTicket ticket = {};
  Word limit_ns = 0;  // 0: the port's
  double work_ns = 0;
};

struct VirtualReply {
  std::vector<PutTicket> tickets;  // of pushes
  unsigned fault = kNone;          // of a wait
  double now_ns = 0;               // since the run began
};

// Its next call, or pushes of lanes that push together; nothing: the thread has ended.
using VirtualThread = std::function<std::vector<VirtualCall>(const VirtualReply&)>;

class VirtualRequests {
 public:
  VirtualRequests(Backend& backend, Rank ranks, std::vector<BufferPlace> buffers,
                  const ProxyOptions& options, VirtualEngine engine,
                  RequestProxy::Poisoned poisoned, std::shared_ptr<void> keep);

  const RequestPort& port(Rank rank) const { return ends_[rank]->port; }
  // Runs the threads, and what they push, to the end: ns until the last thread has ended. Throws
  // invalid (calls that no thread can make; within a run), and what a thread throws: then the
  // engines have ended.
  double run(std::vector<VirtualThread> threads);
  // As RequestProxy has them; nothing has to be waited for.
  void check(Rank rank);
  void drain(Rank rank) const { check_engine(rank); }
  void stop(Rank rank);
  const ProxyStats& stats(Rank rank) const { return ends_[rank]->stats; }

 private:
  struct VirtualBatch {  // of copies, with the words behind them
    std::vector<RequestCopy> copies;
    std::vector<std::pair<unsigned, uint64_t>> signals;  // buffers, and their counts
    Word position = 0;                                   // `sent` then; 0: it tells nothing
  };
  struct VirtualRequest {  // of an external engine
    bool done = false;
    bool signals = false;
    unsigned dst = 0;
    uint64_t count = 0;
    Word position = 0;
  };
  struct VirtualQueue {
    std::vector<DecodedRequest> copies;  // that wait, merged
    std::array<uint64_t, kBuffersMax> signals{};
    uint64_t signalled = 0;
    Word position = 0;
    uint64_t waiting = 0;                         // requests
    std::vector<DecodedRequest> planned;          // armed
    uint64_t parked = 0;                          // armed: that were started
    std::deque<VirtualBatch> batches;             // submitted
    bool active = false;                          // the first of them is being carried out
    size_t next = 0;                              // of its copies
    uint32_t running = 0;                         // likewise
    double fetched_ns = 0;                        // when the engine has the next one
    std::deque<VirtualRequest> outstanding = {};  // device
  };
  struct VirtualWaiter {
    uint32_t thread;
    const Word* word;
    Word count;
    Rank peer;  // whose fault ends the wait, too
    uint64_t number;
  };
  struct VirtualPush {  // a push that waits for room
    uint32_t thread;
    std::vector<VirtualCall> calls;
    uint64_t number;
  };
  // All of one rank: its memory, its engine, and who waits there.
  struct VirtualEnd {
    std::vector<Word> slots, received, schedule;
    Word tail = 0, head = 0, taken = 0, fault_here = 0;
    std::array<Word, kRanksMax> sent{}, fault{}, start{};
    std::array<unsigned, 16> complaints{};
    RequestPort port{};
    std::optional<RequestReader<HostWords>> reader;
    std::vector<VirtualQueue> queues;
    Word visible = 0;    // words that have reached the engine
    Word refreshed = 0;  // the replica of the head, as it was sent
    uint64_t waiting = 0;
    bool busy = false;  // the host's thread
    Rank turn = 0;      // whose queue is looked at next
    uint32_t in_flight = 0;
    double issue_ns = 0;  // device: when it may begin the next
    bool issuing = false;
    bool ended = false;
    bool late = false;
    std::optional<Error> error;
    ProxyStats stats;
    std::vector<VirtualWaiter> waiters;
    std::deque<VirtualPush> full;  // in the order in which they get their places
  };
  struct VirtualRunner {
    VirtualThread next;
    uint64_t waits = 0;  // the number of its wait; 0: it goes on
  };

  void lay(Rank rank);
  // virtual.cpp: threads
  void step(uint32_t thread, const VirtualReply& reply);
  void resume(uint32_t thread, double ns, VirtualReply reply);
  void push(uint32_t thread, std::vector<VirtualCall> calls);
  bool fits(const VirtualEnd& end, const std::vector<VirtualCall>& calls) const;
  void pushed(uint32_t thread, const std::vector<VirtualCall>& calls);
  void give_up(uint32_t thread, Rank rank, uint64_t number);
  void wait(uint32_t thread, const VirtualCall& call);
  void await(uint32_t thread, Rank rank, const VirtualWaiter& waiter, Word limit_ns);
  unsigned fault_of(const VirtualEnd& end, Rank peer) const;
  void look(Rank rank);
  void complain(Rank rank);
  void end(Rank rank, PortFault fault, std::optional<Error> error);
  void end_all(PortFault fault, const std::optional<Error>& error);
  void check_engine(Rank rank) const;

  // virtual_engines.cpp
  double reach_ns() const;
  void arrived(Rank rank, Word words);
  bool accept(Rank rank, DecodedRequest& request);
  void merge(VirtualQueue& queue, const DecodedRequest& request);
  void refresh(Rank rank);
  void turn(Rank rank);
  uint64_t take(Rank rank);
  VirtualBatch next_batch(Rank rank, Rank peer);
  void submit(Rank rank, Rank peer);
  void store(Rank rank, Rank peer, std::shared_ptr<VirtualBatch> batch, size_t index);
  void gate(Rank rank, Rank peer, uint64_t started);
  void begin(Rank rank, Rank peer, double ns);
  void start_copies(Rank rank, Rank peer);
  void tell(Rank rank, Rank peer, const VirtualBatch& batch);
  void issue(Rank rank);
  void retire(Rank rank, Rank peer);
  void move(const RequestCopy& copy, bool second) const;
  void copy(Rank dst, Rank src, uint32_t engine, double gbps, const RequestCopy& what,
            VirtualEvents::Act ended);

  const Machine machine_;
  const RequestCosts& cost_;
  VirtualTime& time_;
  const Rank ranks_;
  const std::vector<BufferPlace> buffers_;
  const ProxyOptions options_;
  const VirtualEngine engine_;
  const RequestProxy::Poisoned poisoned_;
  const std::shared_ptr<void> keep_;
  const bool phantom_;
  VirtualEvents events_;
  std::vector<std::unique_ptr<VirtualEnd>> ends_;  // by rank
  std::vector<VirtualRunner> threads_;
  uint64_t waits_ = 0;  // so far
  double began_ns_ = 0;
  double ended_ns_ = 0;  // the last thread
  bool running_ = false;
};

}  // namespace offcore::proxy
