// The thread that answers the requests of one local rank's kernels (ring.h): it takes all that have
// come, makes one copy of what continues another, and submits a batch a peer to the backend's
// RequestEngine, with the words that tell of it behind: the peer's `received` and this rank's
// `sent`. It never waits for a copy.
//
// It allocates nothing in a driver, takes no lock of others' and calls nothing that waits for a
// device: a kernel may be waiting for it, and everything else for that kernel.
//
// With a schedule (armed) it submits what will be asked for: each of a peer's requests is parked in
// the peer's queue behind a count in the rank's own memory, which the kernel raises. So no host is
// between the kernel and the copy, and the thread parks what comes rounds later.
//
// However it ends, producers and waiting kernels of this rank and of its peers are told: `fault` of
// this rank becomes other than kNone everywhere, and the ring takes nothing more.
#pragma once
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/backend/backend.h"
#include "core/base/fork.h"
#include "core/proxy/ring.h"
#include "core/window/window.h"

namespace offcore::proxy {

// The same place on every rank.
struct BufferPlace {
  std::shared_ptr<Window> window;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// A request that a kernel will push. Requests for one peer come in this order, again and again.
struct PlannedRequest {
  RequestOp op = kPutSignal;  // no kPutBytes
  Rank peer = 0;
  uint32_t dst = 0;
  uint32_t src = 0;
  uint64_t chunk = 0;
  uint64_t chunks = 0;
};
using Schedule = std::vector<std::vector<PlannedRequest>>;  // by rank

struct ProxyOptions {
  uint64_t chunk_bytes = 0;  // a power of two, from 16; 0: the smallest that all buffers allow
  uint32_t slots = 65536;    // of the ring: a power of two
  double limit_s = 10;       // of a kernel's wait that names none
  double spin_s = -1;        // that the thread spins without requests; below 0: by the cores
  Schedule schedule = {};    // empty: requests come as they like
  bool exchanges = false;    // exchange() is called
};

// What all ranks have to agree about. Throws invalid past the limits of a request's fields.
ProxyOptions settled(ProxyOptions options, const std::vector<BufferPlace>& buffers, Rank ranks);

// Of memory that each rank has in a window: what engines write, and the port itself.
uint64_t control_bytes(Rank ranks, const Schedule& schedule);

// An all-to-all whose counts lie in memory of the rank's own processor.
struct ExchangeCall {
  const void* counts = nullptr;  // `unit_bytes` each, for each rank
  void* received = nullptr;      // from each rank; null: nobody asks
  bool wide = true;              // counts have 64 bits, not 32
  uint64_t unit_bytes = 1;
  uint32_t dst = 0;  // buffers
  uint32_t src = 0;
  uintptr_t stream = 0;  // the caller's; 0: the engine's own
};

// What one or two words ask for.
struct DecodedRequest {
  unsigned op;
  Rank peer;
  unsigned dst;
  unsigned src;
  RequestCopy copy;
  bool signals() const { return op == kPutSignal || op == kSignal || op == kPutBytesSignal; }
};

struct ProxyStats {
  uint64_t requests = 0;
  uint64_t signals = 0;
  uint64_t copies = 0;   // that were submitted: fewer than requests where some were merged
  uint64_t batches = 0;  // submissions
  uint64_t bytes = 0;
};

class RequestProxy : public OfProcess {
 public:
  // The rank that died or aborted, and 1; 0: none has.
  using Poisoned = std::function<uint32_t()>;

  // `control`: control_bytes() on every rank, all zero. `keep` outlives the engine. Throws
  // unsupported where the backend has no engine for requests.
  RequestProxy(Backend& backend, Rank rank, std::shared_ptr<Window> control,
               std::vector<BufferPlace> buffers, const ProxyOptions& options, Poisoned poisoned,
               std::shared_ptr<void> keep);
  ~RequestProxy();  // as stop(), and for good where an engine does not end

  Rank rank() const { return rank_; }
  const RequestPort& port() const { return port_; }
  bool host_visible() const { return control_->host_visible(); }
  // Where the port lies in memory that the rank's kernels reach.
  std::byte* port_address() const;

  // Waits until all that was pushed has ended. Throws timeout, and as check().
  void drain(const Deadline& deadline);
  // Answers what was pushed, then ends, and wakes who waits. Once; throws timeout or driver.
  void stop(const Deadline& deadline);
  // Throws what has ended the engine (invalid, timeout, peer, driver), or a kernel's wait that ran
  // past its limit, once.
  void check();
  ProxyStats stats() const;

  // Begins one, in the stream's order; its number. Every rank makes the same calls.
  uint64_t exchange(const ExchangeCall& call);
  bool exchanged(uint64_t call) const;
  // Throws timeout, invalid (what was to be sent has no room; then nothing was), and as check().
  void wait_exchange(uint64_t call, const Deadline& deadline);

 private:
  struct PeerQueue {
    std::vector<RequestCopy> copies;
    std::array<uint64_t, kBuffersMax> signals{};  // so far, by buffer
    uint64_t signalled = 0;                       // buffers whose count has grown, a bit each
    Word position = 0;                            // behind the last request for the peer
    uint64_t waiting = 0;                         // requests that are not submitted
    std::vector<DecodedRequest> planned;          // armed: a round
    uint64_t parked = 0;                          // armed: requests so far
  };

  std::byte* control(Rank rank, uint64_t offset) const;
  std::byte* at(uint32_t buffer) const {
    return buffers_[buffer].window->base(rank_) + buffers_[buffer].offset;
  }
  void lay_port();
  void lay_schedule();
  void run();
  void rest(int64_t idle_ns, int64_t spin_ns);
  bool turn();
  void accept(const Word (&words)[2]);
  bool park();
  void park(Rank peer, PeerQueue& queue);
  void recall();
  std::array<Word, kRanksMax> read_counts(uint64_t place) const;
  bool all_started_ended() const;
  void add_copy(PeerQueue& queue, Rank peer, const RequestCopy& copy);
  void submit(Rank peer, PeerQueue& queue);
  void look_around();
  bool complained(PortFault fault) const;
  void check_engine();
  void give_up_stop();
  void end(PortFault fault, std::optional<Error> error);
  bool all_done();
  ProxyStats parked_stats() const;

  const Rank rank_;
  const ProxyOptions options_;
  const std::vector<BufferPlace> buffers_;
  const std::shared_ptr<Window> control_;
  const Poisoned poisoned_;
  const std::shared_ptr<void> keep_;
  Share host_;  // slots, and words that the thread and producers share
  RequestPort port_{};
  std::unique_ptr<RequestEngine> engine_;
  RequestReader<struct HostWords> reader_;
  std::vector<PeerQueue> queues_;          // by peer
  uint64_t waiting_ = 0;                   // requests accepted and not submitted
  std::array<Word, kRanksMax> started_{};  // armed: by kernels, once all are recalled
  std::atomic<bool> recalled_{false};
  Word refreshed_ = 0;  // the replica of the head
  bool ended_ = false;  // the thread's own
  std::atomic<bool> stopping_{false};
  std::atomic<bool> asked_{false};     // somebody waits for `settled_`
  std::atomic<Word> settled_{0};       // all before it has ended
  std::atomic<uint64_t> counts_[5]{};  // as ProxyStats has them
  std::mutex mutex_;
  std::optional<Error> error_;  // guarded by the mutex
  bool late_ = false;           // likewise: a kernel's wait ran past its limit
  std::atomic<bool> over_{false};
  uint64_t exchanges_ = 0;  // so far
  bool exchange_broken_ = false;
  std::thread exchanger_;  // where kernels are threads of the host
  std::thread thread_;
};

}  // namespace offcore::proxy
