#include "core/backend/cuda/fleet.h"

#include <algorithm>
#include <utility>

#include "core/backend/wakeup.h"
#include "core/base/env.h"
#include "core/base/threads.h"

namespace offcore::cuda {
namespace {

constexpr uint32_t kLooks = 50;  // of a microsecond or less
constexpr int64_t kSpinNs = 200'000;
constexpr double kReleaseS = 10.0;
constexpr uint32_t kBeyond = 0x40000000;  // past every value that a wait of the lane waits for

// A GPU that does not let go of memory: it stays mapped for good.
void leak(std::shared_ptr<void> memory) { new std::shared_ptr<void>(std::move(memory)); }

bool has_batches(const Cargo& cargo, const LocalProgram& local) {
  return std::any_of(local.engines.begin(), local.engines.end(), [&](uint32_t engine) {
    const std::span<const Command> commands = cargo.program->queues[engine].commands;
    const auto data = std::find_if(commands.begin(), commands.end(),
                                   [](const Command& command) { return moves_data(command.op); });
    return worth_batches(commands.subspan(static_cast<size_t>(data - commands.begin())));
  });
}

}  // namespace

Fleet::Fleet(Rank ranks, std::vector<std::shared_ptr<Device>> devices, Habits habits)
    : ranks_(ranks),
      devices_(std::move(devices)),
      habits_(habits),
      channels_(env("CUDA_DEVICE_MAX_CONNECTIONS")),
      rings_(std::make_shared<Rings>()),
      words_(std::make_shared<Words>(ranks, devices_)),
      captures_(devices_, habits_, rings_, words_) {}

void Fleet::try_strided(Ring& ring) {
  const std::scoped_lock lock(mutex_);
  std::optional<bool>& tried = tried_[ring.stride() <= kPitchMax];
  if (!tried) tried = ring.try_strided(devices_);
  ring.set_strided(*tried);
  if (!*tried) strided_works_ = false;
}

void Fleet::alias_copies(const Ring& ring) {
  const std::scoped_lock lock(mutex_);
  for (const auto& device : devices_) {
    if (device->engine_alias() != nullptr) continue;
    if (auto foreign = ring.part_elsewhere(device->ordinal()))
      device->make_alias(std::move(foreign));
  }
}

Fleet::Lane& Fleet::lane(uint32_t index, uint32_t device) {
  Lane& lane = lanes_[{index, device}];
  if (!lane.caller) {
    lane.caller = std::make_unique<Line>(devices_[device], words_);
    lane.presets = std::make_unique<Presets>(devices_[device], words_);
  }
  return lane;
}

Line& Fleet::engine(Lane& lane, uint32_t device, size_t index) {
  while (lane.engines.size() <= index) {
    lane.engines.push_back(std::make_unique<Line>(devices_[device], words_));
  }
  return *lane.engines[index];
}

void Fleet::check_launch(const Cargo& cargo, const Launch& launch) const {
  try {
    check_places(cargo, launch);
  } catch (const Error& error) {
    throw Refused(error);
  }
}

void Fleet::check_places(const Cargo& cargo, const Launch& launch) const {
  const Program& program = *cargo.program;
  if (launch.binding.ranks() != program.ranks || launch.wakeups.size() != program.ranks ||
      launch.binding.buffers() != program.buffers.size() ||
      std::find(launch.wakeups.begin(), launch.wakeups.end(), nullptr) != launch.wakeups.end() ||
      (!launch.streams.empty() && launch.streams.size() != devices_.size())) {
    fail(Code::invalid, program.op, " needs bases of ", program.buffers.size(), " buffers at ",
         program.ranks, " ranks, a wakeup for each rank, and no streams or one for each of the ",
         devices_.size(), " local ranks");
  }
  for (const auto& [buffer, rank] : cargo.bases) {
    const std::byte* base = launch.binding.base(buffer, rank);
    if (base == nullptr) {
      fail(Code::invalid, "buffer ", program.buffers[buffer].name, " of ",
           rank == kHostRank ? "the host" : cat("rank ", rank), " is not mapped here");
    }
    if (program.buffers[buffer].kind != Buffer::Kind::local || rings_->find(base) != nullptr) {
      continue;
    }
    const Current current = devices_.front()->current();
    int type = 0;
    const CUresult result = Driver::get().cuPointerGetAttribute(
        &type, kPointerMemoryType, reinterpret_cast<CUdeviceptr>(base));
    if (result != kInvalidValue) check(result, "cuPointerGetAttribute");
    if (result == kInvalidValue || type == 0) {
      fail(Code::invalid, "buffer ", program.buffers[buffer].name, " of rank ", rank,
           " is ordinary host memory, which GPUs' copy engines cannot reach; pass a tensor on the "
           "GPU, a window, or host memory of Communicator.host_array()");
    }
  }
}

Feed Fleet::feed(const Flight& flight, const Turn& turn, CUstream stream, CUdeviceptr word) const {
  Habits habits = habits_;
  habits.parked = parked_lines_ > 0;
  const Presets* presets = habits.parked ? nullptr : turn.lane->presets.get();
  return Feed(*turn.device, stream, {word, words_->ring(), presets}, *flight.cargo->program,
              flight.launch, *rings_, habits, nullptr, turn.part->notes);
}

// Chooses the stream, puts the lane in order, and feeds what the caller does before it waits.
Fleet::Turn Fleet::begin(Flight& flight, const LocalProgram& local) {
  Lane& own = lane(flight.launch.lane, local.device);
  Turn turn{.local = &local,
            .device = devices_[local.device].get(),
            .lane = &own,
            .stream = own.caller->stream(),
            .named = nullptr,
            .part = &flight.parts[static_cast<size_t>(&local - flight.cargo->locals.data())],
            .own = nullptr,
            .joins = {}};
  const uintptr_t given = flight.launch.streams.empty() ? 0 : flight.launch.streams[local.device];
  // The per-thread default stream is another one in each thread, under one name: the lane's own
  // stream stands in for it. So it does for the legacy one where that costs less than to make one
  // by one the copies of which it takes no batches.
  const bool named =
      given == kPerThreadStream || (given == kLegacyStream && has_batches(*flight.cargo, local));
  if (given != 0 && !named) turn.stream = reinterpret_cast<CUstream>(given);
  if (own.last_done != nullptr && own.last_stream != turn.stream) own.last_done->hold(turn.stream);
  own.presets->prepare(flight.launch.epoch + 1, flight.cargo->program->flag_span);
  if (named) {
    turn.named = reinterpret_cast<CUstream>(given);
    const Event fork = turn.device->event();
    fork.record(turn.named);
    fork.hold(turn.stream);
  }
  if (flight.cargo->timed) {
    turn.part->start.emplace(turn.device->event(true));
    turn.part->start->record(turn.stream);
    turn.part->start_ns = now_ns() - flight.launch_ns;
  }
  return turn;
}

// Further engine queues start where the caller's stream stands now.
void Fleet::fork(Turn& turn) {
  const LocalProgram& local = *turn.local;
  const size_t inside = local.joined ? 1 : 0;
  if (local.engines.size() <= inside) return;
  const Event here = turn.device->event();
  here.record(turn.stream);
  for (size_t i = inside; i < local.engines.size(); ++i) {
    here.hold(engine(*turn.lane, local.device, i).stream());
  }
}

// Engine queues that were not parked: one with the caller where that can be, the others forked.
void Fleet::engines(Flight& flight, Turn& turn) {
  const auto& queues = flight.cargo->program->queues;
  const LocalProgram& local = *turn.local;
  const size_t inside = local.joined && !local.engines.empty() ? 1 : 0;
  for (size_t i = inside; i < local.engines.size(); ++i) {
    Line& line = engine(*turn.lane, local.device, i);
    feed(flight, turn, line.stream(), line.word()).whole(queues[local.engines[i]].commands);
    turn.joins.push_back(turn.device->event());
    turn.joins.back().record(line.stream());
  }
  if (inside == 1) turn.own->add(queues[local.engines[0]].commands);
}

void Fleet::end(Flight& flight, Turn& turn) {
  const LocalProgram& local = *turn.local;
  if (local.caller) {
    const std::span<const Command> commands = flight.cargo->program->queues[*local.caller].commands;
    turn.own->add(commands.subspan(local.leading));
  }
  turn.own->flush();
  for (const Event& join : turn.joins) join.hold(turn.stream);
  auto done = std::make_shared<Event>(turn.device->event());
  done->record(turn.stream);
  if (turn.named != nullptr) done->hold(turn.named);
  turn.lane->last_stream = turn.stream;
  turn.lane->last_done = done;
  turn.lane->presets->used_until(done);
  turn.part->done = std::move(done);
}

// Rank by rank, but never all of one rank first: a queue too long for its stream would wait for
// ranks that have not begun.
void Fleet::enqueue(Flight& flight, std::vector<Turn>& turns, const Hangar& hangar,
                    const Parked* parked) {
  const auto& queues = flight.cargo->program->queues;
  for (const LocalProgram& local : flight.cargo->locals) {
    const Current current = devices_[local.device]->current();
    Turn& turn = turns.emplace_back(begin(flight, local));
    if (parked == nullptr) fork(turn);
    turn.own = std::make_unique<Feed>(feed(flight, turn, turn.stream, turn.lane->caller->word()));
    if (local.joined && !local.engines.empty()) {
      turn.own->expect(queues[local.engines[0]].commands);
    }
    if (!local.caller) continue;
    const std::span<const Command> commands = queues[*local.caller].commands;
    turn.own->lead(commands.first(local.leading));
  }
  for (size_t i = 0; i < turns.size(); ++i) {
    const Current current = turns[i].device->current();
    if (parked != nullptr) {
      resume(flight, turns[i], hangar, *parked, i);
    } else {
      engines(flight, turns[i]);
    }
  }
  for (Turn& turn : turns) {
    const Current current = turn.device->current();
    end(flight, turn);
  }
}

// Whether nothing of a launch is enqueued, and the GPUs still work.
bool Fleet::untouched(const Flight& flight) const {
  if (std::any_of(flight.parts.begin(), flight.parts.end(),
                  [](const Flight::Part& part) { return part.notes.submitted; })) {
    return false;
  }
  return std::all_of(devices_.begin(), devices_.end(),
                     [](const auto& device) { return device->works(); });
}

// Half of a launch is enqueued: nobody may take what it leaves for a result. It is poisoned, and
// released like any other once its streams' ends are known.
void Fleet::abandon(Flight& flight, std::vector<Turn>& turns) {
  flight.poison(devices_.front()->rank());
  try {
    for (Turn& turn : turns) {
      const Current current = turn.device->current();
      for (const auto& line : turn.lane->engines) {
        turn.joins.push_back(turn.device->event());
        turn.joins.back().record(line->stream());
      }
      for (const Event& join : turn.joins) join.hold(turn.stream);
      auto done = std::make_shared<Event>(turn.device->event());
      done->record(turn.stream);
      turn.part->done = std::move(done);
    }
  } catch (const Error&) {
    leak(std::move(flight.launch.owner));  // the driver is beyond telling
  }
}

std::shared_ptr<Flight> Fleet::launch(std::shared_ptr<const Cargo> cargo, const Launch& launch,
                                      Hangar& hangar) {
  const int64_t launch_ns = now_ns();
  const Current current = devices_.front()->current();  // once, for all that is called below
  check_launch(*cargo, launch);
  if (!hangar.parked.empty() && !(hangar.parked.front().launch.binding == launch.binding)) {
    recall(cargo, hangar);
  }
  std::vector<std::shared_ptr<void>> owners;  // freed without the mutex
  const std::scoped_lock lock(mutex_);
  if (closed_) fail(Code::cancelled, "the cuda backend is closed");
  owners = reap();
  const auto flight = std::make_shared<Flight>(cargo, launch);
  flight->launch_ns = launch_ns;
  std::optional<Parked> parked;
  if (!hangar.parked.empty()) {
    const Launch& ahead = hangar.parked.front().launch;
    if (ahead.epoch != launch.epoch || ahead.lane != launch.lane) {
      fail(Code::invalid, "armed for epoch ", ahead.epoch, " of lane ", ahead.lane,
           " but launched with epoch ", launch.epoch, " of lane ", launch.lane);
    }
    parked.emplace(std::move(hangar.parked.front()));
    hangar.parked.pop_front();
  }
  flying_.push_back(flight);
  std::vector<Turn> turns;
  try {
    enqueue(*flight, turns, hangar, parked ? &*parked : nullptr);
  } catch (const Error& error) {
    if (!parked && untouched(*flight)) {
      flying_.pop_back();
      throw Refused(Error(error.code(), cat(error.message(), "; nothing of ", cargo->program->op,
                                            " was enqueued, and it can be called again")));
    }
    abandon(*flight, turns);
    throw;
  } catch (...) {
    abandon(*flight, turns);
    throw;
  }
  flight->control_ns = now_ns() - launch_ns;
  return flight;
}

std::shared_ptr<Flight> Fleet::record(std::shared_ptr<const Cargo> cargo, const Launch& launch) {
  check_launch(*cargo, launch);
  return captures_.record(std::move(cargo), launch);
}

// Lets go of launches that have ended and that nobody waits for: of each lane the first ones. What
// they kept is for the caller to free without the mutex.
std::vector<std::shared_ptr<void>> Fleet::reap() {
  std::vector<std::shared_ptr<void>> owners;
  std::vector<uint32_t> busy;  // lanes
  std::erase_if(flying_, [&](const auto& flight) {
    if (std::find(busy.begin(), busy.end(), flight->launch.lane) != busy.end()) return false;
    if (!flight->ended()) {
      busy.push_back(flight->launch.lane);
      return false;
    }
    owners.push_back(std::move(flight->launch.owner));
    return true;
  });
  if (const auto dead = poisoned(); !dead.empty()) release(dead);
  return owners;
}

// Lets go of a launch that has been waited for, and of those before it that nobody waited for.
void Fleet::retire(Flight& flight) {
  std::vector<std::shared_ptr<void>> owners;  // freed without the mutex
  const std::scoped_lock lock(mutex_);
  std::erase_if(flying_, [&](const auto& candidate) { return candidate.get() == &flight; });
  owners.push_back(std::move(flight.launch.owner));
  while (!flying_.empty() && flying_.front()->ended()) {
    owners.push_back(std::move(flying_.front()->launch.owner));
    flying_.pop_front();
  }
}

std::vector<std::shared_ptr<Flight>> Fleet::poisoned() const {
  std::vector<std::shared_ptr<Flight>> flights;
  std::copy_if(flying_.begin(), flying_.end(), std::back_inserter(flights),
               [](const auto& flight) { return flight->poisoned() != 0; });
  return flights;
}

void Fleet::release_poisoned() {
  const std::scoped_lock lock(mutex_);
  release(poisoned());
}

// Writes the awaited words until all these launches are through. Signals that run out meanwhile
// may lower a word again, so it is written again.
void Fleet::release(const std::vector<std::shared_ptr<Flight>>& flights) {
  const Deadline deadline = Deadline::after_s(kReleaseS);
  for (const auto& flight : flights) flight->dead = flight->poisoned();
  for (uint32_t round = 0;; ++round) {
    bool through = true;
    for (const auto& flight : flights) {
      if (flight->ended()) continue;
      through = false;
      for (size_t i = 0; i < flight->cargo->locals.size(); ++i) {
        const Device& device = *devices_[flight->cargo->locals[i].device];
        const Current current = device.current();
        device.write_words(flight->awaited(static_cast<uint32_t>(i), *rings_),
                           flight->launch.epoch + kBeyond);
      }
    }
    if (through) break;
    if (deadline.passed()) {
      for (const auto& flight : flights) leak(flight);
      fail(Code::driver, "a GPU does not let go of an aborted operation within ",
           shown_s(deadline.wait_ns()), " s; its memory stays mapped: end this process");
    }
    nap(round * kSpinNs);
  }
  for (const auto& flight : flights) {
    std::erase(flying_, flight);
    flight->launch.owner.reset();
  }
}

void Fleet::wait(Flight& flight, const Deadline& deadline) {
  const std::string& op = flight.cargo->program->op;
  const int64_t began_ns = now_ns();
  const auto fail_poisoned = [&](uint32_t by) {
    fail(Code::peer, "rank ", by - 1, " died or aborted during ", op);
  };
  const Current current = devices_.front()->current();  // once, for all looks at it
  // A small operation ends while its host looks, which it does without a pause at first.
  for (uint32_t looks = 0; looks < kLooks && !flight.ended(); ++looks) pause_briefly();
  while (!flight.ended()) {
    if (const uint32_t by = flight.poisoned(); by != 0) {
      release_poisoned();
      fail_poisoned(by);
    }
    if (deadline.passed()) {
      fail(Code::timeout, op, " did not end within ", shown_s(deadline.wait_ns()),
           " s: ", flight.position(devices_));
    }
    nap(now_ns() - began_ns);
  }
  retire(flight);
  if (const uint32_t by = flight.dead.load(); by != 0) fail_poisoned(by);
}

void Fleet::hold(const Flight& flight, uintptr_t stream) const {
  for (size_t i = 0; i < flight.parts.size(); ++i) {
    const Current current = devices_[flight.cargo->locals[i].device]->current();
    flight.parts[i].done->hold(reinterpret_cast<CUstream>(stream));
  }
}

void Fleet::close() {
  captures_.close();
  const Deadline grace = Deadline::after_s(kGraceS);
  std::vector<std::shared_ptr<Flight>> flights;
  {
    const std::scoped_lock lock(mutex_);
    closed_ = true;
    flights.assign(flying_.begin(), flying_.end());
  }
  for (const auto& flight : flights) {
    while (!flight->ended() && flight->poisoned() == 0 && !grace.passed()) nap(kSpinNs);
    if (!flight->ended()) flight->poison(devices_.front()->rank());
  }
  release_poisoned();
  const std::scoped_lock lock(mutex_);
  for (const auto& flight : flying_) flight->launch.owner.reset();
  flying_.clear();
  lanes_.clear();
}

}  // namespace offcore::cuda
