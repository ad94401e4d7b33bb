#include "core/backend/cuda/capture.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "core/backend/cuda/fleet.h"

namespace offcore::cuda {
namespace {

constexpr auto kLook = std::chrono::milliseconds(2);
constexpr uint32_t kCapturedValue = 1;  // of every word: verify asks for that
constexpr uint32_t kQuietLooks = 50;    // in a row without a poll, before replays count as over

struct State {
  int status = kCaptureNone;
  uint64_t id = 0;
  CUgraph graph = nullptr;  // that is being captured into
};

State state_of(const Device& device, CUstream stream) {
  const Current current = device.current();
  State state;
  check(Driver::get().cuStreamGetCaptureInfo(stream, &state.status, &state.id, &state.graph,
                                             nullptr, nullptr),
        "cuStreamGetCaptureInfo");
  return state;
}

// The capture that a caller's stream is in; 0: none.
uint64_t id_of(const Device& device, uintptr_t stream) {
  if (stream <= kLegacyStream) return 0;  // the legacy default stream cannot be captured
  const State state = state_of(device, reinterpret_cast<CUstream>(stream));
  if (state.status == kCaptureNone) return 0;
  if (state.status != kCaptureActive) {
    fail(Code::invalid, "this stream's capture is spoilt already, by an earlier call that no ",
         "capture allows: end it and capture again");
  }
  if (stream == kPerThreadStream) {
    fail(Code::unsupported, "the per-thread default stream is being captured: capture a stream ",
         "that was made for it");
  }
  return state.id;
}

// How many commands a queue has before it waits for what its peers have delivered. A queue that
// tells its peers something waits for their entry first.
size_t until_peers(std::span<const Command> commands) {
  const auto is = [](Op op) { return [op](const Command& command) { return command.op == op; }; };
  const auto told = std::find_if(commands.begin(), commands.end(), is(Op::signal));
  const auto from = told == commands.end() ? commands.begin() : told;
  return static_cast<size_t>(std::find_if(from, commands.end(), is(Op::poll)) - commands.begin());
}

}  // namespace

Captures::Captures(std::span<const std::shared_ptr<Device>> devices, const Habits& habits,
                   std::shared_ptr<Rings> rings, std::shared_ptr<Words> words)
    : devices_(devices.begin(), devices.end()),
      habits_(habits),
      rings_(std::move(rings)),
      words_(std::move(words)),
      streams_(devices_.size()) {}

Captures::~Captures() { close(); }

uint64_t Captures::capture_of(std::span<const uintptr_t> streams) const {
  uint64_t first = 0;
  for (size_t i = 0; i < streams.size() && i < devices_.size(); ++i) {
    const uint64_t id = id_of(*devices_[i], streams[i]);
    if (i == 0) first = id;
    if ((id == 0) == (first == 0)) continue;
    fail(Code::invalid, "the stream of rank ", devices_[0]->rank(), " is ",
         first == 0 ? "not " : "", "being captured, that of rank ", devices_[i]->rank(), " is ",
         id == 0 ? "not" : "", ": capture all of them or none");
  }
  return first;
}

Captures::Capture& Captures::capture(const Launch& launch) {
  std::vector<uint64_t> ids;
  for (size_t i = 0; i < launch.streams.size(); ++i) {
    ids.push_back(id_of(*devices_[i], launch.streams[i]));
  }
  if (ids.empty() || std::find(ids.begin(), ids.end(), 0) != ids.end()) {
    fail(Code::invalid, "a program of mode capture is launched into streams that are being ",
         "captured, and these are not");
  }
  std::erase_if(captures_, [](const auto& entry) { return entry.second.gone->load(); });
  auto found = captures_.find(ids[0]);
  if (found == captures_.end()) {
    Capture made{
        .ids = ids, .places = std::vector<Place>(devices_.size()), .gone = tell_when_gone(launch)};
    found = captures_.emplace(ids[0], std::move(made)).first;
  }
  if (found->second.ids == ids) return found->second;
  fail(Code::invalid, "the streams of the local ranks are in other captures than at the last ",
       "operation of this graph: capture the same ones together");
}

// Gives the graphs a reference each to one object: without any left it is destroyed, and says so.
Captures::Gone Captures::tell_when_gone(const Launch& launch) const {
  const Driver& driver = Driver::get();
  auto gone = std::make_shared<std::atomic<bool>>(false);
  if (driver.cuUserObjectCreate == nullptr || driver.cuUserObjectRelease == nullptr ||
      driver.cuGraphRetainUserObject == nullptr) {
    return gone;  // never: nothing of this capture is used again
  }
  // Called on a thread of the driver's, at any time, where no call of the driver's is allowed.
  const auto destroyed = [](void* object) {
    const std::unique_ptr<Gone> held(static_cast<Gone*>(object));
    (*held)->store(true);
  };
  const Current current = devices_[0]->current();
  auto held = std::make_unique<Gone>(gone);
  CUuserObject object = nullptr;
  check(driver.cuUserObjectCreate(&object, held.get(), destroyed, 1, kNoDestructorSync),
        "cuUserObjectCreate");
  held.release();
  CUresult result = kSuccess;
  for (size_t i = 0; i < launch.streams.size() && result == kSuccess; ++i) {
    const State state = state_of(*devices_[i], reinterpret_cast<CUstream>(launch.streams[i]));
    result = driver.cuGraphRetainUserObject(state.graph, object, 1, 0);
  }
  check(driver.cuUserObjectRelease(object, 1), "cuUserObjectRelease");
  check(result, "cuGraphRetainUserObject");
  return gone;
}

bool Captures::gone(uint64_t capture) {
  const std::scoped_lock lock(mutex_);
  const auto found = captures_.find(capture);
  return found == captures_.end() || found->second.gone->load();
}

std::shared_ptr<Flight> Captures::record(std::shared_ptr<const Cargo> cargo, const Launch& launch) {
  if (cargo->timed) fail(Code::unsupported, "timestamps cannot be captured: leave them out");
  const std::scoped_lock lock(mutex_);
  Capture& own = capture(launch);
  for (size_t i = signals_.size(); i < devices_.size(); ++i) {
    signals_.push_back({.word = std::make_unique<Word>(devices_[i], words_),
                        .presets = std::make_unique<Presets>(devices_[i], words_)});
    signals_.back().presets->prepare(0, Presets::kHalf);
  }
  auto flight = std::make_shared<Flight>(std::move(cargo), launch);
  keep(own, flight);
  try {
    for (const LocalProgram& local : flight->cargo->locals) {
      record(*flight, local, own.places[local.device]);
    }
  } catch (...) {
    spoil(launch);
    throw;
  }
  return flight;
}

void Captures::record(Flight& flight, const LocalProgram& local, Place& place) {
  const Device& device = *devices_[local.device];
  const Program& program = *flight.cargo->program;
  const Current current = device.current();
  const auto stream = reinterpret_cast<CUstream>(flight.launch.streams[local.device]);
  Notes& notes = flight.parts[static_cast<size_t>(&local - flight.cargo->locals.data())].notes;
  const Signals& signals = signals_[local.device];
  const auto feed = [&](CUstream where) {
    const Source source{signals.word->address(), words_->ring(), signals.presets.get()};
    return Feed(device, where, source, program, flight.launch, *rings_, habits_, nullptr, notes);
  };
  std::span<const Command> caller;
  std::span<const Command> inside;  // the engine queue that runs in the caller's stream
  if (local.caller) caller = program.queues[*local.caller].commands;
  const size_t first = local.joined && !local.engines.empty() ? 1 : 0;
  if (first == 1) inside = program.queues[local.engines[0]].commands;

  if (place.last_done != nullptr && place.last_stream != stream) place.last_done->hold(stream);
  Feed own = feed(stream);
  own.expect(inside);
  own.lead(caller.first(local.leading));
  std::vector<Event> joins;
  if (local.engines.size() > first) {
    const Event here = device.event();
    here.record(stream);
    for (size_t i = first; i < local.engines.size(); ++i) {
      const CUstream forked = engine(place, local.device, i - first, here);
      feed(forked).whole(program.queues[local.engines[i]].commands);
      joins.push_back(device.event());
      joins.back().record(forked);
    }
  }
  own.run(inside.first(until_peers(inside)));
  for (const Event& join : joins) join.hold(stream);
  own.run(inside.subspan(until_peers(inside)));
  own.run(caller.subspan(local.leading));
  auto done = std::make_shared<Event>(device.event());
  done->record(stream);
  place.last_stream = stream;
  place.last_done = std::move(done);
}

// Half of a program must not be replayed. To ask after a captured stream is what no capture allows.
void Captures::spoil(const Launch& launch) const {
  for (size_t i = 0; i < launch.streams.size(); ++i) {
    const Current current = devices_[i]->current();
    Driver::get().cuStreamQuery(reinterpret_cast<CUstream>(launch.streams[i]));
  }
}

// A stream of ours that joins the capture here. One that another capture holds shows it.
CUstream Captures::engine(Place& place, uint32_t device, size_t index, const Event& here) {
  if (index < place.engines.size()) {
    here.hold(place.engines[index]);
    return place.engines[index];
  }
  auto& streams = streams_[device];
  const auto idle = [&](const std::unique_ptr<Stream>& stream) {
    return state_of(*devices_[device], stream->handle()).status == kCaptureNone;
  };
  auto found = std::find_if(streams.begin(), streams.end(), idle);
  if (found == streams.end()) found = streams.insert(found, devices_[device]->stream());
  here.hold((*found)->handle());
  place.engines.push_back((*found)->handle());
  return place.engines.back();
}

void Captures::keep(const Capture& capture, const std::shared_ptr<Flight>& flight) {
  Awaited words(devices_.size());
  for (const LocalProgram& local : flight->cargo->locals) {
    const auto index = static_cast<uint32_t>(&local - flight->cargo->locals.data());
    for (CUdeviceptr word : flight->awaited(index, *rings_)) words[local.device].insert(word);
  }
  const std::scoped_lock lock(kept_mutex_);
  if (closed_) fail(Code::cancelled, "the cuda backend is closed");
  Kept& kept = kept_[capture.ids[0]];
  kept.gone = capture.gone;
  kept.flights.push_back(flight);
  kept.awaited.resize(devices_.size());
  for (size_t i = 0; i < words.size(); ++i) kept.awaited[i].merge(words[i]);
  if (!guard_.joinable()) guard_ = std::thread([this] { watch(); });
}

std::vector<Captures::Kept> Captures::take_gone() {
  std::vector<Kept> taken;
  std::erase_if(kept_, [&](auto& entry) {
    if (!entry.second.gone->load()) return false;
    taken.push_back(std::move(entry.second));
    return true;
  });
  return taken;
}

bool Captures::poisoned() const {
  return !kept_.empty() && kept_.begin()->second.flights.front()->poisoned() != 0;
}

Captures::Awaited Captures::awaited() const {
  Awaited all(devices_.size());
  for (const auto& [capture, kept] : kept_) {
    for (size_t i = 0; i < all.size(); ++i) {
      all[i].insert(kept.awaited[i].begin(), kept.awaited[i].end());
    }
  }
  return all;
}

void Captures::watch() {
  std::unique_lock lock(kept_mutex_);
  while (!wake_.wait_for(lock, kLook, [&] { return closed_; })) {
    std::vector<Kept> gone = take_gone();
    const Awaited words = poisoned() ? awaited() : Awaited{};
    lock.unlock();
    gone.clear();  // unmaps what nobody else holds
    try {
      release(words);
    } catch (const Error&) {
      return;  // the GPU itself has failed, and holds nobody any more
    }
    lock.lock();
  }
}

void Captures::release(const Awaited& awaited) const {
  for (size_t i = 0; i < awaited.size(); ++i) {
    devices_[i]->write_words({awaited[i].begin(), awaited[i].end()}, kCapturedValue);
  }
}

bool Captures::untouched(const Awaited& awaited) const {
  const auto ring_of = [&](CUdeviceptr word) {
    return rings_->find(reinterpret_cast<const void*>(word));
  };
  for (size_t i = 0; i < awaited.size(); ++i) {
    for (auto word = awaited[i].begin(); word != awaited[i].end();) {
      // The words of one window lie in one mapping, and are read together.
      const Ring* ring = ring_of(*word);
      auto end = std::next(word);
      while (end != awaited[i].end() && ring != nullptr && ring_of(*end) == ring) ++end;
      const CUdeviceptr first = *word;
      std::vector<std::byte> bytes(*std::prev(end) - first + sizeof(uint32_t));
      devices_[i]->copy(bytes.data(), reinterpret_cast<const void*>(first), bytes.size());
      for (; word != end; ++word) {
        uint32_t value = 0;
        std::memcpy(&value, &bytes[*word - first], sizeof value);
        if (value != kCapturedValue) return false;
      }
    }
  }
  return true;
}

// A replay that is still enqueued consumes words. Once none has for a while there is none.
void Captures::run_out() {
  const Deadline deadline = Deadline::after_s(kRunOutS);
  for (uint32_t quiet = 0; quiet < kQuietLooks; ++quiet) {
    if (deadline.passed()) {
      fail(Code::driver, "replays of aborted graphs do not run out within ",
           shown_s(deadline.wait_ns()), " s");
    }
    release(awaited());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (!untouched(awaited())) quiet = 0;
  }
}

void Captures::close() {
  {
    const std::scoped_lock lock(kept_mutex_);
    closed_ = true;
  }
  wake_.notify_all();
  if (guard_.joinable()) guard_.join();
  take_gone();
  if (poisoned()) {
    try {
      run_out();
    } catch (const Error&) {
      new std::map<uint64_t, Kept>(std::move(kept_));  // mapped for good
    }
  }
  kept_.clear();
  const std::scoped_lock lock(mutex_);
  captures_.clear();
  streams_.clear();
  signals_.clear();
}

}  // namespace offcore::cuda
