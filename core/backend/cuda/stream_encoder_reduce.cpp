// Reductions in a stream: commands that one kernel takes together.
#include <algorithm>
#include <utility>

#include "core/backend/cuda/stream_encoder.h"

namespace offcore::cuda {

// A reduction, with the polls before it and the signals behind it where the kernel takes them: how
// many commands these are, 0 where no reduction comes next.
size_t StreamEncoder::reduce(std::span<const Command> commands) {
  const bool captured = program_.mode == Mode::capture;
  ReduceKernelJob job;
  size_t at = 0;
  for (; at < commands.size() && commands[at].op == Op::poll; ++at) {
    for (uint32_t row = 0; row < commands[at].rows; ++row) {
      const Slice word = row_of(commands[at].dst, commands[at].dst_step, row, program_.ranks);
      job.waits.emplace_back(polled_word(word), launch_.epoch + commands[at].value);
    }
  }
  if (at == commands.size() || commands[at].op != Op::reduce) return 0;
  if (at > 0 && (captured || job.waits.size() > ReduceKernelJob::kWordsMax)) return 0;
  const Command& command = commands[at++];
  const bool apart = command.own != kFlagBuffer;
  job.dst = address(command.dst);
  job.src = address(command.src);
  job.step = static_cast<uint64_t>(command.src_step);
  job.own = apart ? address(source_of(command, command.value)) : 0;
  job.at = apart ? command.value : UINT32_MAX;
  job.rows = command.rows;
  job.bytes = command.bytes;
  for (; !captured && at < commands.size() && commands[at].op == Op::signal; ++at) {
    const Command& signal = commands[at];
    if (job.signals.size() + signal.rows > ReduceKernelJob::kWordsMax) break;
    for (uint32_t row = 0; row < signal.rows; ++row) {
      const Slice word = row_of(signal.dst, signal.dst_step, row, program_.ranks);
      job.signals.emplace_back(place(word).address, launch_.epoch + signal.value);
    }
  }
  if (clashes(job)) flush_jobs();
  flush_copies();
  flush_ops();
  jobs_.push_back(std::move(job));
  if (captured || jobs_.size() == ReduceKernels::kJobsMax) flush_jobs();
  return at;
}

// Warps of a kernel go from job to job by themselves: none may touch memory that another one
// writes, unless it waits for a word that tells of the other.
bool StreamEncoder::clashes(const ReduceKernelJob& job) const {
  const auto meet = [](CUdeviceptr a, uint64_t a_bytes, CUdeviceptr b, uint64_t b_bytes) {
    return a < b + b_bytes && b < a + a_bytes;
  };
  const auto reads = [&](const ReduceKernelJob& reader, const ReduceKernelJob& writer) {
    const uint64_t span = reader.step * (reader.rows - 1) + reader.bytes;
    return meet(reader.src, span, writer.dst, writer.bytes) ||
           (reader.own != 0 && meet(reader.own, reader.bytes, writer.dst, writer.bytes));
  };
  const auto told = [&](const ReduceKernelJob& other) {
    return std::any_of(job.waits.begin(), job.waits.end(), [&](const auto& word) {
      return std::find(other.signals.begin(), other.signals.end(), word) != other.signals.end();
    });
  };
  const auto last = std::find_if(jobs_.rbegin(), jobs_.rend(), told);  // what was before is, too
  return std::any_of(last.base(), jobs_.end(), [&](const ReduceKernelJob& other) {
    return reads(job, other) || reads(other, job) ||
           meet(job.dst, job.bytes, other.dst, other.bytes);
  });
}

void StreamEncoder::flush_jobs() {
  if (jobs_.empty()) return;
  constexpr uint64_t kCounters = 4;  // behind the word that signals are copied from, 64 in all
  const uint32_t sms = device_.gpu().reduce_kernels().launch(
      *program_.reduction, jobs_, source_.word + kCounters, options_.sms, stream_);
  stats_.sms = std::max(stats_.sms, sms);
  stats_.submitted = true;
  jobs_.clear();
}

}  // namespace offcore::cuda
