// Programs that the engines hold ahead of their calls.
#include <algorithm>
#include <string_view>
#include <utility>

#include "core/backend/cuda/executor.h"
#include "core/base/threads.h"

namespace offcore::cuda {
namespace {

// An armed stream holds a channel of its GPU, and every stream that shares it stands still. The
// driver does not tell which do, so nothing is armed but where there are as many channels as can
// be. On 2 x H200, driver 580, with 8 channels, calls hung with 16 armed streams and with 4.
constexpr size_t kArmedStreamsMax = RequestEngine::kArmedStreamsMax;  // of a device
constexpr std::string_view kChannels = "32";
constexpr uint32_t kRecallsMax = 3;  // a program whose buffers keep changing is not armed
constexpr double kRecallS = 10.0;

}  // namespace

// What was kept back of armed engine queues.
void CudaExecutor::resume(CudaSubmission& submission, RankSubmission& turn, size_t index) {
  const LocalProgram& local = *turn.local;
  const auto& queues = submission.streams->queues[index];
  StreamEncoder gates = encoder(submission, turn, turn.stream, 0);
  for (size_t i = 0; i < local.aheads.size(); ++i) {
    for (const Command& poll : local.aheads[i].polls) gates.run(poll);
    gates.write(queues[i].gate->address(), submission.turn);
  }
  for (const ArmedQueue& queue : local.aheads) {
    for (const Command& command : queue.late) gates.run(command);
  }
  gates.flush();
  for (const CudaEvent& join : turn.part->joins) join.enqueue_wait(turn.stream);
  for (size_t i = 0; i < local.aheads.size(); ++i) {
    // The line's stream has done with its word: the caller's stream follows it.
    const CUdeviceptr word = queues[i].line->word();
    encoder(submission, turn, turn.stream, word).run(local.aheads[i].rest);
  }
}

void CudaExecutor::make_twins(const CudaProgram& compiled, const Launch& launch,
                              ArmedStreams& armed_streams) {
  const Program& program = *compiled.program;
  for (const auto& [buffer, rank] : compiled.bases) {
    if (program.buffers[buffer].kind != Buffer::Home::window) continue;
    const PeerMapping* mapping = mappings_->find(launch.binding.base(buffer, rank));
    if (mapping == nullptr) continue;
    std::unique_ptr<PeerMapping>& twin = armed_streams.twins[mapping];
    if (twin != nullptr && twin->parts() == mapping->parts()) continue;
    if (twin != nullptr) armed_streams.retired.push_back(std::move(twin));
    twin = std::make_unique<PeerMapping>(mapping->parts(), devices_);
    twin->set_strided(mapping->strided());
  }
}

// Streams and gates for a program that is to be armed, if there is room for so many.
bool CudaExecutor::make_bays(const CudaProgram& compiled, ArmedStreams& armed_streams) {
  size_t most = 0;
  for (const LocalProgram& local : compiled.gpus) most = std::max(most, local.engines.size());
  size_t besides = 0;
  for (const auto& [device, streams] : armed_besides_) besides = std::max(besides, streams);
  if (armed_lines_ + besides + most > kArmedStreamsMax) return false;
  if (channels_ != kChannels) return false;
  std::vector<std::vector<ArmedStreams::ArmedStream>> made;
  for (const LocalProgram& local : compiled.gpus) {
    const std::shared_ptr<LocalGpu>& device = devices_[local.device];
    auto& queues = made.emplace_back();
    std::vector<CUdeviceptr> gates;
    for (size_t i = 0; i < local.engines.size(); ++i) {
      queues.push_back({std::make_unique<OrderedStream>(device, words_),
                        std::make_unique<SignalWord>(device, words_)});
      gates.push_back(queues.back().gate->address());
    }
    device->gpu().write_words(gates, 0);
  }
  armed_streams.queues = std::move(made);
  armed_streams.turn = 0;
  armed_streams.lines = most;
  armed_lines_ += most;
  if (most > 0) keep_pinned(true);
  return true;
}

void CudaExecutor::check_channels(const char* why) const {
  if (channels_ == kChannels) return;
  fail(Code::unsupported, why, ": set CUDA_DEVICE_MAX_CONNECTIONS=", kChannels,
       " before the process starts");
}

void CudaExecutor::take_armed(const LocalGpu& device, size_t streams) {
  const ExecutorLock lock(mutex_);
  check_open();
  size_t& besides = armed_besides_[device.ordinal()];
  if (armed_lines_ + besides + streams > kArmedStreamsMax) {
    fail(Code::unsupported, "parked commands: ", armed_lines_ + besides,
         " streams of a GPU have some, and ", streams, " more would be past ", kArmedStreamsMax);
  }
  besides += streams;
  if (streams > 0) keep_pinned(true);
}

void CudaExecutor::give_armed(const LocalGpu& device, size_t streams) {
  const ExecutorLock lock(mutex_);
  armed_besides_[device.ordinal()] -= streams;
  if (streams > 0) keep_pinned(false);
}

std::shared_ptr<CudaSubmission> CudaExecutor::park(
    const std::shared_ptr<const CudaProgram>& compiled, const Launch& launch,
    ArmedStreams& armed_streams) {
  if (armed_streams.recalls >= kRecallsMax || compiled->timestamps > 0) return nullptr;
  for (const LocalProgram& local : compiled->gpus) {
    if (local.aheads.size() != local.engines.size()) return nullptr;
  }
  // What is written elsewhere than in mappings cannot be withdrawn.
  for (const auto& [buffer, rank] : compiled->bases) {
    const std::byte* base = launch.binding.base(buffer, rank);
    const bool window = compiled->program->buffers[buffer].kind == Buffer::Home::window;
    if (window && base != nullptr && mappings_->find(base) == nullptr) return nullptr;
  }
  const ExecutorLock lock(mutex_);
  check_open();
  if (armed_streams.queues.empty() && !make_bays(*compiled, armed_streams)) return nullptr;
  make_twins(*compiled, launch, armed_streams);
  auto submission = std::make_shared<CudaSubmission>(compiled, launch);
  submission->streams = &armed_streams;
  submission->turn = ++armed_streams.turn;
  for (size_t i = 0; i < compiled->gpus.size(); ++i) {
    const LocalProgram& local = compiled->gpus[i];
    const LocalGpu& device = *devices_[local.device];
    const ContextGuard current = device.current();
    CudaSubmission::RankPart& part = submission->parts[i];
    for (size_t queue = 0; queue < local.engines.size(); ++queue) {
      const ArmedStreams::ArmedStream& stream = armed_streams.queues[i][queue];
      StreamEncoder encoder(device, stream.line->stream(), {stream.line->word(), words_->mapping()},
                            *compiled->program, submission->launch, *mappings_, options_,
                            &armed_streams.twins, part.stats);
      encoder.wait(stream.gate->address(), submission->turn);
      encoder.run(local.aheads[queue].ahead);
      part.joins.push_back(device.event());
      part.joins.back().record(stream.line->stream());
    }
  }
  return submission;
}

// Launches of this program go through its twins, and end before those go.
CudaExecutor::Submissions CudaExecutor::in_flight_of(const CudaProgram& compiled) {
  const ExecutorLock lock(mutex_);
  return in_flight([&](const CudaSubmission& own) { return &own.compiled == &compiled; });
}

void CudaExecutor::dismiss(const CudaProgram& compiled, const ArmedSubmissions& armed,
                           ArmedStreams& armed_streams) {
  if (armed_streams.queues.empty()) return;
  end_all(in_flight_of(compiled));
  run_out(compiled, armed, armed_streams);
}

void CudaExecutor::recall(const CudaProgram& compiled, const ArmedSubmissions& armed,
                          ArmedStreams& armed_streams) {
  if (!end_within(in_flight_of(compiled), kRecallS)) {
    fail(Code::unsupported, compiled.program->op, " was armed with other buffers, and cannot be ",
         "taken back while earlier calls of it are under way: wait for them first");
  }
  release_poisoned();
  run_out(compiled, armed, armed_streams);
  ++armed_streams.recalls;
}

// What is armed goes through the twins. With other memory behind those it changes nothing, so
// its gates can be opened.
void CudaExecutor::run_out(const CudaProgram& compiled, const ArmedSubmissions& armed,
                           ArmedStreams& armed_streams) {
  for (auto& [mapping, twin] : armed_streams.twins) twin->blank(devices_);
  // One queue after the other: they all write to the same memory now.
  for (const std::shared_ptr<exec::Submission>& submission : armed) {
    const auto& own = static_cast<const CudaSubmission&>(*submission);
    for (size_t i = 0; i < armed_streams.queues.size(); ++i) {
      const LocalGpu& device = *devices_[compiled.gpus[i].device];
      for (size_t queue = 0; queue < armed_streams.queues[i].size(); ++queue) {
        device.gpu().write_words({armed_streams.queues[i][queue].gate->address()}, own.turn);
        const Deadline deadline = Deadline::after_s(kRunOutS);
        while (!own.parts[i].joins[queue].passed()) {
          if (deadline.passed()) fail(Code::driver, "an armed queue on a GPU did not end");
          nap(0);
        }
      }
    }
  }
  armed_streams.queues.clear();
  armed_streams.twins.clear();
  armed_streams.retired.clear();
  if (armed_streams.lines > 0) keep_pinned(false);
  const std::scoped_lock lock(mutex_);
  armed_lines_ -= std::exchange(armed_streams.lines, 0);
}

}  // namespace offcore::cuda
