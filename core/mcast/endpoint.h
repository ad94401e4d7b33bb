// One rank of one communicator: the protocol as a state machine (the paper's sections III and IV).
//
// Operations run one after the other, in the order in which they were submitted, which is the same
// at all ranks. Each goes through: barrier (recursive doubling: every receiver is armed before a
// root sends), multicast (roots send by chains; leaves count chunks until all are there or the
// cutoff timer fires), recovery (the fetch ring), handshake (`final` to the left neighbour, and from
// the right one). The first error ends the communicator: every operation fails with it, peers are
// told, and nothing can be submitted any more.
//
// Time comes in as `now_ns`, any clock that never goes back. What it does goes out through Transport.
#pragma once
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/mcast/operation.h"
#include "core/mcast/receiver.h"
#include "core/mcast/transport.h"

namespace offcore::mcast {

inline constexpr int64_t kNever = INT64_MAX;

// Since the beginning, of all operations.
struct Counters {
  ReceiverCounters received;
  Report sum;  // of the reports of operations that ended well
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
  std::shared_ptr<Operation> submit(
      Request request);  // throws what ended the communicator; invalid
  Receiver& receiver(uint32_t subgroup) { return *receivers_[subgroup]; }
  Counters counters() const;
  void close();                            // soon; operations that have not ended fail as cancelled
  bool closed() const { return closed_; }  // nothing is left to do

  // Control thread.
  void on_message(Rank from, const Message& message, int64_t now_ns);
  // A reply's header has come: where its payload_bytes go. Empty: to be read and dropped. Once they
  // are there, on_message is called with the same reply.
  std::span<std::byte> place_of(Rank from, const Message& reply);
  void on_sent(const Part& part, int64_t now_ns);
  void on_peer_lost(Rank rank, const std::string& reason, int64_t now_ns);
  void on_time(int64_t now_ns);  // next_time has come, or wake() was called
  int64_t next_time() const;     // kNever: only when something comes
};

}  // namespace offcore::mcast
