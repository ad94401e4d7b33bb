#include "core/comm/communicator.h"

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "core/backend/wakeup.h"
#include "core/base/error.h"
#include "core/comm/cached_plan.h"
#include "core/plan/flags.h"

namespace offcore {
namespace {

constexpr uint64_t kAheadMax = Journal::kRecords / 2;

}  // namespace

std::shared_ptr<Communicator> Communicator::create(std::unique_ptr<Backend> backend,
                                                   std::shared_ptr<Rendezvous> rendezvous,
                                                   Rank ranks, std::string_view signals,
                                                   const Deadline& deadline) {
  if (ranks < 1 || ranks > backend->machine().ranks) {
    fail(Code::invalid, "machine ", backend->machine().name, " has ", backend->machine().ranks,
         " ranks, ", ranks, " were requested");
  }
  const std::shared_ptr<Communicator> communicator = owned_that_waits(std::unique_ptr<Communicator>(
      new Communicator(std::move(backend), std::move(rendezvous), ranks)));
  Communicator& self = *communicator;
  if (self.rendezvous_) self.settle_with_peers(signals, deadline);
  self.control_ = ControlMemory::create(self.rendezvous_.get(), ranks,
                                        sizeof(Wakeup) + Journal::kBytes, deadline);
  std::vector<std::byte*> calls = self.control_.bases;
  for (std::byte*& base : calls) base += sizeof(Wakeup);
  self.calls_ = Journal(std::move(calls));
  if (self.rendezvous_) {
    const ControlMemory control = self.control_;
    const Rank own = self.rendezvous_->rank();
    self.rendezvous_->on_peer_loss([control, own](Rank lost) {
      poison(*reinterpret_cast<Wakeup*>(control.bases[own]), lost);
    });
  }
  {
    LaneLock turn(self.lane_locks_, self.rendezvous_.get(), 0, deadline);
    self.lane(0, turn);
  }
  self.log_.info("communicator of ", ranks, " ranks, machine ", self.backend_->machine().name,
                 ", signals ", self.backend_->capabilities().signals);
  return communicator;
}

Communicator::Communicator(std::unique_ptr<Backend> backend, std::shared_ptr<Rendezvous> rendezvous,
                           Rank ranks)
    : OfProcess("the communicator"),
      backend_(std::move(backend)),
      rendezvous_(std::move(rendezvous)),
      ranks_(ranks),
      log_(rendezvous_ ? cat("rank ", rendezvous_->rank()) : cat(ranks, " ranks")) {
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

Lane& Communicator::lane(uint32_t index, LaneLock& turn) {
  std::unique_ptr<Lane>& lane = lanes_[index];
  if (lane) return *lane;
  auto made = std::make_unique<Lane>();
  const uint64_t words = FlagWords(backend_->machine(), ranks_).count();
  made->index = index;
  Rendezvous* others = turn.ranks_together();
  made->track.flags = Flags::create(*backend_, others, ranks_, words, turn.deadline());
  made->records = ControlMemory::create(others, ranks_, Journal::kBytes, turn.deadline());
  made->journal = Journal(made->records.bases);
  lane = std::move(made);
  return *lane;
}

std::shared_ptr<Window> Communicator::window(uint64_t bytes, const Deadline& deadline) {
  LaneLock turn(lane_locks_, rendezvous_.get(), kWindowsTurn, deadline);
  check_alive();
  auto window = together(cat("window of ", bytes, " bytes"), [&] {
    return Window::create(*backend_, turn.ranks_together(), ranks_, bytes, deadline);
  });
  check_alive();
  add_window(window);
  return window;
}

uint32_t Communicator::add_window(const std::shared_ptr<Window>& window, uint32_t registrations) {
  std::erase_if(windows_, [](const Numbered& made) { return made.window.expired(); });
  windows_.push_back({.number = windows_made_,
                      .window = window,
                      .registered = registrations > 0 ? window : nullptr,
                      .registrations = registrations});
  log_.info("window ", windows_made_, ": ", window->bytes(), " bytes a rank",
            registrations > 0 ? ", registered" : "", window->strided() ? "" : ", not strided");
  return windows_made_++;
}

Target Communicator::registered_place(const std::vector<GivenMemory>& given) const {
  for (const Numbered& made : windows_) {
    const auto offset_of = [&](size_t i) {
      return made.registered->contains(local_ranks_[i], given[i].data, given[i].bytes);
    };
    const auto first = made.registered ? offset_of(0) : std::nullopt;
    bool same = first.has_value() && given[0].bytes > 0;  // what has none is refused
    for (size_t i = 1; i < given.size() && same; ++i) same = offset_of(i) == first;
    if (same) return {.window = made.number, .offset = *first};
  }
  return {.window = Target::kOutside};
}

uint32_t Communicator::register_memory(const std::vector<GivenMemory>& given,
                                       const std::shared_ptr<void>& keep,
                                       const Deadline& deadline) {
  LaneLock turn(lane_locks_, rendezvous_.get(), kWindowsTurn, deadline);
  check_alive();
  return together(cat("registration of ", given[0].bytes, " bytes"), [&] {
    const Target place = registered_place(given);
    const std::string mine = cat(to_string(place), ", ", given[0].bytes, " bytes");
    const std::vector<std::string> places =
        alone() ? std::vector{mine} : turn.all_gather_bytes("registered", mine, deadline);
    const bool alike = std::count(places.begin(), places.end(), mine) == std::ssize(places);
    if (alike && place.window != Target::kOutside) {
      ++registered(place.window)->registrations;
      return place.window;
    }
    const auto window =
        Window::hold(*backend_, turn.ranks_together(), ranks_, given, keep, deadline);
    check_alive();
    return add_window(window, 1);
  });
}

void Communicator::deregister(uint32_t number) {
  std::shared_ptr<Window> last;  // goes without the mutex
  const std::scoped_lock lock(lane_locks_.mutex);
  const auto found = registered(number);
  if (found == windows_.end() || --found->registrations > 0) return;
  last = std::move(found->registered);
  windows_.erase(found);
}

std::vector<Communicator::Numbered>::iterator Communicator::registered(uint32_t number) {
  return std::find_if(windows_.begin(), windows_.end(), [&](const Numbered& made) {
    return made.number == number && made.registered != nullptr;
  });
}

std::vector<std::string> Communicator::exchange(const std::string& tag, const std::string& text,
                                                const Deadline& deadline) {
  if (alone()) {
    fail(Code::unsupported,
         "all ranks of this communicator live in this process: there is no peer ",
         "to exchange with");
  }
  LaneLock turn(lane_locks_, rendezvous_.get(), kExchangeTurn, deadline);
  check_alive();
  return together(cat("exchange of ", tag),
                  [&] { return turn.all_gather_bytes(tag, text, deadline); });
}

void Communicator::locate(Operand& operand, Rank rank) const {
  if (operand.window || operand.data == nullptr || operand.bytes == 0) return;
  for (const Numbered& made : windows_) {
    const auto window = made.registered ? made.registered : made.window.lock();
    if (!window) continue;
    if (const auto offset = window->contains(rank, operand.data, operand.bytes)) {
      operand.window = window;
      operand.offset = *offset;
      return;
    }
  }
}

Slots::SlotPlace Communicator::place_of(Rank rank, std::byte* data, uint64_t bytes) const {
  const std::scoped_lock lock(lane_locks_.mutex);
  Operand operand{.data = data, .bytes = bytes, .given = true};
  locate(operand, rank);
  return {operand.window, operand.offset};
}

// What every call begins with.
Communicator::Lookup Communicator::look_up(Request& request) {
  if (request.view()) lay_view(request);
  for (auto* side : {&request.out, &request.in}) {
    for (size_t i = 0; i < side->size() && i < local_ranks_.size(); ++i) {
      locate((*side)[i], local_ranks_[i]);
    }
  }
  Lookup lookup{.facts = facts_of(request, ranks_, local_ranks_)};
  lookup.target = target_of(request, lookup.facts);
  lookup.key = cache_key(request, lookup.facts, lookup.target);
  lookup.plan = plans_.find(lookup.key);
  return lookup;
}

bool Communicator::knows(Request request) {
  const std::scoped_lock lock(lane_locks_.mutex);
  return look_up(request).plan != nullptr;
}

std::pair<size_t, size_t> Communicator::kept() const {
  const std::scoped_lock lock(lane_locks_.mutex);
  return {plans_.size(), windows_.size()};
}

std::unique_ptr<Pending> Communicator::start(Request request, const Deadline& deadline) {
  LaneLock turn(lane_locks_, rendezvous_.get(), checked_lane(request.lane), deadline);
  check_alive();
  request.capture = request.uncaptured ? 0 : backend_->capture_of(request.streams);
  if (request.capture != 0 && request.view()) {
    fail(Code::unsupported,
         "a view cannot be captured: each replay would have to take another slot; ",
         "pass an output");
  }
  const Lookup lookup = look_up(request);
  std::shared_ptr<CachedPlan> plan = lookup.plan;
  if (plan == nullptr || request.capture != 0) {
    plan = first_call(request, lookup, turn);
    check_alive();
  } else {
    Lane& known = *lanes_.at(request.lane);
    // What was published when the ranks first met stands: a peer may still be reading it.
    if (std::exchange(known.refused, nullptr) != plan->entry) publish(known, *plan->entry, turn);
    ++known.sequence;
    log_.debug("call ", known.sequence - 1, " of lane ", known.index, ": ", plan->entry->text);
  }
  Lane& lane = *lanes_.at(request.lane);

  auto pending = std::make_unique<Pending>();
  pending->communicator_ = shared_from_this();
  pending->result_ = plan->result;
  pending->lane_ = &lane;
  pending->sequence_ = lane.sequence - 1;
  pending->entry_ = plan->entry;
  pending->stream_ = request.streams.empty() ? 0 : request.streams[0];
  try {
    all_or_none([&] { launch(*plan, request, lane, *pending); });
  } catch (const Refused&) {
    --lane.sequence;
    lane.refused = plan->entry;
    throw;
  }
  if (plan->credits) {
    pending->plan_ = plan;
    pending->launch_ = plan->launches;
  }
  return pending;
}

void Communicator::publish(Lane& lane, const Entry& entry, LaneLock& turn) {
  if (alone()) return;
  const uint64_t sequence = lane.sequence;
  const Rank own = local_ranks_[0];
  // No rank runs so far ahead that it overwrites records which a peer still has to read.
  if (sequence % (kAheadMax / 2) == 0 && sequence >= kAheadMax) {
    for (Rank peer = 0; peer < ranks_; ++peer) {
      while (lane.journal.published(peer) + kAheadMax < sequence) {
        check_alive();
        if (turn.deadline().passed()) {
          fail(Code::timeout, "rank ", peer, " is ", kAheadMax, " calls behind on lane ",
               lane.index, ": it has made ", lane.journal.published(peer));
        }
        turn.unlocked([&] {
          std::this_thread::sleep_for(std::chrono::microseconds(50));
          turn.deadline().listen();
        });
      }
    }
  }
  lane.journal.publish(own, sequence, entry);
  lane.refused.reset();
  if (entry.decided) return;
  for (Rank peer = 0; peer < ranks_; ++peer) wake(wakeup(peer));
}

void Communicator::barrier(const Deadline& deadline) {
  Request request{.collective = Collective::all_gather,
                  .counts = std::vector<uint64_t>(ranks_, 0),
                  .variant = "b2b",
                  .protocol = Wanted::promise,
                  .out = std::vector<Operand>(local_ranks_.size()),
                  .in = std::vector<Operand>(local_ranks_.size())};
  start(std::move(request), deadline)->wait(deadline);
}

void Communicator::check() const {
  const std::scoped_lock lock(lane_locks_.mutex);
  check_alive();
}

void Communicator::abort() {
  aborted_ = true;
  for (Rank rank = 0; rank < ranks_; ++rank) poison(wakeup(rank), local_ranks_[0]);
}

void Communicator::close() {
  const std::scoped_lock lock(lane_locks_.mutex);
  if (closed_) return;
  closed_ = true;
  plans_.clear();  // engines let go of what was armed
  std::erase_if(windows_, [](const Numbered& made) { return made.registered != nullptr; });
  if (rendezvous_) {
    rendezvous_->on_peer_loss(nullptr);
    rendezvous_->close();
  }
}

Pending::~Pending() = default;

bool Pending::done() { return run_->done(); }

void Pending::release(const std::vector<uintptr_t>& streams) {
  if (result_->protocol != "credits") {
    fail(Code::invalid, result_->op, " ran with protocol ", result_->protocol,
         ": only an operation of protocol credits can be released");
  }
  Communicator& communicator = *communicator_;
  const std::scoped_lock lock(communicator.lane_locks_.mutex);
  communicator.check_alive();
  if (communicator.backend_->capture_of(streams) != 0) {
    fail(Code::unsupported,
         "a release cannot be captured: captured operations enter by themselves");
  }
  if (plan_->credited || plan_->launches != launch_) return;
  communicator.grant(*plan_, *lane_, streams);
}

void Pending::follow(uintptr_t stream) {
  communicator_->check();
  Streams* const streams = communicator_->backend_->capabilities().streams;
  if (stream == stream_ || streams == nullptr) return;
  streams->enqueue_wait(*run_, stream);
}

Result Pending::wait(const Deadline& deadline) {
  Communicator& communicator = *communicator_;
  wait_in_slices(*run_, deadline, [&](const Error& error) {
    // Before a timeout or a peer's abort is believed: have the ranks diverged?
    communicator.compare_with_peers(*lane_, sequence_, *entry_);
    if (error.code() == Code::peer && communicator.aborted_) {
      fail(Code::cancelled, "aborted by this rank: ", error.message());
    }
  });
  communicator.compare_with_peers(*lane_, sequence_, *entry_);
  Result result = *result_;
  result.armed_ahead = armed_ahead_;
  result.report = run_->report();
  result.native = result.native && result.report.native;
  if (result.own_copy != "none") result.own_copy = to_string(result.report.own_copy);
  return result;
}

}  // namespace offcore
