// One rank of one communicator: the protocol as a state machine (the paper's sections III and IV).
//
// Operations of a sequence (gathers: broadcasts and all-gathers; reductions) run one after the
// other, in the order in which they were submitted, which is the same at all ranks; the sequences
// run beside each other. A gather goes through: barrier (recursive doubling: every receiver is
// armed before a root sends), multicast (roots send by chains; leaves count chunks until all are
// there or the cutoff timer fires), recovery (the fetch ring), handshake (`final` to the left
// neighbour, and from the right one). A reduce-scatter goes through barrier and exchange
// (share_exchange.h). The first error ends the communicator: every operation fails with it, peers
// are told, and nothing can be submitted any more.
//
// Time comes in as `now_ns`, of any clock that never goes back. What it does goes out through
// Transport.
#pragma once
#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/mcast/barrier.h"
#include "core/mcast/fetch_ring.h"
#include "core/mcast/operation.h"
#include "core/mcast/receiver.h"
#include "core/mcast/share_exchange.h"
#include "core/mcast/transport.h"

namespace offcore::mcast {

inline constexpr int64_t kNever = INT64_MAX;

// Since the beginning, of all operations.
struct EndpointCounters {
  ReceiverCounters received;
  OperationReport sum;  // of the reports of operations that ended well
  uint64_t operations = 0;
  uint64_t failed = 0;
  uint64_t sent_datagrams = 0;
  uint64_t sent_bytes = 0;     // of chunks, each counted once however many receive it
  uint64_t served_chunks = 0;  // to the right neighbour
  uint64_t messages = 0;       // control messages sent
  uint64_t refused_messages = 0;
  uint64_t state_bytes = 0;  // of bitmaps, at most
};

class Endpoint {
 public:
  Endpoint(const Group& group, Transport& transport);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // Any thread.
  const Group& group() const { return group_; }
  // Throws invalid, and what ended the communicator.
  std::shared_ptr<Operation> submit(OperationRequest request);
  Receiver& receiver(uint32_t subgroup) { return *receivers_[subgroup]; }
  EndpointCounters counters() const;
  void close();                            // soon; operations that have not ended fail as cancelled
  bool closed() const { return closed_; }  // nothing is left to do

  // Control thread.
  void on_message(GroupRank from, const Message& message, int64_t now_ns);
  // A reply's or share's header has come: where its payload_bytes go. Empty: to be read and
  // dropped. Once they are there, on_message is called with the same message; if they were dropped,
  // with 0 of them.
  std::span<std::byte> place_of(GroupRank from, const Message& reply);
  void on_sent(const BlockPart& part, int64_t now_ns);
  void on_peer_lost(GroupRank rank, const std::string& reason, int64_t now_ns);
  void on_time(int64_t now_ns);  // next_time has come, or wake() was called
  int64_t next_time() const;     // kNever: only when something comes

 private:
  struct Running {  // the operation of a sequence that runs
    std::shared_ptr<Operation> operation;
    std::shared_ptr<const BlockLayout> layout;
    std::byte* out = nullptr;
    Phase phase = Phase::barrier;
    size_t step = 0;  // of the barrier
    bool step_sent = false;
    int64_t began_ns = 0;
    int64_t phase_ns = 0;  // when the phase began
    OperationReport report;
    // Of a gather.
    bool turn = false;  // this rank may send its block
    uint32_t parts_sending = 0;
    bool sent = false;  // its block is out
    bool final_heard = false;
    int64_t cutoff_ns = kNever;
    int64_t looked_ns = kNever;  // when `looked_taken` was
    uint64_t looked_taken = 0;
    bool settling = false;  // every chain's last chunk has come
  };

  // Control thread, but for the queue.
  struct SequenceState {
    SequenceState(Sequence of, const Group& group);

    const Sequence sequence;
    Barrier barrier;
    uint64_t op;  // number of the running operation, or of the next
    std::optional<Running> running;
    std::optional<GroupRank> watched;
    int64_t looked_round_ns = 0;  // when it was last seen to that
    int64_t watched_ns = 0;       // since when
    int64_t probe_wait_ns = 0;
    int64_t probe_ns = kNever;                     // when to ask next
    std::deque<std::shared_ptr<Operation>> queue;  // under mutex_
  };

  // What happened is noted; these draw the conclusions.
  void progress(int64_t now_ns);
  void advance(SequenceState& state, int64_t now_ns);
  void begin_next(SequenceState& state, int64_t now_ns);
  void begin_gather();
  bool run_barrier(SequenceState& state, int64_t now_ns);
  void run_exchange(int64_t now_ns);
  void run_gather(int64_t now_ns);
  void begin_multicast(int64_t now_ns);
  void run_multicast(int64_t now_ns);
  void run_recovery(int64_t now_ns);
  void run_handshake(int64_t now_ns);
  void send_block();
  void enter(SequenceState& state, Phase phase, int64_t now_ns);
  bool still_comes(uint64_t taken, int64_t now_ns) const;
  Receiver::ReceiverState received() const;  // by all receivers
  void finish(SequenceState& state, int64_t now_ns);

  bool on_gather(GroupRank from, const Message& message);     // false: refused
  bool on_reduction(GroupRank from, const Message& message);  // likewise
  void on_abort(GroupRank from, const Message& message);

  // Who is waited for now, if it is one rank.
  std::optional<GroupRank> awaited(const SequenceState& state) const;
  void watch(SequenceState& state, int64_t now_ns);
  void check_times(SequenceState& state, int64_t now_ns);
  std::string state_text(const SequenceState& state) const;

  void send(GroupRank to, const Message& message);
  void fail_with(Code code, const std::string& text, GroupRank blamed,
                 Sequence sequence = Sequence::gathers);
  void leave(MessageKind kind, uint32_t detail, GroupRank blamed, Sequence sequence);
  SequenceState& of(Sequence sequence) { return states_[static_cast<size_t>(sequence)]; }
  std::optional<std::string> gone(GroupRank rank) const;
  GroupRank left() const { return (group_.rank + group_.ranks - 1) % group_.ranks; }
  GroupRank right() const { return (group_.rank + 1) % group_.ranks; }

  const Group group_;
  Transport& transport_;
  std::vector<std::unique_ptr<Receiver>> receivers_;
  std::vector<GroupRank> partners_;  // that this rank talks to: told of failures

  // Control thread.
  std::array<SequenceState, kSequences> states_;
  SequenceState& gathers_ = of(Sequence::gathers);
  SequenceState& reductions_ = of(Sequence::reductions);
  FetchRing ring_;
  ShareExchange exchange_;
  std::vector<std::string> gone_;  // why, by rank; empty: it is there
  std::vector<int64_t> heard_ns_;  // last word, by rank

  mutable std::mutex mutex_;    // of what follows, and of the queues
  std::optional<Error> error_;  // what ended the communicator
  bool closing_ = false;
  EndpointCounters counters_;
  std::atomic<bool> closed_ = false;
};

}  // namespace offcore::mcast
