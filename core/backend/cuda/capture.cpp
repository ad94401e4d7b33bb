#include "core/backend/cuda/capture.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "core/backend/cuda/executor.h"

namespace offcore::cuda {
namespace {

constexpr auto kLook = std::chrono::milliseconds(2);
constexpr uint32_t kCapturedValue = 1;  // of every word: verify asks for that
constexpr uint32_t kQuietLooks = 50;    // in a row without a poll, before replays count as over

struct CaptureState {
  int status = kCaptureNone;
  uint64_t id = 0;
  CUgraph graph = nullptr;  // that is being captured into
};

CaptureState state_of(const LocalGpu& device, CUstream stream) {
  const ContextGuard current = device.enqueuing();
  CaptureState state;
  check(Driver::get().cuStreamGetCaptureInfo(stream, &state.status, &state.id, &state.graph,
                                             nullptr, nullptr),
        "cuStreamGetCaptureInfo");
  return state;
}

// The capture that a caller's stream is in; 0: none.
uint64_t id_of(const LocalGpu& device, uintptr_t stream) {
  if (stream <= kLegacyStream) return 0;  // the legacy default stream cannot be captured
  const CaptureState state = state_of(device, reinterpret_cast<CUstream>(stream));
  if (state.status == kCaptureNone) return 0;
  if (state.status != kCaptureActive) {
    fail(Code::invalid, "this stream's capture was already invalidated by an earlier call that no ",
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

Captures::Captures(std::span<const std::shared_ptr<LocalGpu>> devices, const EncodeOptions& options,
                   std::shared_ptr<MappingTable> mappings, std::shared_ptr<SignalWords> words)
    : devices_(devices.begin(), devices.end()),
      options_(options),
      mappings_(std::move(mappings)),
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
    Capture made{.ids = ids,
                 .places = std::vector<DeviceCapture>(devices_.size()),
                 .gone = tell_when_gone(launch)};
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
  const ContextGuard current = devices_[0]->current();
  auto held = std::make_unique<Gone>(gone);
  CUuserObject object = nullptr;
  check(driver.cuUserObjectCreate(&object, held.get(), destroyed, 1, kNoDestructorSync),
        "cuUserObjectCreate");
  held.release();
  CUresult result = kSuccess;
  for (size_t i = 0; i < launch.streams.size() && result == kSuccess; ++i) {
    const CaptureState state =
        state_of(*devices_[i], reinterpret_cast<CUstream>(launch.streams[i]));
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

std::shared_ptr<CudaSubmission> Captures::record(std::shared_ptr<const CudaProgram> compiled,
                                                 const Launch& launch) {
  if (compiled->timestamps > 0)
    fail(Code::unsupported, "timestamps cannot be captured: leave them out");
  const std::scoped_lock lock(mutex_);
  Capture& own = capture(launch);
  for (size_t i = signals_.size(); i < devices_.size(); ++i) {
    signals_.push_back({.word = std::make_unique<SignalWord>(devices_[i], words_),
                        .signal_table = std::make_unique<SignalTable>(devices_[i], words_)});
    signals_.back().signal_table->prepare(0, SignalTable::kHalf);
  }
  auto submission = std::make_shared<CudaSubmission>(std::move(compiled), launch);
  keep(own, submission);
  try {
    for (const LocalProgram& local : submission->compiled.gpus) {
      record(*submission, local, own.places[local.device]);
    }
  } catch (...) {
    spoil(launch);
    throw;
  }
  return submission;
}

void Captures::record(CudaSubmission& submission, const LocalProgram& local, DeviceCapture& place) {
  const LocalGpu& device = *devices_[local.device];
  const Program& program = *submission.program;
  const ContextGuard current = device.current();
  const auto stream = reinterpret_cast<CUstream>(submission.launch.streams[local.device]);
  SubmitStats& stats =
      submission.parts[static_cast<size_t>(&local - submission.compiled.gpus.data())].stats;
  const Signals& signals = signals_[local.device];
  const auto encoder = [&](CUstream where) {
    const SignalSource source{signals.word->address(), words_->mapping(),
                              signals.signal_table.get()};
    return StreamEncoder(device, where, source, program, submission.launch, *mappings_, options_,
                         nullptr, stats);
  };
  std::span<const Command> inside;  // the engine queue that runs in the caller's stream
  const size_t first = local.joined && !local.engines.empty() ? 1 : 0;
  if (first == 1) inside = program.queues[local.engines[0]].commands;

  if (place.last_done != nullptr && place.last_stream != stream)
    place.last_done->enqueue_wait(stream);
  StreamEncoder own = encoder(stream);
  own.expect(inside);
  own.lead(local.caller.first(local.leading));
  // One after another: branches of a graph may share a channel, and these wait for each other.
  for (const auto& [gpu, step] : submission.compiled.serial) {
    if (&submission.compiled.gpus[gpu] != &local) continue;
    const std::span<const Command> commands = program.queues[step.queue].commands;
    own.run(commands.subspan(step.first, step.last - step.first));
  }
  std::vector<CudaEvent> joins;
  if (local.engines.size() > first && !submission.compiled.interleaved) {
    const CudaEvent here = device.event();
    here.record(stream);
    for (size_t i = first; i < local.engines.size(); ++i) {
      const CUstream forked = engine(place, local.device, i - first, here);
      encoder(forked).whole(program.queues[local.engines[i]].commands);
      joins.push_back(device.event());
      joins.back().record(forked);
    }
  }
  own.run(inside.first(until_peers(inside)));
  for (const CudaEvent& join : joins) join.enqueue_wait(stream);
  own.run(inside.subspan(until_peers(inside)));
  if (!submission.compiled.interleaved) own.run(local.caller.subspan(local.leading));
  auto done = std::make_shared<CudaEvent>(device.event());
  done->record(stream);
  place.last_stream = stream;
  place.last_done = std::move(done);
}

// Half of a program must not be replayed. To ask after a captured stream is what no capture allows.
void Captures::spoil(const Launch& launch) const {
  for (size_t i = 0; i < launch.streams.size(); ++i) {
    const ContextGuard current = devices_[i]->current();
    Driver::get().cuStreamQuery(reinterpret_cast<CUstream>(launch.streams[i]));
  }
}

// A stream of ours that joins the capture here. One that another capture holds shows it.
CUstream Captures::engine(DeviceCapture& place, uint32_t device, size_t index,
                          const CudaEvent& here) {
  if (index < place.engines.size()) {
    here.enqueue_wait(place.engines[index]);
    return place.engines[index];
  }
  auto& streams = streams_[device];
  const auto idle = [&](const std::unique_ptr<CudaStream>& stream) {
    return state_of(*devices_[device], stream->handle()).status == kCaptureNone;
  };
  auto found = std::find_if(streams.begin(), streams.end(), idle);
  if (found == streams.end()) found = streams.insert(found, devices_[device]->gpu().stream());
  here.enqueue_wait((*found)->handle());
  place.engines.push_back((*found)->handle());
  return place.engines.back();
}

void Captures::keep(const Capture& capture, const std::shared_ptr<CudaSubmission>& submission) {
  Awaited words(devices_.size());
  for (const LocalProgram& local : submission->compiled.gpus) {
    const auto index = static_cast<uint32_t>(&local - submission->compiled.gpus.data());
    for (CUdeviceptr word : submission->awaited(index, *mappings_))
      words[local.device].insert(word);
  }
  const std::scoped_lock lock(kept_mutex_);
  if (closed_) fail(Code::cancelled, "the cuda backend is closed");
  RecordedCapture& kept = kept_[capture.ids[0]];
  kept.gone = capture.gone;
  kept.submissions.push_back(submission);
  kept.awaited.resize(devices_.size());
  for (size_t i = 0; i < words.size(); ++i) kept.awaited[i].merge(words[i]);
  if (!guard_.joinable()) guard_ = std::thread([this] { watch(); });
}

std::vector<Captures::RecordedCapture> Captures::take_gone() {
  std::vector<RecordedCapture> taken;
  std::erase_if(kept_, [&](auto& entry) {
    if (!entry.second.gone->load()) return false;
    taken.push_back(std::move(entry.second));
    return true;
  });
  return taken;
}

bool Captures::poisoned() const {
  return !kept_.empty() && kept_.begin()->second.submissions.front()->poisoned() != 0;
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
    std::vector<RecordedCapture> gone = take_gone();
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
    devices_[i]->gpu().write_words({awaited[i].begin(), awaited[i].end()}, kCapturedValue);
  }
}

bool Captures::untouched(const Awaited& awaited) const {
  const auto ring_of = [&](CUdeviceptr word) {
    return mappings_->find(reinterpret_cast<const void*>(word));
  };
  for (size_t i = 0; i < awaited.size(); ++i) {
    for (auto word = awaited[i].begin(); word != awaited[i].end();) {
      // The words of one window lie in one mapping, and are read together.
      const PeerMapping* mapping = ring_of(*word);
      auto end = std::next(word);
      while (end != awaited[i].end() && mapping != nullptr && ring_of(*end) == mapping) ++end;
      const CUdeviceptr first = *word;
      std::vector<std::byte> bytes(*std::prev(end) - first + sizeof(uint32_t));
      devices_[i]->gpu().read(bytes.data(), reinterpret_cast<const void*>(first), bytes.size());
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
      fail(Code::driver, "replays of aborted graphs did not end within ",
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
      new std::map<uint64_t, RecordedCapture>(std::move(kept_));  // mapped for good
    }
  }
  kept_.clear();
  const std::scoped_lock lock(mutex_);
  captures_.clear();
  streams_.clear();
  signals_.clear();
}

}  // namespace offcore::cuda
