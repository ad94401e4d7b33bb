#include "core/comm/communicator.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "core/backend/wakeup.h"
#include "core/base/error.h"
#include "core/ir/text.h"

namespace offcore {
namespace {

constexpr uint32_t kLanesMax = 64;
constexpr uint32_t kArmedPlansMax = 64;
constexpr int64_t kSliceNs = 50'000'000;  // how often a long wait looks at its peers' records
constexpr uint64_t kAheadMax = Journal::kRecords / 2;
constexpr std::string_view kOutside = "outside";

// The side of the request that a buffer stands for, where it is memory that only its rank's own
// queues see. Its addresses are no collective fact, and every call may bring others.
const std::vector<Operand>* own_side(const Buffer& buffer, const Request& request) {
  if (buffer.name == "in") return &request.in;
  const bool own = buffer.kind == Buffer::Kind::local || request.out[0].window == nullptr;
  return buffer.name == "out" && own ? &request.out : nullptr;
}

bool stage_of(const Request& request, const Facts& facts, bool same_place) {
  if (request.protocol == "promise" || facts.total_bytes == 0) return false;
  return request.protocol == "eager" || !same_place;
}

Protocol protocol_of(const Request& request, bool staged, bool full_exchange) {
  const std::string& name = request.protocol;
  if (name == "promise") return {.entry = false, .staged = false};
  if (name == "barrier") return {.entry = true, .staged = staged};
  return {.entry = !(staged && full_exchange), .staged = staged};
}

}  // namespace

// What is kept for a plan key: the program, loaded for the local ranks.
struct Communicator::Plan {
  Entry entry;
  std::shared_ptr<const Program> program;
  std::unique_ptr<Loaded> loaded;
  std::shared_ptr<const Result> result;
  bool full_exchange = false;
  std::shared_ptr<Window> out_window;  // null: the program writes no window of the caller's
  std::vector<Share> scratch;          // one a local rank, where the program has scratch
  std::unique_ptr<Track> own_track;    // prelaunch: words and slots that no other launch touches
  std::unique_ptr<Launch> armed;       // prelaunch: the next launch
  bool held = false;                   // by the engines already
};

std::shared_ptr<Communicator> Communicator::create(std::unique_ptr<Backend> backend,
                                                   std::shared_ptr<Rendezvous> rendezvous,
                                                   Rank ranks, const Deadline& deadline) {
  if (ranks < 1 || ranks > backend->machine().ranks) {
    fail(Code::invalid, "machine ", backend->machine().name, " has ", backend->machine().ranks,
         " ranks, ", ranks, " asked for");
  }
  std::shared_ptr<Communicator> communicator(
      new Communicator(std::move(backend), std::move(rendezvous), ranks));
  Communicator& self = *communicator;
  self.control_ = ControlMemory::create(self.rendezvous_.get(), ranks, sizeof(Wakeup), deadline);
  if (self.rendezvous_) {
    const ControlMemory control = self.control_;
    const Rank own = self.rendezvous_->rank();
    self.rendezvous_->on_peer_loss([control, own](Rank lost) {
      poison(*reinterpret_cast<Wakeup*>(control.bases[own]), lost);
    });
  }
  self.lane(0, deadline);
  return communicator;
}

Communicator::Communicator(std::unique_ptr<Backend> backend, std::shared_ptr<Rendezvous> rendezvous,
                           Rank ranks)
    : backend_(std::move(backend)), rendezvous_(std::move(rendezvous)), ranks_(ranks) {
  if (rendezvous_) {
    local_ranks_ = {rendezvous_->rank()};
  } else {
    for (Rank rank = 0; rank < ranks; ++rank) local_ranks_.push_back(rank);
  }
}

Communicator::~Communicator() {
  if (rendezvous_) rendezvous_->on_peer_loss(nullptr);
  // Engines stop before the memory they may still see goes.
  plans_.clear();
  backend_.reset();
}

Wakeup& Communicator::wakeup(Rank rank) const {
  return *reinterpret_cast<Wakeup*>(control_.bases[rank]);
}

void Communicator::check_alive() const {
  if (closed_) fail(Code::invalid, "the communicator is closed");
  if (aborted_) fail(Code::cancelled, "the communicator was aborted by this rank");
  const uint32_t poisoned = wakeup(local_ranks_[0]).poison.load(std::memory_order_acquire);
  if (poisoned == 0) return;
  fail(Code::peer, "rank ", poisoned - 1, " died or aborted; make a new communicator");
}

// What follows when all ranks have agreed on a call: a rank that fails alone must not leave its
// peers waiting, nor come one call late to everything that follows.
template <typename Step>
auto Communicator::all_or_none(const Step& step) {
  try {
    return step();
  } catch (...) {
    if (!alone()) abort();
    throw;
  }
}

Lane& Communicator::lane(uint32_t index, const Deadline& deadline) {
  if (index >= kLanesMax) {
    fail(Code::invalid, "lane ", index, " is not below ", kLanesMax);
  }
  std::unique_ptr<Lane>& lane = lanes_[index];
  if (lane) return *lane;
  auto made = std::make_unique<Lane>();
  const uint64_t words = 2 * ranks_ + uint64_t{ranks_} * backend_->machine().engines_peer;
  made->index = index;
  made->track.flags = Flags::create(*backend_, rendezvous_.get(), ranks_, words, deadline);
  made->records = ControlMemory::create(rendezvous_.get(), ranks_, Journal::kBytes, deadline);
  made->journal = Journal(made->records.bases);
  lane = std::move(made);
  return *lane;
}

std::shared_ptr<Window> Communicator::window(uint64_t bytes, const Deadline& deadline) {
  const std::scoped_lock lock(mutex_);
  check_alive();
  auto window = Window::create(*backend_, rendezvous_.get(), ranks_, bytes, deadline);
  windows_.push_back(window);
  return window;
}

void Communicator::locate(Operand& operand, Rank rank) const {
  if (operand.window || operand.data == nullptr || operand.bytes == 0) return;
  for (const auto& candidate : windows_) {
    const auto window = candidate.lock();
    if (!window) continue;
    if (const auto offset = window->contains(rank, operand.data, operand.bytes)) {
      operand.window = window;
      operand.offset = *offset;
      return;
    }
  }
}

// What every call begins with.
Communicator::Lookup Communicator::look_up(Request& request) const {
  for (auto* side : {&request.out, &request.in}) {
    for (size_t i = 0; i < side->size() && i < local_ranks_.size(); ++i) {
      locate((*side)[i], local_ranks_[i]);
    }
  }
  Lookup lookup{.facts = facts_of(request, ranks_, local_ranks_)};
  lookup.place = place_of(request, lookup.facts);
  lookup.key = cache_key(request, lookup.facts, lookup.place);
  if (const auto found = plans_.find(lookup.key); found != plans_.end()) {
    lookup.plan = found->second;
  }
  return lookup;
}

bool Communicator::knows(Request request) const {
  const std::scoped_lock lock(mutex_);
  return look_up(request).plan != nullptr;
}

std::unique_ptr<Pending> Communicator::start(Request request, const Deadline& deadline) {
  const std::scoped_lock lock(mutex_);
  check_alive();
  const Lookup lookup = look_up(request);
  Lane& lane = this->lane(request.lane, deadline);
  std::shared_ptr<Plan> plan = lookup.plan;
  if (plan != nullptr) {
    publish(lane, plan->entry, deadline);
    ++lane.sequence;
  } else {
    plan = meet(request, lookup.facts, lane, lookup.place, deadline);
    plans_.emplace(lookup.key, plan);
  }

  auto pending = std::make_unique<Pending>();
  pending->communicator_ = shared_from_this();
  pending->result_ = plan->result;
  pending->lane_ = &lane;
  pending->sequence_ = lane.sequence - 1;
  pending->entry_ = plan->entry;
  all_or_none([&] { launch(*plan, request, lane, *pending); });
  return pending;
}

void Communicator::launch(Plan& plan, const Request& request, Lane& lane, Pending& pending) {
  if (plan.program->mode != Mode::armed) {
    pending.run_ = plan.loaded->launch(bind(plan, request, lane));
    return;
  }
  const auto arm = [&] {
    auto armed = std::make_unique<Launch>(bind(plan, request, lane));
    plan.held = plan.loaded->arm(*armed);
    return armed;
  };
  std::unique_ptr<Launch> armed = std::exchange(plan.armed, nullptr);
  if (armed == nullptr) {
    armed = arm();
  } else {
    // Armed for the last call's memory; with other memory the backend arms once more.
    pending.armed_ahead_ = !bind_own(*plan.program, request, *armed) && plan.held;
    using Held = std::pair<std::shared_ptr<void>, std::shared_ptr<void>>;
    armed->owner = std::make_shared<Held>(armed->owner, request.keep);
  }
  armed->streams = request.streams;
  pending.run_ = plan.loaded->launch(*armed);
  plan.armed = arm();  // at once: the next call finds its program on the engines
}

// Where peers would write: the same part of the same window on every local rank, or outside.
std::string Communicator::place_of(const Request& request, const Facts& facts) const {
  if (facts.total_bytes == 0) return "none";
  const Operand& first = request.out[0];
  for (const Operand& operand : request.out) {
    if (!operand.window || operand.window != first.window || operand.offset != first.offset) {
      return std::string(kOutside);
    }
  }
  size_t index = 0;
  while (index < windows_.size() && windows_[index].lock() != first.window) ++index;
  if (index == windows_.size()) {
    fail(Code::invalid, "the window belongs to another communicator");
  }
  return cat("window ", index, "+", first.offset);
}

// A plan key's first call: every rank comes here together. Until they agree the call has not
// happened; from then on it has its number, also where planning it fails (on all ranks alike).
std::shared_ptr<Communicator::Plan> Communicator::meet(const Request& request, const Facts& facts,
                                                       Lane& lane, const std::string& place,
                                                       const Deadline& deadline) {
  const Machine& machine = backend_->machine();
  const std::string text =
      cat(describe(facts), " variant=", request.variant, " protocol=", request.protocol,
          " lane=", lane.index, " machine=", machine.name,
          machine.tuned_version.empty() ? "" : " tuned=", machine.tuned_version);
  const Entry undecided{.key = digest(text), .text = cat(text, " out=", place)};
  publish(lane, undecided, deadline);
  const bool agreed = agree_on_place(lane, undecided, deadline);
  ++lane.sequence;
  const bool same_place = agreed && place != kOutside;
  if (request.protocol == "promise" && !same_place) {
    fail(Code::unsupported,
         "protocol promise needs the output at the same place of a window of "
         "every rank; allocate it with Communicator.window() or empty()");
  }
  const bool staged = stage_of(request, facts, same_place);

  auto plan = std::make_shared<Plan>();
  const Moves moves = moves_of(facts);
  const Protocol protocol = protocol_of(request, staged, moves.full_exchange);
  const Choice choice = request.variant == "auto"
                            ? choose(moves, facts.total_bytes, machine, protocol)
                            : Choice{.variant = parse_variant(request.variant)};
  plan->program = offcore::plan(moves, choice.variant, machine, protocol);
  plan->loaded = all_or_none([&] { return backend_->load(plan->program); });
  plan->full_exchange = moves.full_exchange;
  plan->entry = {.key = undecided.key,
                 .plan = digest(cat(text, staged ? " staged" : place)),
                 .text = undecided.text};
  if (plan->program->mode == Mode::armed) {
    if (armed_plans_ >= kArmedPlansMax) {
      fail(Code::unsupported, "more than ", kArmedPlansMax,
           " prelaunched operations in a communicator; each binds its own buffers");
    }
    ++armed_plans_;
    plan->own_track = std::make_unique<Track>();
    plan->own_track->flags =
        Flags::create(*backend_, rendezvous_.get(), ranks_, lane.track.flags.words, deadline);
  }
  Track& track = plan->own_track ? *plan->own_track : lane.track;
  for (const Buffer& buffer : plan->program->buffers) {
    if (buffer.name == "slot") {
      track.slots.grow(*backend_, rendezvous_.get(), ranks_, buffer.bytes, deadline);
    } else if (buffer.name == "scratch") {
      for (Rank rank : local_ranks_) {
        plan->scratch.push_back(
            all_or_none([&] { return backend_->allocate(rank, buffer.bytes); }));
      }
    }
  }
  Result result{.op = moves.op,
                .variant = plan->program->variant,
                .protocol = plan->program->protocol,
                .mode = plan->program->mode,
                .native = plan->program->native,
                .staged = staged,
                .tuned = choice.tuned,
                .in_place = facts.in_place,
                .total_bytes = facts.total_bytes,
                .counts = count(*plan->program)};
  plan->result = std::make_shared<const Result>(std::move(result));
  return plan;
}

// Whether all ranks gave the same place; throws mismatch when one has another key, or has met this
// one already.
bool Communicator::agree_on_place(const Lane& lane, const Entry& mine, const Deadline& deadline) {
  if (alone()) return true;
  bool same = true;
  for (Rank peer = 0; peer < ranks_; ++peer) {
    if (peer == local_ranks_[0]) continue;
    const Entry theirs = wait_for_entry(lane, peer, mine, deadline);
    if (theirs.key != mine.key || theirs.decided()) {
      diverge(lane, peer, lane.sequence, mine, theirs);
    }
    same = same && digest(theirs.text) == digest(mine.text);
  }
  return same;
}

Entry Communicator::wait_for_entry(const Lane& lane, Rank peer, const Entry& mine,
                                   const Deadline& deadline) {
  const uint64_t sequence = lane.sequence;
  Wakeup& own = wakeup(local_ranks_[0]);
  for (;;) {
    if (auto entry = lane.journal.read(peer, sequence)) return *entry;
    check_alive();
    if (deadline.passed()) {
      fail(Code::timeout, "rank ", peer, " has not reached call ", sequence, " of lane ",
           lane.index, " (", mine.text, "); it has made ", lane.journal.published(peer),
           " calls there");
    }
    Sleeper sleeper(own);
    if (lane.journal.published(peer) <= sequence) sleeper.sleep(1'000'000);
  }
}

void Communicator::publish(Lane& lane, const Entry& entry, const Deadline& deadline) {
  if (alone()) return;
  const uint64_t sequence = lane.sequence;
  const Rank own = local_ranks_[0];
  // No rank runs so far ahead that it overwrites records which a peer still has to read.
  if (sequence % (kAheadMax / 2) == 0 && sequence >= kAheadMax) {
    for (Rank peer = 0; peer < ranks_; ++peer) {
      while (lane.journal.published(peer) + kAheadMax < sequence) {
        check_alive();
        if (deadline.passed()) {
          fail(Code::timeout, "rank ", peer, " is ", kAheadMax, " calls behind on lane ",
               lane.index, ": it has made ", lane.journal.published(peer));
        }
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
  }
  lane.journal.publish(own, sequence, entry);
  if (entry.decided()) return;
  for (Rank peer = 0; peer < ranks_; ++peer) wake(wakeup(peer));
}

Launch Communicator::bind(const Plan& plan, const Request& request, Lane& lane) {
  const auto& buffers = plan.program->buffers;
  Track& track = plan.own_track ? *plan.own_track : lane.track;
  Flags& flags = track.flags;
  Launch launch{
      .binding = Binding(buffers.size(), ranks_), .epoch = flags.epoch, .lane = lane.index};
  launch.streams = request.streams;
  flags.epoch += plan.program->flag_span;
  Binding& binding = launch.binding;
  for (Rank rank = 0; rank < ranks_; ++rank) {
    launch.wakeups.push_back(&wakeup(rank));
    binding.base(kFlagBuffer, rank) = flags.base(rank);
  }
  binding.base(kFlagBuffer, kHostRank) = flags.base(kHostRank);

  std::shared_ptr<Window> slots;
  for (size_t i = 1; i < buffers.size(); ++i) {
    const auto id = static_cast<BufferId>(i);
    const Buffer& buffer = buffers[i];
    if (buffer.name == "slot") {
      slots = track.slots.window();
      const uint32_t slot = track.slots.next(plan.full_exchange);
      for (Rank rank = 0; rank < ranks_; ++rank) {
        binding.base(id, rank) = track.slots.base(rank, slot);
      }
    } else if (buffer.name == "scratch") {
      for (const Share& share : plan.scratch) binding.base(id, share.rank) = share.data;
    } else if (own_side(buffer, request) == nullptr) {
      for (Rank rank = 0; rank < ranks_; ++rank) {
        std::byte* base = request.out[0].window->base(rank);
        binding.base(id, rank) = base == nullptr ? nullptr : base + request.out[0].offset;
      }
    }
  }
  using Held = std::tuple<std::shared_ptr<Window>, std::shared_ptr<Window>, ControlMemory,
                          ControlMemory, std::vector<Share>, std::shared_ptr<void>>;
  launch.owner = std::make_shared<Held>(slots, request.out[0].window, flags.memory, control_,
                                        plan.scratch, request.keep);
  bind_own(*plan.program, request, launch);
  return launch;
}

// Binds what the ranks alone see to this call's memory; whether any of it was bound elsewhere.
bool Communicator::bind_own(const Program& program, const Request& request, Launch& launch) const {
  bool moved = false;
  for (size_t id = 1; id < program.buffers.size(); ++id) {
    const std::vector<Operand>* side = own_side(program.buffers[id], request);
    for (size_t i = 0; side != nullptr && i < local_ranks_.size(); ++i) {
      std::byte*& base = launch.binding.base(static_cast<BufferId>(id), local_ranks_[i]);
      moved |= base != (*side)[i].data;
      base = (*side)[i].data;
    }
  }
  return moved;
}

void Communicator::compare_with_peers(const Lane& lane, uint64_t sequence, const Entry& mine) {
  if (alone()) return;
  for (Rank peer = 0; peer < ranks_; ++peer) {
    if (peer == local_ranks_[0]) continue;
    const auto theirs = lane.journal.read(peer, sequence);
    if (!theirs) continue;
    const bool both_decided = theirs->decided() && mine.decided();
    if (theirs->key != mine.key || (both_decided && theirs->plan != mine.plan)) {
      diverge(lane, peer, sequence, mine, *theirs);
    }
  }
}

void Communicator::diverge(const Lane& lane, Rank peer, uint64_t sequence, const Entry& mine,
                           const Entry& theirs) {
  const Rank own = local_ranks_[0];
  abort();
  fail(Code::mismatch, "call ", sequence, " of lane ", lane.index, " differs: rank ", own,
       " makes ", mine.text, mine.decided() ? "" : " (for the first time)", ", rank ", peer,
       " makes ", theirs.text, theirs.decided() ? "" : " (for the first time)",
       ". All ranks must make the same calls in the same order, with buffers alike");
}

void Communicator::barrier(const Deadline& deadline) {
  Request request{.collective = Collective::all_gather,
                  .counts = std::vector<uint64_t>(ranks_, 0),
                  .variant = "b2b",
                  .protocol = "promise",
                  .out = std::vector<Operand>(local_ranks_.size()),
                  .in = std::vector<Operand>(local_ranks_.size())};
  start(std::move(request), deadline)->wait(deadline);
}

void Communicator::abort() {
  aborted_ = true;
  for (Rank rank = 0; rank < ranks_; ++rank) poison(wakeup(rank), local_ranks_[0]);
}

void Communicator::close() {
  const std::scoped_lock lock(mutex_);
  if (closed_) return;
  closed_ = true;
  plans_.clear();  // engines let go of what was armed
  if (rendezvous_) {
    rendezvous_->on_peer_loss(nullptr);
    rendezvous_->close();
  }
}

Pending::~Pending() = default;

bool Pending::done() { return run_->done(); }

Result Pending::wait(const Deadline& deadline) {
  Communicator& communicator = *communicator_;
  for (;;) {
    const bool slice = !communicator.alone() && deadline.left_ns() > kSliceNs;
    try {
      run_->wait(slice ? deadline.slice(kSliceNs) : deadline);
      break;
    } catch (const Error& error) {
      // Before a timeout or a peer's abort is believed: have the ranks diverged?
      communicator.compare_with_peers(*lane_, sequence_, entry_);
      if (error.code() == Code::peer && communicator.aborted_) {
        fail(Code::cancelled, "aborted by this rank: ", error.message());
      }
      if (error.code() != Code::timeout || !slice) throw;
    }
  }
  communicator.compare_with_peers(*lane_, sequence_, entry_);
  Result result = *result_;
  result.armed_ahead = armed_ahead_;
  result.report = run_->report();
  return result;
}

}  // namespace offcore
