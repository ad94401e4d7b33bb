// Programs that the engines hold ahead of their calls.
#include <algorithm>
#include <string_view>
#include <utility>

#include "core/backend/cuda/fleet.h"
#include "core/base/threads.h"

namespace offcore::cuda {
namespace {

// A parked stream holds a channel of its GPU, and every stream that shares it stands still. The
// driver does not tell which do, so nothing is parked but where there are as many channels as can
// be. On 2 x H200, driver 580, with 8 channels, calls hung with 16 parked streams and with 4.
constexpr size_t kParkedLinesMax = 4;  // of a device
constexpr std::string_view kChannels = "32";
constexpr uint32_t kRecallsMax = 3;  // a program whose buffers keep changing is not parked
constexpr int64_t kPauseNs = 200'000;
constexpr double kRecallS = 10.0;

}  // namespace

// What was kept back of parked engine queues.
void Fleet::resume(Flight& flight, Turn& turn, const Hangar& hangar, const Parked& parked,
                   size_t index) {
  const LocalProgram& local = *turn.local;
  Feed gates = feed(flight, turn, turn.stream, 0);
  for (size_t i = 0; i < local.aheads.size(); ++i) {
    for (const Command& poll : local.aheads[i].polls) gates.run(poll);
    gates.write(hangar.bays[index][i].gate->address(), parked.turn);
  }
  for (const Ahead& queue : local.aheads) {
    for (const Command& command : queue.late) gates.run(command);
  }
  gates.flush();
  for (const Event& join : parked.joins[index]) join.hold(turn.stream);
  turn.part->notes.add(parked.notes);
  for (size_t i = 0; i < local.aheads.size(); ++i) {
    // The line's stream has done with its word: the caller's stream follows it.
    const CUdeviceptr word = hangar.bays[index][i].line->word();
    feed(flight, turn, turn.stream, word).run(local.aheads[i].rest);
  }
}

void Fleet::double_rings(const Cargo& cargo, const Launch& launch, Hangar& hangar) {
  const Program& program = *cargo.program;
  for (const auto& [buffer, rank] : cargo.bases) {
    if (program.buffers[buffer].kind != Buffer::Kind::window) continue;
    const Ring* ring = rings_->find(launch.binding.base(buffer, rank));
    if (ring == nullptr) continue;
    std::unique_ptr<Ring>& twin = hangar.doubles[ring];
    if (twin != nullptr && twin->parts() == ring->parts()) continue;
    if (twin != nullptr) hangar.retired.push_back(std::move(twin));
    twin = std::make_unique<Ring>(ring->parts(), devices_);
    twin->set_strided(ring->strided());
  }
}

// Streams and gates for a program that is to be parked, if there is room for so many.
bool Fleet::make_bays(const Cargo& cargo, Hangar& hangar) {
  size_t most = 0;
  for (const LocalProgram& local : cargo.locals) most = std::max(most, local.engines.size());
  if (parked_lines_ + most > kParkedLinesMax) return false;
  if (channels_ != kChannels) return false;
  std::vector<std::vector<Hangar::Bay>> made;
  for (const LocalProgram& local : cargo.locals) {
    const std::shared_ptr<Device>& device = devices_[local.device];
    auto& bays = made.emplace_back();
    std::vector<CUdeviceptr> gates;
    for (size_t i = 0; i < local.engines.size(); ++i) {
      bays.push_back(
          {std::make_unique<Line>(device, words_), std::make_unique<Word>(device, words_)});
      gates.push_back(bays.back().gate->address());
    }
    device->write_words(gates, 0);
  }
  hangar.bays = std::move(made);
  hangar.turn = 0;
  hangar.lines = most;
  parked_lines_ += most;
  if (most > 0) keep_pinned(true);
  return true;
}

bool Fleet::park(const std::shared_ptr<const Cargo>& cargo, const Launch& launch, Hangar& hangar) {
  if (hangar.recalls >= kRecallsMax || cargo->timed) return false;
  for (const LocalProgram& local : cargo->locals) {
    if (local.aheads.size() != local.engines.size()) return false;
  }
  check_launch(*cargo, launch);
  const std::scoped_lock lock(mutex_);
  if (closed_) fail(Code::cancelled, "the cuda backend is closed");
  if (hangar.bays.empty() && !make_bays(*cargo, hangar)) return false;
  double_rings(*cargo, launch, hangar);
  Parked parked{.launch = launch, .turn = ++hangar.turn, .joins = {}};
  for (size_t i = 0; i < cargo->locals.size(); ++i) {
    const LocalProgram& local = cargo->locals[i];
    const Device& device = *devices_[local.device];
    const Current current = device.current();
    auto& joins = parked.joins.emplace_back();
    for (size_t queue = 0; queue < local.engines.size(); ++queue) {
      const Line& line = *hangar.bays[i][queue].line;
      Feed feed(device, line.stream(), {line.word(), words_->ring()}, *cargo->program, launch,
                *rings_, habits_, &hangar.doubles, parked.notes);
      feed.wait(hangar.bays[i][queue].gate->address(), parked.turn);
      feed.run(local.aheads[queue].ahead);
      joins.push_back(device.event());
      joins.back().record(line.stream());
    }
  }
  hangar.parked.push_back(std::move(parked));
  return true;
}

// Launches of this program go through its doubles, and end before those go.
std::vector<std::shared_ptr<Flight>> Fleet::flying(const std::shared_ptr<const Cargo>& cargo) {
  const std::scoped_lock lock(mutex_);
  std::vector<std::shared_ptr<Flight>> own;
  std::copy_if(flying_.begin(), flying_.end(), std::back_inserter(own),
               [&](const auto& flight) { return flight->cargo == cargo; });
  return own;
}

void Fleet::dismiss(const std::shared_ptr<const Cargo>& cargo, Hangar& hangar) {
  if (hangar.bays.empty()) return;
  const Deadline grace = Deadline::after_s(kGraceS);
  for (const auto& flight : flying(cargo)) {
    while (!flight->ended() && flight->poisoned() == 0 && !grace.passed()) nap(kPauseNs);
    if (!flight->ended()) flight->poison(devices_.front()->rank());
  }
  release_poisoned();
  run_out(cargo, hangar);
}

void Fleet::recall(const std::shared_ptr<const Cargo>& cargo, Hangar& hangar) {
  const Deadline deadline = Deadline::after_s(kRecallS);
  for (const auto& flight : flying(cargo)) {
    while (!flight->ended() && flight->poisoned() == 0) {
      if (deadline.passed()) {
        fail(Code::unsupported, cargo->program->op, " was armed with other buffers, and cannot be ",
             "taken back while earlier calls of it are under way: wait for them first");
      }
      nap(kPauseNs);
    }
  }
  release_poisoned();
  run_out(cargo, hangar);
  ++hangar.recalls;
}

// What is parked goes through the doubles. With other memory behind those it changes nothing, so
// its gates can be opened.
void Fleet::run_out(const std::shared_ptr<const Cargo>& cargo, Hangar& hangar) {
  for (auto& [ring, twin] : hangar.doubles) twin->blank(devices_);
  // One queue after the other: they all write to the same memory now.
  for (const Parked& parked : hangar.parked) {
    for (size_t i = 0; i < hangar.bays.size(); ++i) {
      const Device& device = *devices_[cargo->locals[i].device];
      for (size_t queue = 0; queue < hangar.bays[i].size(); ++queue) {
        device.write_words({hangar.bays[i][queue].gate->address()}, parked.turn);
        const Deadline deadline = Deadline::after_s(kRunOutS);
        while (!parked.joins[i][queue].passed()) {
          if (deadline.passed()) fail(Code::driver, "a GPU does not let go of a parked queue");
          nap(0);
        }
      }
    }
  }
  hangar.parked.clear();
  hangar.bays.clear();
  hangar.doubles.clear();
  hangar.retired.clear();
  if (hangar.lines > 0) keep_pinned(false);
  const std::scoped_lock lock(mutex_);
  parked_lines_ -= std::exchange(hangar.lines, 0);
}

}  // namespace offcore::cuda
