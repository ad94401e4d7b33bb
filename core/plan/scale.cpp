#include "core/plan/scale.h"

#include "core/ir/serial_order.h"
#include "core/ir/verify.h"
#include "core/plan/moves.h"

namespace offcore {
namespace {

uint64_t magnitude(int64_t step) {
  return step < 0 ? -static_cast<uint64_t>(step) : static_cast<uint64_t>(step);
}

// A swap stays one command where units keep it aligned; all others go by pieces of other sizes.
bool swaps_whole(const Command& command, const Machine& machine, ScaleRange& range) {
  const uint64_t align = machine.limits.swap_align;
  return machine.native.swap && command.rows == 1 && range.aligned(align) &&
         range.at_most(command.bytes, machine.limits.copy_bytes_max / align * align);
}

}  // namespace

bool ScaleRange::at_most(uint64_t bytes, uint64_t most) {
  const bool fits = bytes <= most;
  if (bytes % unit_ != 0) none();
  if (bytes < unit_) return fits;
  const uint64_t last = most / (bytes / unit_);  // unit that fits
  if (fits) {
    most_ = std::min(most_, last);
  } else {
    least_ = std::max(least_, last + 1);
  }
  return fits;
}

bool ScaleRange::aligned(uint64_t align) {
  align_ = std::max(align_, align);
  return unit_ % align == 0;
}

void note_limits(const Program& program, const Machine& machine, ScaleRange& range) {
  for (const Queue& queue : program.queues) {
    if (queue.index == kCallerQueue) continue;
    for (const Command& command : queue.commands) {
      if (command.op == Op::swap && !swaps_whole(command, machine, range)) range.none();
      if (command.op != Op::copy) continue;
      if (!range.at_most(command.bytes, machine.limits.copy_bytes_max)) range.none();
      for (const int64_t step : {command.dst_step, command.src_step}) {
        if (step != kRankStep) range.at_most(magnitude(step), machine.limits.pitch_bytes_max);
      }
    }
  }
}

void note_whole(const Program& program, ScaleRange& range) {
  for (const Buffer& buffer : program.buffers) range.at_most(buffer.bytes, kMovedBytesMax);
  const auto in_units = [&](const Slice& slice, int64_t step) {
    return slice.offset % range.unit() == 0 &&
           (step == kRankStep || magnitude(step) % range.unit() == 0);
  };
  for (const Queue& queue : program.queues) {
    for (const Command& command : queue.commands) {
      if (!moves_data(command.op)) continue;
      if (command.bytes % range.unit() != 0 || !in_units(command.dst, command.dst_step) ||
          !in_units(command.src, command.src_step)) {
        return range.none();
      }
    }
  }
  // The order in which such queues are enqueued is one of all ranks' queues.
  if (interleaved(program)) range.none();
}

Program part_of(const Program& program, Rank rank) {
  Program part{.op = program.op,
               .machine = program.machine,
               .variant = program.variant,
               .protocol = program.protocol,
               .mode = program.mode,
               .ranks = program.ranks,
               .native = program.native,
               .flag_words = program.flag_words,
               .flag_span = program.flag_span,
               .only = rank,
               .reduction = program.reduction,
               .buffers = program.buffers};
  for (const Queue& queue : program.queues) {
    if (queue.rank == rank) part.queues.push_back(queue);
  }
  return part;
}

Program scaled(Program program, uint64_t from, uint64_t to) {
  const auto scale = [&](uint64_t& bytes) { bytes = bytes / from * to; };
  const auto scale_step = [&](int64_t& step) {
    if (step == kRankStep) return;
    step = step / static_cast<int64_t>(from) * static_cast<int64_t>(to);
  };
  for (Buffer& buffer : program.buffers) scale(buffer.bytes);
  for (Queue& queue : program.queues) {
    for (Command& command : queue.commands) {
      if (!moves_data(command.op)) continue;
      scale(command.bytes);
      scale(command.dst.offset);
      scale(command.src.offset);
      scale_step(command.dst_step);
      scale_step(command.src_step);
    }
  }
  verify_form(program);
  return program;
}

}  // namespace offcore
