// The rules that ask one command at a time.
#include <algorithm>

#include "core/ir/reject.h"
#include "core/ir/text.h"
#include "core/ir/verify.h"

namespace offcore {
namespace {

// All rows of all commands count: bounds the time and memory of a check.
constexpr uint64_t kRowsMax = uint64_t{1} << 23;

void check_header(const Program& program) {
  for (const std::string& name : {program.op, program.machine, program.variant}) {
    if (!is_name(name)) reject("shape", "'", name, "' is not a name");
  }
  if (program.ranks < 1 || program.ranks > kRanksMax) {
    reject("shape", "ranks is ", program.ranks, ", not from 1 to ", kRanksMax);
  }
  const std::vector<Buffer>& buffers = program.buffers;
  if (buffers.empty() || buffers.size() > 256 || buffers[kFlagBuffer] != flag_buffer()) {
    reject("shape", "buffers must be the flags and at most 255 others");
  }
  for (size_t id = 1; id < buffers.size(); ++id) {
    const auto same = [&](const Buffer& other) { return other.name == buffers[id].name; };
    if (!is_name(buffers[id].name)) reject("shape", "'", buffers[id].name, "' is not a name");
    if (std::any_of(buffers.begin(), buffers.begin() + static_cast<ptrdiff_t>(id), same)) {
      reject("shape", "two buffers are named ", buffers[id].name);
    }
  }
}

void check_queues(const Program& program) {
  uint64_t rows = 0;
  for (size_t q = 0; q < program.queues.size(); ++q) {
    const Queue& queue = program.queues[q];
    if (queue.rank >= program.ranks) {
      reject("bounds", "queue ", queue_name(queue), " is of a rank beyond ", program.ranks);
    }
    for (const Command& command : queue.commands) rows += std::max(command.rows, 1u);
    if (q == 0) continue;
    const Queue& last = program.queues[q - 1];
    if (std::pair(last.rank, last.index) >= std::pair(queue.rank, queue.index)) {
      reject("shape", "queue ", queue_name(queue), " must not follow queue ", queue_name(last));
    }
  }
  if (rows > kRowsMax) reject("shape", rows, " rows in all are more than ", kRowsMax);
}

// Whether all fields that its operation does not have are 0 (rows: 1): a text does not say them.
bool says_all(const Command& command) {
  if (command.op == Op::reduce) {
    return command.own != kFlagBuffer || (command.dst_step == 0 && command.value == 0);
  }
  if (command.own != kFlagBuffer) return false;
  const bool data = moves_data(command.op);
  const bool placed = data || command.op == Op::poll || command.op == Op::signal;
  if ((data || command.op == Op::fence) && command.value != 0) return false;
  if (!placed && (command.dst != Slice{} || command.rows != 1)) return false;
  if (!data && (command.src != Slice{} || command.bytes != 0 || command.src_step != 0))
    return false;
  return command.rows > 1 || (command.dst_step == 0 && command.src_step == 0);
}

// Checks one slice of one command: shape (who may see it), then bounds of every row.
class SliceCheck {
 public:
  SliceCheck(const Program& program, Place place)
      : program_(program), place_(place), command_(command_at(program, place)) {}

  void check(const Slice& slice, int64_t step, std::string_view side) const {
    if (slice.buffer >= program_.buffers.size()) {
      reject("bounds", program_, place_, side, " is in a buffer that does not exist");
    }
    if ((slice.buffer == kFlagBuffer) == touches_data(command_.op)) {
      reject("shape", program_, place_, side, " must be ",
             touches_data(command_.op) ? "data, not a flag word" : "a flag word");
    }
    if (slice.rank != kHostRank && slice.rank >= program_.ranks) {
      reject("bounds", program_, place_, side, " is on a rank beyond ", program_.ranks);
    }
    check_seen(slice, side);
    if (step == kRankStep) check_ring(slice, side);
    check_range(slice, step == kRankStep ? 0 : step, side);
  }

 private:
  void check_seen(const Slice& slice, std::string_view side) const {
    if (slice.buffer == kFlagBuffer) return;
    const Buffer& buffer = program_.buffers[slice.buffer];
    if ((buffer.kind == Buffer::Home::host) != (slice.rank == kHostRank)) {
      reject("shape", program_, place_, side, " must name ",
             buffer.kind == Buffer::Home::host ? "[host], where " : "a rank, as ", buffer.name,
             " is a ", to_string(buffer.kind), " buffer");
    }
    const bool own = buffer.kind == Buffer::Home::local || buffer.kind == Buffer::Home::paged;
    if (own && slice.rank != program_.queues[place_.queue].rank) {
      reject("shape", program_, place_, side, " is local to rank ", slice.rank);
    }
    if (buffer.kind != Buffer::Home::paged) return;
    const bool to = &slice == &command_.dst;
    const Buffer::Home home = program_.buffers[(to ? command_.src : command_.dst).buffer].kind;
    const bool reached = home == Buffer::Home::local || home == Buffer::Home::host;
    const bool one =
        command_.rows == 1 ||
        static_cast<uint64_t>(to ? command_.dst_step : command_.src_step) == command_.bytes;
    if (command_.op == Op::copy && one && reached) return;
    reject("shape", program_, place_, side,
           " lies in pages, which only a copy reaches whose rows follow each other there, ",
           "to or from a local buffer or a host one");
  }

  void check_ring(const Slice& slice, std::string_view side) const {
    if (slice.rank == kHostRank) {
      reject("shape", program_, place_, side, " steps over ranks from host memory");
    }
    if (program_.buffers[slice.buffer].kind == Buffer::Home::local) {
      reject("shape", program_, place_, side, " steps over ranks in a local buffer");
    }
    if (command_.rows > program_.ranks) {
      reject("bounds", program_, place_, side, " steps over more than ", program_.ranks, " ranks");
    }
  }

  void check_range(const Slice& slice, int64_t step, std::string_view side) const {
    const bool flags = slice.buffer == kFlagBuffer;
    const uint64_t size = flags ? program_.flag_words : program_.buffers[slice.buffer].bytes;
    const uint64_t length = flags ? 1 : command_.bytes;
    bool inside = length <= size && slice.offset <= size - length;
    if (inside && command_.rows > 1) {
      // Unsigned negation gives the distance of any step; division keeps the product from wrapping.
      const uint64_t distance = step < 0 ? -static_cast<uint64_t>(step) : step;
      const uint64_t room = step < 0 ? slice.offset : size - length - slice.offset;
      inside = distance <= room / (command_.rows - 1);
    }
    if (inside) return;
    reject("bounds", program_, place_, side, " leaves ",
           flags ? "the flags" : program_.buffers[slice.buffer].name, " of ", size,
           flags ? " words" : " bytes");
  }

  const Program& program_;
  Place place_;
  const Command& command_;
};

bool overlap(const Slice& a, const Slice& b, uint64_t bytes) {
  return a.buffer == b.buffer && a.rank == b.rank && a.offset < b.offset + bytes &&
         b.offset < a.offset + bytes;
}

void check_reduce(const Program& program, Place place) {
  const Command& command = command_at(program, place);
  const Queue& queue = program.queues[place.queue];
  if (!program.reduction) reject("shape", program, place, "the program names no reduction");
  if (queue.index != kCallerQueue || program.mode == Mode::armed) {
    reject("shape", program, place, "only callers reduce, and nothing of an armed program does");
  }
  if (command.bytes < 1 || command.bytes % size_of(program.reduction->dtype) != 0) {
    reject("shape", program, place, "bytes must be elements of ",
           to_string(program.reduction->dtype));
  }
  if (command.src_step < 0 || (command.own != kFlagBuffer && command.value >= command.rows)) {
    reject("shape", program, place, "a negative step, or no such source");
  }
  const SliceCheck slices(program, place);
  slices.check(command.dst, 0, "dst");
  if (command.src.rank != queue.rank ||
      (command.dst.rank != queue.rank && !copies_source(command))) {
    reject("shape", program, place, "a rank reduces its own memory");
  }
  for (uint32_t row = 0; row < command.rows; ++row) {
    const Slice source = source_of(command, row);
    slices.check(source, 0, "a source");
    if (source != command.dst && overlap(source, command.dst, command.bytes)) {
      reject("hazard", program, place, "dst overlaps source ", row, " and is not the same bytes");
    }
  }
}

void check_command(const Program& program, Place place) {
  const Command& command = command_at(program, place);
  if (command.op > Op::reduce) {
    reject("shape", "queue ", queue_name(program.queues[place.queue]), ", command ", place.command,
           " is of no known operation");
  }
  if (command.rows < 1) reject("shape", program, place, "rows must be 1 or more");
  if (!says_all(command)) {
    reject("shape", program, place, "a field that its text does not show must be 0");
  }
  if (command.op == Op::reduce) return check_reduce(program, place);
  const SliceCheck slices(program, place);
  if (moves_data(command.op)) {
    if (command.bytes < 1) reject("shape", program, place, "bytes must be 1 or more");
    slices.check(command.dst, command.dst_step, "dst");
    slices.check(command.src, command.src_step, "src");
  } else if (command.op == Op::poll || command.op == Op::signal) {
    slices.check(command.dst, command.dst_step, "the word");
    if (command.value < 1 || command.value > program.flag_span) {
      reject("words", program, place, "the value must lie in 1..", program.flag_span, ", the span");
    }
  }
}

}  // namespace

void verify_form(const Program& program) {
  check_header(program);
  check_queues(program);
  for (uint32_t q = 0; q < program.queues.size(); ++q) {
    for (uint32_t c = 0; c < program.queues[q].commands.size(); ++c) check_command(program, {q, c});
  }
}

}  // namespace offcore
