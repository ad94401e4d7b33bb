// A communicator: ranks, their windows, lanes and a plan cache. It drives one rank of a group of
// processes (or threads), or all ranks of a group in this process.
//
// A plan is a function of its key, and the key holds collective facts only. Ranks meet each key for
// the first time together: they compare keys in the journal and settle whether the data lands in
// the caller's buffers (the same place of the same window on every rank) or in slots. Afterwards
// nothing goes over the wire but the operation itself; the journal still tells when ranks diverge.
//
// A rank that has no plan where others have (it dropped it, or only its own part of the call is
// new: a gather's root with another output) waits until all have come to the call, and does as the
// others' records say.
//
// In a stream that is being captured an operation becomes part of a graph and does not run (mode
// capture). The ranks meet at every such call, and the n-th graph of a lane is the same one on all.
//
// Threads may call at once, each in a lane of its own, and their first calls meet in any order (see
// lane_lock.h). What they make together has an order within its lane only: nothing that ranks have
// to count alike is counted over lanes, but windows.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/backend/backend.h"
#include "core/base/digest.h"
#include "core/base/error.h"
#include "core/base/fork.h"
#include "core/base/log.h"
#include "core/comm/known_shapes.h"
#include "core/comm/lane.h"
#include "core/comm/lane_lock.h"
#include "core/comm/plan_cache.h"
#include "core/comm/request.h"
#include "core/plan/plan.h"
#include "core/window/rendezvous.h"

namespace offcore {

// What an operation did: which path really ran.
struct Result {
  std::string op;
  std::string variant;
  std::string protocol;
  std::string signals;  // fenced or copy_order: see Backend
  Mode mode = Mode::eager;
  bool native = true;
  bool staged = false;       // through slots: outputs in no window, or faster so
  bool registered = false;   // peers wrote memory that others have allocated
  bool tuned = false;        // the variant came from the measured table
  bool armed_ahead = false;  // prelaunch: the engines had the program before the call
  bool in_place = false;
  std::string own_copy = "none";  // what copies within a local rank's memory: see OwnCopy
  uint64_t total_bytes = 0;
  uint64_t slot_bytes = 0;  // of a rank's slot; a lane has three as large as its largest call needs
  Counts counts;            // of all ranks
  Report report;
};

class Communicator;

// One operation under way.
class Pending : public OfProcess {
 public:
  Pending() : OfProcess("the operation") {}
  ~Pending();
  bool done();
  // Throws timeout (and can be waited for again), peer, cancelled, mismatch.
  Result wait(const Deadline& deadline);
  // Protocol credits: this rank has done with the output, so peers may write it for the next call
  // of the same operation into it. In those streams' order, where there are any. Nothing happens if
  // that call has been made. Throws invalid for another protocol.
  void release(const std::vector<uintptr_t>& streams);
  // GPUs, with one local rank: what comes later in that stream of the caller's comes after the
  // operation, which is in no capture. Throws as Communicator::check.
  void follow(uintptr_t stream);
  // Where the output of a view call lies, on every rank; its window is null for other calls.
  const Slots::SlotPlace& view() const { return view_; }

 private:
  friend class Communicator;
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<const Result> result_;  // all but the report
  std::shared_ptr<CachedPlan> plan_;      // protocol credits
  uint64_t launch_ = 0;                   // of the plan's
  Slots::SlotPlace view_;
  OwnedHere<Run> run_;
  bool armed_ahead_ = false;
  const Lane* lane_ = nullptr;
  uint64_t sequence_ = 0;
  std::shared_ptr<const Entry> entry_;
  uintptr_t stream_ = 0;  // of the first local rank
};

class Communicator : public std::enable_shared_from_this<Communicator>, public OfProcess {
 public:
  // With a rendezvous this process drives its one rank; without (null) all ranks are local.
  // `signals`: the form that was asked for, or "auto".
  static std::shared_ptr<Communicator> create(std::unique_ptr<Backend> backend,
                                              std::shared_ptr<Rendezvous> rendezvous, Rank ranks,
                                              std::string_view signals, const Deadline& deadline);
  ~Communicator();

  Rank ranks() const { return ranks_; }
  const std::vector<Rank>& local_ranks() const { return local_ranks_; }
  Backend& backend() { return *backend_; }

  // Collective: `bytes` of window memory on every rank. Windows come in one order on all ranks.
  std::shared_ptr<Window> window(uint64_t bytes, const Deadline& deadline);
  // Collective: makes the ranks' memory a window as it lies, and gives its number. `keep` keeps it
  // allocated. What lies in a window that was made so, on all ranks at the same place, counts as
  // registered once more. Throws as Window::hold, on all ranks alike.
  uint32_t register_memory(const std::vector<GivenMemory>& given, const std::shared_ptr<void>& keep,
                           const Deadline& deadline);
  // Undoes one registration: waits for nobody. After the last one no call finds the window; what
  // is under way, and graphs, keep it. Nothing happens to one that is gone.
  void deregister(uint32_t number);
  // Starts an operation; every rank of the group calls with the same facts. The deadline bounds the
  // first meeting of a key only; a call that fails by it has not happened and may be repeated.
  std::unique_ptr<Pending> start(Request request, const Deadline& deadline);

  // The slot that the next all-gather view of the lane will take, with room for `bytes` of each
  // rank. Collective: the ring of views may have to grow. The deadline is as start's.
  Slots::SlotPlace next_input(uint32_t lane, uint64_t bytes, const Deadline& deadline);

  // Whether the operation's plan is kept already. Planning's own benchmark times this.
  bool knows(Request request);
  // How many plans and windows it keeps track of: bounded, whatever is called and made.
  std::pair<size_t, size_t> kept() const;

  // Every rank's text, by rank. Collective; throws unsupported where all ranks are local.
  std::vector<std::string> exchange(const std::string& tag, const std::string& text,
                                    const Deadline& deadline);
  // Throws what every call of a dead communicator throws: peer, cancelled, invalid.
  void check() const;
  // The rank that died or aborted, and 1; 0: none has. Takes no lock.
  uint32_t poisoned() const { return wakeup(local_ranks_[0]).poison.load(); }
  // Which window memory of the local rank that is; null: none.
  Slots::SlotPlace place_of(Rank rank, std::byte* data, uint64_t bytes) const;

  // All ranks have called.
  void barrier(const Deadline& deadline);

  // Makes every wait of every rank fail; the communicator is dead. What was under way may have
  // written any part of its output.
  void abort();
  // Says goodbye to the peers. Operations under way must have been waited for.
  void close();

 private:
  struct Lookup {
    Facts facts;
    Target target = {};
    std::string key = {};
    std::shared_ptr<CachedPlan> plan = nullptr;  // null: the ranks have yet to meet this key
  };
  // A launch and what it has taken.
  struct Bound {
    Launch launch;
    LaneState* track;
    Slots* slots = nullptr;  // null: it needs none
    Slots::SlotPlace slot = {};
    bool turned = false;  // as Slots::take
    // Gives that back where the step is refused.
    template <typename Step>
    void run(const Step& step) const;
  };
  // Where all ranks' data lands: the digest of a place.
  struct Settled {
    uint64_t place = 0;
    bool before = false;  // by ranks that have the plan already
  };
  friend class Pending;

  Communicator(std::unique_ptr<Backend> backend, std::shared_ptr<Rendezvous> rendezvous,
               Rank ranks);
  Wakeup& wakeup(Rank rank) const;
  bool alone() const { return rendezvous_ == nullptr; }  // all ranks are local
  void check_alive() const;
  Lane& lane(uint32_t index, LaneLock& turn);
  // Where all the given memory lies in a registered window, or outside.
  Target registered_place(const std::vector<GivenMemory>& given) const;
  // The window and offset that hold this local rank's memory, if one does.
  void locate(Operand& operand, Rank rank) const;
  Lookup look_up(Request& request);
  void lay_view(Request& request) const;
  Target target_of(const Request& request, const Facts& facts) const;
  // What ranks do together, `call` in words: the others hear of it, and at a timeout this rank
  // tells what they do instead.
  template <typename Step>
  auto together(const std::string& call, const Step& step) {
    if (alone()) return step();
    calls_.publish(local_ranks_[0], called_++, {.key = digest(call), .text = call});
    try {
      return step();
    } catch (const Error& error) {
      if (error.code() != Code::timeout) throw;
      fail(Code::timeout, error.message(), calls_elsewhere(call));
    }
  }
  std::string calls_elsewhere(const std::string& own) const;
  std::shared_ptr<CachedPlan> first_call(const Request& request, const Lookup& lookup,
                                         LaneLock& turn);
  std::shared_ptr<CachedPlan> first_call(const Request& request, const Lookup& lookup,
                                         const std::string& text, Lane& lane, LaneLock& turn);
  // As meet, into a graph that is being captured: at every call, since replays tell nobody.
  std::shared_ptr<CachedPlan> meet_in_graph(const Request& request, const Lookup& lookup,
                                            const std::string& text, Lane& lane, LaneLock& turn);
  Settled agree(Lane& lane, const Entry& mine, const Facts& facts, LaneLock& turn);
  std::shared_ptr<CachedPlan> make_plan(const Request& request, const Facts& facts,
                                        const ProtocolForm& form, const Deadline& deadline);
  // What ranks plan alike fails on all of them alike, but for a rank that takes too long.
  template <typename Step>
  void in_time(const Step& step) {
    try {
      step();
    } catch (const Error& error) {
      if (error.code() != Code::timeout || alone()) throw;
      abort();
      fail(Code::timeout, error.message(), "; the communicator is dead");
    }
  }
  void tell(const CachedPlan& plan) const;
  Graph& graph(Lane& lane, uint64_t capture, LaneLock& turn);
  Graph* take_over(const Lane& lane, LaneLock& turn) const;
  void equip(CachedPlan& plan, Lane& lane, LaneLock& turn);
  void equip(const Program& program, LaneState& track, bool views, LaneLock& turn);
  // The form of signals, which is rank 0's where all ask for "auto", since what each has proven may
  // differ; and that all have one machine.
  void settle_with_peers(std::string_view asked, const Deadline& deadline);
  Settled negotiate(const Lane& lane, const Entry& mine, const Facts& facts, LaneLock& turn);
  std::shared_ptr<CachedPlan> kept_plan(const Lane& lane, const Entry& mine, uint64_t place,
                                        const Facts& facts) const;
  Entry wait_for_entry(const Lane& lane, Rank peer, const Entry& mine, LaneLock& turn);
  void launch(CachedPlan& plan, const Request& request, Lane& lane, Pending& pending);
  void launch_armed(CachedPlan& plan, const Request& request, Lane& lane, Pending& pending);
  Launch bind_words(const Program& program, const Flags& flags, const Lane& lane) const;
  void grant(CachedPlan& plan, const Lane& lane, const std::vector<uintptr_t>& streams);
  Bound bind(CachedPlan& plan, const Request& request, Lane& lane);
  bool bind_own(const Program& program, const Request& request, Launch& launch) const;
  void publish(Lane& lane, const Entry& entry, LaneLock& turn);
  // What follows when all ranks have agreed on a call: a rank that fails alone must not leave its
  // peers waiting, nor come one call late to everything that follows. What was refused has not
  // happened, and the rank may still make its call.
  template <typename Step>
  auto all_or_none(const Step& step) {
    try {
      return step();
    } catch (const Refused&) {
      throw;
    } catch (...) {
      if (!alone()) abort();
      throw;
    }
  }
  void compare_with_peers(const Lane& lane, uint64_t sequence, const Entry& mine);
  [[noreturn]] void diverge(const Lane& lane, Rank peer, uint64_t sequence, const Entry& mine,
                            const Entry& theirs);

  std::unique_ptr<Backend> backend_;
  std::shared_ptr<Rendezvous> rendezvous_;
  Rank ranks_;
  std::vector<Rank> local_ranks_;
  Log log_;
  ControlMemory control_;
  struct Numbered {
    uint32_t number;  // by creation: the same on every rank
    std::weak_ptr<Window> window;
    std::shared_ptr<Window> registered = nullptr;  // the same, where it holds others' memory
    uint32_t registrations = 0;
  };
  uint32_t add_window(const std::shared_ptr<Window>& window, uint32_t registrations = 0);
  std::vector<Numbered>::iterator registered(uint32_t number);  // windows_.end(): not (any more)

  std::vector<Numbered> windows_;  // those that somebody holds, and a few that are gone
  uint32_t windows_made_ = 0;
  std::unordered_map<uint32_t, std::unique_ptr<Lane>> lanes_;
  PlanCache plans_;
  KnownShapes shapes_;
  Journal calls_{{}};    // what ranks do together, as they begin it
  uint64_t called_ = 0;  // by this rank
  bool closed_ = false;
  std::atomic<bool> aborted_{false};
  mutable LaneLocks lane_locks_;
};

}  // namespace offcore
