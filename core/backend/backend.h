// What a backend is: memory that ranks can map, and programs that can be loaded once and launched
// many times. A backend only lays out bits or calls the driver; it never plans.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/clock.h"
#include "core/base/descriptor.h"
#include "core/base/error.h"
#include "core/ir/program.h"
#include "core/machine/cost.h"
#include "core/machine/machine.h"

namespace offcore {

// How this process reaches memory that its CPUs cannot read and write in place.
class Port {
 public:
  virtual ~Port() = default;
  // Between the port's memory and this process's; done on return. Throws driver.
  virtual void copy(void* dst, const void* src, uint64_t bytes) const = 0;
  virtual int device() const = 0;  // the GPU, as the driver counts
};

// A local rank's memory that others have allocated (ForeignMemory). Keeps it allocated.
class HeldMemory {
 public:
  virtual ~HeldMemory() = default;
  virtual std::byte* address() const = 0;  // where its owner has it
  // Whether these bytes of the owner's addresses still lead to this memory.
  virtual bool intact(uint64_t offset, uint64_t bytes) const = 0;
  // What a peer needs to import it, besides a descriptor of each part.
  virtual std::string layout() const = 0;
  virtual uint32_t parts() const = 0;
  // Throws unsupported where its owner has not provided for that.
  virtual Descriptor export_part(uint32_t part) const = 0;
};

// One rank's memory that other ranks can map. Owns the descriptor; data is this process's mapping,
// null for phantom memory (sizes without bytes, for simulating gigabytes).
struct Share {
  Rank rank = 0;
  uint64_t bytes = 0;
  int fd = -1;  // what another process imports; -1 where ranks share a process
  std::byte* data = nullptr;
  std::shared_ptr<void> owner;                       // keeps fd and data alive
  std::shared_ptr<const Port> port = nullptr;        // to a local rank's memory; null: in place
  std::shared_ptr<const HeldMemory> held = nullptr;  // what others allocated, of a local rank

  // Between this memory and the process's; done on return.
  void copy(void* dst, const void* src, uint64_t count) const {
    if (port != nullptr) {
      port->copy(dst, src, count);
    } else {
      std::memcpy(dst, src, count);
    }
  }
};

// Flag words are spread so that no two share a cache line.
inline constexpr uint64_t kWordBytes = 64;

// What a rank sleeps on: in memory shared by all ranks, one for each rank. A signal to a word of
// the rank raises `count` where anybody sleeps, and wakes them; `poison` other than 0 makes every
// wait of the rank fail (rank + 1 of the one that died or aborted). `core` is a hint: where the
// rank's caller last waited (number + 1).
struct Wakeup {
  std::atomic<uint32_t> count;
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> poison;
  std::atomic<uint32_t> core;
  uint32_t reserved[12];
};
static_assert(sizeof(Wakeup) == 64 && std::atomic<uint32_t>::is_always_lock_free);

// Where a program's buffers lie for one launch, as seen by this process.
class Binding {
 public:
  Binding(size_t buffers, Rank ranks) : ranks_(ranks), bases_(buffers * (ranks + size_t{1})) {}
  size_t buffers() const { return bases_.size() / (ranks_ + size_t{1}); }
  // rank == kHostRank is the host's copy. Null: not mapped here, or phantom.
  std::byte*& base(BufferId buffer, Rank rank) {
    return bases_[buffer * (ranks_ + size_t{1}) + (rank == kHostRank ? ranks_ : rank)];
  }
  std::byte* base(BufferId buffer, Rank rank) const {
    return const_cast<Binding*>(this)->base(buffer, rank);
  }
  Rank ranks() const { return ranks_; }

  friend bool operator==(const Binding&, const Binding&) = default;

 private:
  Rank ranks_;
  std::vector<std::byte*> bases_;
};

class Mark;

struct Launch {
  Binding binding;
  uint32_t epoch = 0;            // flag values of this launch are epoch + the program's
  uint32_t lane = 0;             // launches of one lane run in order, rank by rank
  std::vector<Wakeup*> wakeups;  // one a rank
  // GPUs: the callers' streams (the driver's handles), a local rank each; 0 or none: the backend's.
  std::vector<uintptr_t> streams = {};
  // GPUs, with one local rank: another stream of the caller's; what it did so far comes first.
  uintptr_t behind = 0;
  // Strided copies between the host and a rank are made by the engine of the other direction, where
  // they can be (CrossedCopies).
  bool crossed = false;
  // Of a backend's own stream: goes into another one than the launch before it, so that the engine
  // may take what others have for it in between.
  bool gives_way = false;
  // Of this backend's streams: the program begins once it has passed. Null: at once.
  const Mark* after = nullptr;
  // Keeps the bound memory and the wakeups mapped until the run has ended; released on any thread.
  // Null: they outlive the backend.
  std::shared_ptr<void> owner = nullptr;
};

// How far the rows of crossed copies (Launch::crossed) lie apart, and what these may cost.
struct Reach {
  uint64_t step = 0;        // from row to row of a local rank's memory, at most
  uint64_t bytes = 0;       // of that memory, which the rows and one step more go over
  uint64_t host_bytes = 0;  // the same of the host's
  uint64_t room = 0;        // that may be taken of the host's memory
  uint64_t submit_ns = 0;   // that submitting one may take longer than others
};

// What made a copy within a rank's memory: an engine; several, of which some were spare; a request
// for one that the driver may have disregarded; or whatever the driver takes, which is SMs.
enum class OwnCopy : uint8_t { engine, engines, hint, sm };

inline std::string_view to_string(OwnCopy own) {
  constexpr std::string_view kNames[] = {"engine", "engines", "hint", "sm"};
  return kNames[static_cast<size_t>(own)];
}

struct CommandTime {
  uint32_t queue = 0;    // index into program.queues
  uint32_t command = 0;  // index into the queue's commands
  int64_t start_ns = 0;  // since the launch
  int64_t end_ns = 0;
  Phases phases;
};

// How a driver was told of data: the calls, and the copies that went in batches.
struct Calls {
  uint32_t batches = 0;
  uint32_t batched = 0;
  uint32_t plain = 0;
  uint32_t strided = 0;
  uint32_t crossed = 0;  // of these, by the engine of the other direction
  uint32_t kernels = 0;  // that copied instead of engines, where a caller has asked for that
  uint32_t packs = 0;    // kernels that copied paged buffers

  Calls& operator+=(const Calls& other) {
    batches += other.batches;
    batched += other.batched;
    plain += other.plain;
    strided += other.strided;
    crossed += other.crossed;
    kernels += other.kernels;
    packs += other.packs;
    return *this;
  }
};

struct Report {
  int64_t time_ns = 0;  // from the launch until the last local rank was complete
  Phases phases;        // along the path that finished last
  std::vector<CommandTime> commands;
  std::vector<int64_t> timestamps_ns;  // by the timestamp command's value; -1: never reached
  OwnCopy own_copy = OwnCopy::engine;  // the worst of all
  Calls calls;                         // none where no driver is told
  uint32_t sms = 0;                    // GPUs: that kernels of its own took
  bool native = true;                  // false: other commands did what this launch's cannot
  std::string_view way;  // sdma: what took the copies (sdma/submit_path.h); else empty
};

// One launch. Destroying a run that is not done lets it go on by itself until it ends, its rank is
// poisoned, or its backend is gone; its Launch::owner lives that long.
class Run {
 public:
  virtual ~Run() = default;
  virtual bool done() = 0;
  // Throws timeout, or peer when the rank was poisoned; both name, per queue, the command reached.
  virtual void wait(const Deadline& deadline) = 0;
  virtual Report report() const = 0;  // once done
};

// Waits for a run in slices, between which the caller may be told to stop. `failed` hears of every
// slice's error, and may throw another one. A timeout before its slice is over is the run's own: of
// a simulation, in its virtual time.
template <typename Failed>
void wait_in_slices(Run& run, const Deadline& deadline, const Failed& failed) {
  for (;;) {
    const bool last = deadline.left_ns() <= kListenNs;
    const Deadline slice = last ? deadline : deadline.slice(kListenNs);
    try {
      return run.wait(slice);
    } catch (const Error& error) {
      failed(error);
      if (last || error.code() != Code::timeout || !slice.passed()) throw;
    }
    deadline.listen();
  }
}

// What a stream of the caller's has yet to do before something may begin.
class Mark {
 public:
  virtual ~Mark() = default;
  virtual bool passed() = 0;  // throws driver when the device has failed
};

// A program made ready for the local ranks.
class Loaded {
 public:
  virtual ~Loaded() = default;
  // Enqueues the program's engine queues ahead of the call (mode armed only): the next launch,
  // which must carry the same epoch and lane, then starts them by its caller's start word. Where it
  // carries another binding the backend arms anew, or throws unsupported if it cannot take back.
  // False where the engines cannot hold them: the next launch enqueues them then.
  virtual bool arm(const Launch& launch) = 0;
  // Throws Refused where nothing is enqueued: no rank sees anything of the launch.
  virtual std::unique_ptr<Run> launch(const Launch& launch) = 0;
  // False where the backend does some of its commands by others, because a test of it has failed.
  virtual bool native() const { return true; }
};

// Where windows come from.
class Memory {
 public:
  virtual ~Memory() = default;
  // Zeroed memory of one local rank. Throws memory.
  virtual Share allocate(Rank rank, uint64_t bytes) = 0;
  // Maps a peer's memory, given its descriptor (which the result owns).
  virtual Share import(Rank rank, uint64_t bytes, int fd) = 0;
  // Makes a window of all ranks' shares, in the order of ranks. May lay them out anew: their data
  // is what it is after this call only. Whether they lie at a constant stride, so that one command
  // can go over ranks: a function of what all ranks know.
  virtual bool map(std::span<Share>) { return true; }
  // Whether this process's CPUs can read and write it in place.
  virtual bool host_visible() const { return true; }
};

// Streams of the caller's stand before it until it is open. Opened by its end at the latest.
class Gate {
 public:
  virtual ~Gate() = default;
  // Throws unsupported where too many streams stand before gates.
  virtual void enqueue_wait(uintptr_t stream) = 0;
  virtual void open() = 0;  // at once, unless Streams::open_behind does
};

// The callers' streams (as Launch::streams).
class Streams {
 public:
  virtual ~Streams() = default;
  // The work that is in a stream of the first local rank now, or what the driver's event stands for
  // now. Throw unsupported for a stream that is being captured.
  virtual std::unique_ptr<Mark> mark_stream(uintptr_t stream) = 0;
  virtual std::unique_ptr<Mark> mark_event(uintptr_t event) = 0;
  // Makes a stream of the caller's wait for the end of a run of this backend's.
  virtual void enqueue_wait(Run& run, uintptr_t stream) = 0;
  // A closed one. Those of a line are opened one after the other by open_behind(). Throws
  // unsupported where a stream that stands might hold up others, and memory.
  virtual std::shared_ptr<Gate> gate(uint32_t line) = 0;
  // Opens it when these runs of this backend's have ended. Throws driver.
  virtual void open_behind(Gate& gate, std::span<const std::shared_ptr<Run>> runs) = 0;
};

// Captures of such streams. Programs of mode capture are launched into captures, and no others:
// their runs are done at once, because only a graph's replays run anything.
class Graphs {
 public:
  virtual ~Graphs() = default;
  // The capture that these streams are in: a number that no other one has in this process; 0: none.
  virtual uint64_t capture_of(std::span<const uintptr_t> streams) = 0;
  // Whether what was launched into that capture neither runs nor can any more: its graphs are
  // destroyed, and all that was made of them. False also where nobody tells.
  virtual bool gone(uint64_t capture) = 0;
};

// From its first byte to the one behind its last.
struct MemoryExtent {
  const std::byte* first = nullptr;
  const std::byte* last = nullptr;
};

// Memory that others have allocated at other addresses too. It stays allocated as long.
class MappedAgain {
 public:
  virtual ~MappedAgain() = default;
  virtual std::byte* at(size_t extent) const = 0;
  // Whether it still lies where its owners had it.
  virtual bool intact() const = 0;
};

// Local ranks that are GPUs.
class GpuRanks {
 public:
  virtual ~GpuRanks() = default;
  virtual int device(Rank rank) = 0;  // as the driver counts
  // What this process's memory from `first` to before `last` lies in: a number that it shares with
  // all else that one strided copy may go over. Where that is not known, no other range's.
  virtual uint64_t memory_of(const std::byte* first, const std::byte* last) = 0;
  // Whether the rank's engines reach all of that.
  virtual bool reaches(Rank rank, const std::byte* first, const std::byte* last) = 0;
  // Maps them once more, so that they begin at equal steps in one range. Null: that cannot be.
  virtual std::unique_ptr<MappedAgain> at_steps(std::span<const MemoryExtent> extents) = 0;
};

// Windows of memory that others have allocated, as it lies.
class ForeignMemory {
 public:
  virtual ~ForeignMemory() = default;
  // A local rank's share; `keep` is what keeps it allocated. Throws unsupported or invalid.
  virtual Share hold(Rank rank, std::byte* data, uint64_t bytes, std::shared_ptr<void> keep) = 0;
  // A peer's, by its layout; then its parts, in their order.
  virtual Share import_held(Rank rank, uint64_t bytes, std::string_view layout) = 0;
  virtual void import_part(Share& share, Descriptor part) = 0;
  // Host memory that others have allocated, and `keep` keeps, for all engines.
  virtual Share register_host(std::byte* data, uint64_t bytes, std::shared_ptr<void> keep) = 0;
};

// Copies between the host and a rank by the engine of the other direction (Launch::crossed).
class CrossedCopies {
 public:
  virtual ~CrossedCopies() = default;
  // Before anything is launched, once. False: no engine does such copies, telling of them takes too
  // long, or there is no room.
  virtual bool enable(Rank rank, const Reach& reach) = 0;
  // Gives up what that took. Not while anything is launched.
  virtual void disable(Rank rank) = 0;
};

// Where there is more than one form of signals.
class SignalChoice {
 public:
  virtual ~SignalChoice() = default;
  // Before anything is loaded. Throws invalid where it is none.
  virtual void settle(std::string_view form) = 0;
};

// A copy from a local rank's memory into another rank's, and a 64-bit word of any rank's memory.
struct RequestCopy {
  std::byte* dst;
  const std::byte* src;
  uint64_t bytes;
};
struct RequestWord {
  std::byte* word;
  uint64_t value;
};

// A submission that stands still until a word of the rank's own memory has come that far, modulo
// 2^64.
struct ParkedRequest {
  RequestWord gate;
  RequestCopy copy;  // of no bytes: none
  std::optional<RequestWord> signal;
  RequestWord sent;  // of the rank's own memory
};

// Copies of one local rank that are submitted one after the other, without a program: what running
// kernels ask for (core/proxy). One thread calls it, and no call but recall() waits for a copy.
class RequestEngine {
 public:
  // What engines of GPUs keep to, in virtual time too: copies of a call; submissions of a peer that
  // are under way, so that no call finds the driver's queue full and waits in it (kernels that wait
  // for each other need fewer); streams of a GPU that something is parked in.
  static constexpr size_t kCallCopiesMax = 128;
  static constexpr size_t kInFlightMax = 64;
  static constexpr size_t kArmedStreamsMax = 4;

  virtual ~RequestEngine() = default;
  // How many submissions the peer's queue takes now. Throws driver once an engine has failed.
  virtual uint64_t room(Rank peer) = 0;
  // Enqueues the copies, in no order, behind all that was submitted for the peer; then the words,
  // each of which is written after the copies.
  virtual void submit(Rank peer, std::span<const RequestCopy> copies,
                      std::span<const RequestWord> words) = 0;
  // Writes words, in their order, beside what is under way.
  virtual void store(std::span<const RequestWord> words) = 0;
  virtual bool idle() = 0;  // nothing is under way; throws driver

  // Before anything is parked: the memory that it writes, by any address of each window. Throws
  // unsupported.
  virtual void prepare_parking(std::span<std::byte* const> windows) = 0;
  // The signal is written behind the data, `sent` behind both.
  virtual void park(Rank peer, const ParkedRequest& request) = 0;
  // Ends what is parked without effect. The gates get `held`, which starts nothing; once nothing
  // that has started `is_under_way`, they get `closed`. Waits for that; throws driver.
  virtual void recall(uint64_t held, uint64_t closed,
                      const std::function<bool()>& is_under_way) = 0;

  // Of engines whose callers are kernels: loads, and launches in a stream (0: its own), the kernel
  // of an exchange (core/proxy/exchange.h has its arguments). By any thread. What kernels reach is
  // kept until they have ended. Throws unsupported in a capture.
  virtual bool launches() const { return false; }
  virtual void prepare_launches(std::shared_ptr<void>) {}
  virtual void launch(uintptr_t, void*) {}
};

// Where such engines come from.
class RequestEngines {
 public:
  virtual ~RequestEngines() = default;
  virtual std::unique_ptr<RequestEngine> open_requests(Rank rank) = 0;
};

// Where time is virtual: requests (core/proxy) happen in it.
class VirtualTime {
 public:
  virtual ~VirtualTime() = default;
  virtual void pass(double ns) = 0;
  virtual uint64_t draw() = 0;  // what orders events of equal time
  virtual bool plants_faults() const = 0;
};

// What not every backend has: null where this one has not. Owned by the backend.
struct Capabilities {
  Streams* streams = nullptr;
  Graphs* graphs = nullptr;
  GpuRanks* gpus = nullptr;
  CrossedCopies* crossed_copies = nullptr;
  ForeignMemory* foreign_memory = nullptr;
  SignalChoice* signal_choice = nullptr;
  RequestEngines* request_engines = nullptr;
  VirtualTime* virtual_time = nullptr;
  bool packs = false;  // cores copy paged buffers (page_table.h)
  // How a signal stays behind the data before it: "fenced", or "copy_order"
  // (cuda/stream_encoder.h).
  std::string_view signals = "fenced";
};

class Backend : public Memory {
 public:
  virtual const Machine& machine() const = 0;
  // Zeroed memory of this host that the local ranks' engines reach.
  virtual Share allocate_host(uint64_t bytes) { return allocate(0, bytes); }
  virtual std::unique_ptr<Loaded> load(std::shared_ptr<const Program> program) = 0;
  virtual int64_t now_ns() const = 0;  // virtual time on sim
  virtual Capabilities capabilities() { return {}; }

  // As Graphs has it; 0 where there are none.
  uint64_t capture_of(std::span<const uintptr_t> streams) {
    Graphs* graphs = capabilities().graphs;
    return graphs == nullptr ? 0 : graphs->capture_of(streams);
  }
  int device(Rank rank) {  // -1: no GPU
    GpuRanks* gpus = capabilities().gpus;
    return gpus == nullptr ? -1 : gpus->device(rank);
  }
};

// Whether a backend can run here, or why not and what would make it so.
struct Probe {
  std::string name;
  bool available = false;
  std::string reason;
  Code refusal = Code::unavailable;  // what opening it throws where it is not
};

}  // namespace offcore
