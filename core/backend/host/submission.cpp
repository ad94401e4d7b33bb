#include "core/backend/host/submission.h"

#include <algorithm>
#include <cstring>

#include "core/backend/reduce.h"
#include "core/backend/wakeup.h"
#include "core/base/swap_bytes.h"

namespace offcore::host {
namespace {

// A copy pauses between pieces: for poison, deadlines, and whatever else has become ready.
constexpr uint64_t kPieceBytes = 1 << 20;
constexpr uint64_t kRowBytes = 256;  // a row's own cost, in bytes

std::byte* byte_at(const Launch& launch, const Slice& slice) {
  return launch.binding.base(slice.buffer, slice.rank) + slice.offset;
}

}  // namespace

QueueState::QueueState(HostSubmission& submission, const LocalQueue& local)
    : submission_(submission),
      commands_(submission.program->queues[local.queue].commands),
      local_(local),
      rank_(submission.program->queues[local.queue].rank) {
  times_.reserve(commands_.size());
}

bool QueueState::poisoned() const {
  const uint32_t by = submission_.launch.wakeups[rank_]->poison.load(std::memory_order_acquire);
  if (by != 0) submission_.dead.store(by, std::memory_order_release);
  return submission_.dead.load(std::memory_order_acquire) != 0;
}

bool QueueState::ready() const {
  if (reached() == commands_.size() || poisoned()) return true;
  const Command& command = commands_[reached()];
  return command.op != Op::poll || submission_.polled(command);
}

bool QueueState::move(const Command& command) {
  const Rank ranks = submission_.program->ranks;
  for (; row_ < command.rows; ++row_, offset_ = 0) {
    std::byte* dst =
        byte_at(submission_.launch, row_of(command.dst, command.dst_step, row_, ranks));
    std::byte* src =
        byte_at(submission_.launch, row_of(command.src, command.src_step, row_, ranks));
    while (offset_ < command.bytes) {
      if (run_bytes_ >= kPieceBytes) {
        run_bytes_ = 0;
        return false;
      }
      const uint64_t bytes = std::min(kPieceBytes, command.bytes - offset_);
      if (command.op == Op::swap) {
        swap_bytes(dst + offset_, src + offset_, bytes);
      } else {
        std::memcpy(dst + offset_, src + offset_, bytes);
      }
      offset_ += bytes;
      run_bytes_ += std::max(bytes, kRowBytes);
    }
  }
  return true;
}

bool QueueState::reduce(const Command& command) {
  const Launch& launch = submission_.launch;
  sources_.resize(command.rows);
  while (offset_ < command.bytes) {
    if (run_bytes_ >= kPieceBytes) {
      run_bytes_ = 0;
      return false;
    }
    const uint64_t bytes = std::min(kPieceBytes, command.bytes - offset_);
    for (uint32_t row = 0; row < command.rows; ++row) {
      sources_[row] = byte_at(launch, source_of(command, row)) + offset_;
    }
    offcore::reduce(*submission_.program->reduction, command,
                    byte_at(launch, command.dst) + offset_, sources_, bytes);
    offset_ += bytes;
    run_bytes_ += bytes * command.rows;
  }
  return true;
}

void QueueState::signal(const Command& command) const {
  const Launch& launch = submission_.launch;
  const std::vector<exec::RankQueues>& locals = submission_.compiled.locals;
  const Rank ranks = submission_.program->ranks;
  for (uint32_t row = 0; row < command.rows; ++row) {
    raise_word(submission_.word(row_of(command.dst, command.dst_step, row, ranks)),
               launch.epoch + command.value);
  }
  // Who reads the words: everybody, or the ranks that the rows name.
  const bool everybody = command.dst.rank == kHostRank;
  const uint32_t first = everybody ? 0 : command.dst.rank;
  const uint32_t readers =
      everybody ? ranks
                : (command.dst_step == kRankStep ? std::min<uint32_t>(command.rows, ranks) : 1);
  const Rank watched = locals.front().rank;
  bool forward = false;
  for (uint32_t reader = 0; reader < readers; ++reader) {
    const Rank rank = static_cast<Rank>((first + reader) % ranks);
    wake(*launch.wakeups[rank]);
    forward |= rank != watched && std::any_of(locals.begin(), locals.end(), [&](const auto& local) {
                 return local.rank == rank;
               });
  }
  // The local ranks sleep together, on the first one's wakeup.
  if (forward) wake(*launch.wakeups[watched]);
}

QueueState::Stop QueueState::run() {
  while (reached() < commands_.size()) {
    if (poisoned()) return Stop::poisoned;
    const Command& command = commands_[reached()];
    if (start_ns_ < 0) start_ns_ = now_ns();
    switch (command.op) {
      case Op::copy:
      case Op::swap:
        if (!move(command)) return Stop::paused;
        break;
      case Op::reduce:
        if (!reduce(command)) return Stop::paused;
        break;
      case Op::poll:
        if (!submission_.polled(command)) return Stop::blocked;
        break;
      case Op::signal:
        signal(command);
        break;
      case Op::timestamp:
        submission_.timestamps_ns[command.value] = now_ns() - submission_.launch_ns;
        break;
      case Op::fence:  // one thread runs a queue's commands in order
        break;
    }
    CommandTime time{.queue = local_.queue,
                     .command = reached(),
                     .start_ns = start_ns_ - submission_.launch_ns,
                     .end_ns = now_ns() - submission_.launch_ns,
                     .phases = {}};
    (touches_data(command.op) ? time.phases.copy_ns : time.phases.sync_ns) =
        static_cast<double>(time.end_ns - time.start_ns);
    times_.push_back(time);
    start_ns_ += time.end_ns - time.start_ns;  // the next one begins where this one ends
    row_ = 0;
    offset_ = 0;
    command_.store(reached() + 1, std::memory_order_relaxed);
  }
  return Stop::ended;
}

HostSubmission::HostSubmission(std::shared_ptr<const HostProgram> of, const Launch& launch_)
    : Submission(of, launch_, of->locals.size()), compiled(*of), left(parts_left) {
  for (const LocalQueue& local : compiled.local_queues) {
    contexts.push_back(std::make_unique<QueueState>(*this, local));
    ++left[local.part];
  }
}

size_t HostSubmission::reached(uint32_t queue) const {
  const auto found = std::find_if(contexts.begin(), contexts.end(),
                                  [&](const auto& context) { return context->queue() == queue; });
  return (*found)->reached();
}

Report HostSubmission::report() const {
  Report report = Submission::report();
  // The path that finished last: through the last engine queue, and the caller's wait behind it.
  const QueueState* last = nullptr;
  bool last_is_engine = false;
  for (const std::unique_ptr<QueueState>& context : contexts) {
    const std::span<const CommandTime> times = context->times();
    report.commands.insert(report.commands.end(), times.begin(), times.end());
    if (times.empty()) continue;
    const bool is_engine = program->queues[context->queue()].index != kCallerQueue;
    const bool later = last == nullptr || times.back().end_ns > last->times().back().end_ns;
    if (is_engine > last_is_engine || (is_engine == last_is_engine && later)) {
      last = context.get();
      last_is_engine = is_engine;
    }
  }
  if (last != nullptr) {
    for (const CommandTime& time : last->times()) report.phases.copy_ns += time.phases.copy_ns;
    const int64_t began_ns = last->times().front().start_ns;
    report.phases.schedule_ns = static_cast<double>(std::max<int64_t>(0, began_ns - control_ns));
  }
  const double rest_ns = static_cast<double>(report.time_ns) - report.phases.total_ns();
  report.phases.sync_ns = std::max(0.0, rest_ns);
  return report;
}

}  // namespace offcore::host
