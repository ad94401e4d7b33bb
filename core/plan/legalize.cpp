// Rewrites a program into commands that the machine has, within its limits. A backend then only
// lays out bits or calls the driver.
#include <algorithm>

#include "core/base/error.h"
#include "core/plan/plan.h"

namespace offcore {
namespace {

constexpr size_t kCommandsMax = size_t{1} << 22;  // of a program: what verify takes
constexpr uint64_t kSwapPiecesMax = 1024;         // of a swap that goes through scratch memory

class Legalizer {
 public:
  Legalizer(Program& program, const Machine& machine) : program_(program), machine_(machine) {}

  void run() {
    if (is_native()) return;
    plan_scratch();
    for (Queue& queue : program_.queues) {
      if (queue.index == kCallerQueue) continue;  // run by the caller itself, row by row
      commands_.clear();
      for (const Command& command : queue.commands) legalize(command, queue);
      total_ += commands_.size();
      queue.commands = commands_;
    }
  }

 private:
  // Whether the machine has all of it as it is, like most programs.
  bool is_native() const {
    size_t commands = 0;
    for (const Queue& queue : program_.queues) {
      if (queue.index == kCallerQueue) continue;
      commands += queue.commands.size();
      for (const Command& command : queue.commands) {
        if (!is_native(command)) return false;
      }
    }
    return commands <= kCommandsMax;
  }

  bool is_native(const Command& command) const {
    switch (command.op) {
      case Op::copy:
        if (paged(command.dst) || paged(command.src)) return true;  // whole, by who lists the pages
        return command.bytes > 0 && command.bytes <= machine_.limits.copy_bytes_max &&
               (command.rows == 1 || command.rows <= rows_max(command));
      case Op::swap:
        return command.bytes > 0 && command.rows == 1 && swap_fits(command) &&
               command.bytes <= aligned_max(machine_.limits.swap_align);
      case Op::poll:
      case Op::signal:
        return machine_.native.strided_flags || command.rows == 1;
      case Op::timestamp:
      case Op::fence:
      case Op::reduce:
        return true;
    }
    return false;
  }

  bool paged(const Slice& slice) const {
    return slice.buffer < program_.buffers.size() &&
           program_.buffers[slice.buffer].kind == Buffer::Home::paged;
  }

  void legalize(const Command& command, const Queue& queue) {
    if (is_native(command)) return push(command);
    if (command.op == Op::copy) return copy(command);
    if (command.op == Op::swap) return swap(command, queue);
    each_row(command);
  }

  void push(const Command& command) {
    if (total_ + commands_.size() >= kCommandsMax) {
      fail(Code::unsupported, program_.op, ": machine ", machine_.name, " would need more than ",
           kCommandsMax, " commands, as a copy of it moves at most ",
           machine_.limits.copy_bytes_max, " bytes: raise its limits, or move less in a call");
    }
    commands_.push_back(command);
  }

  void copy(const Command& command) {
    if (command.rows == 1) return split(command);
    const uint32_t most = rows_max(command);
    if (command.rows > most) program_.native = false;
    for (uint32_t row = 0; row < command.rows; row += most) {
      split(rows_of(command, row, std::min(most, command.rows - row)));
    }
  }

  // Of a copy of several.
  uint32_t rows_max(const Command& command) const {
    // A broadcast's destinations have one offset, so they agree modulo any bcst_align.
    if (command.src_step == 0 && command.dst_step == kRankStep) return machine_.native.bcst_rows;
    const bool fits = pitch_fits(command.dst_step) && pitch_fits(command.src_step);
    return machine_.native.strided && fits ? machine_.limits.rows_max : 1;
  }

  bool pitch_fits(int64_t step) const {
    if (step == kRankStep) return true;  // the window's stride is the backend's to keep in bounds
    const uint64_t magnitude =
        step < 0 ? -static_cast<uint64_t>(step) : static_cast<uint64_t>(step);
    return magnitude <= machine_.limits.pitch_bytes_max;
  }

  Command rows_of(const Command& command, uint32_t first, uint32_t rows) const {
    Command part = command;
    part.dst = row_of(command.dst, command.dst_step, first, program_.ranks);
    part.src = row_of(command.src, command.src_step, first, program_.ranks);
    part.rows = rows;
    if (rows == 1) part.dst_step = part.src_step = 0;
    return part;
  }

  void each_row(const Command& command) {
    for (uint32_t row = 0; row < command.rows; ++row) {
      push(rows_of(command, row, 1));
    }
  }

  // No command moves more than the machine's largest copy (a row of it, where it has rows). The
  // pieces stay aligned.
  void split(const Command& command, uint64_t align = 1) {
    const uint64_t bytes_max = aligned_max(align);
    for (uint64_t done = 0; done < command.bytes; done += bytes_max) {
      Command part = command;
      part.dst.offset += done;
      part.src.offset += done;
      part.bytes = std::min(bytes_max, command.bytes - done);
      push(part);
    }
  }

  uint64_t aligned_max(uint64_t align) const {
    return machine_.limits.copy_bytes_max / align * align;
  }

  bool swap_fits(const Command& command) const {
    const uint64_t align = machine_.limits.swap_align;
    return machine_.native.swap && align <= machine_.limits.copy_bytes_max &&
           command.dst.offset % align == 0 && command.src.offset % align == 0;
  }

  bool all_fit(const Command& command) const {
    for (uint32_t row = 0; row < command.rows; ++row) {
      if (!swap_fits(rows_of(command, row, 1))) return false;
    }
    return true;
  }

  // Swaps that the machine lacks go through scratch memory of the executing rank, which its queues
  // share evenly; the fences keep the three copies of a piece, and the pieces, in order. Swaps that
  // the machine's scratch would cut into too many pieces take more of it: the pieces wait for each
  // other, and each is a handful of commands.
  void swap(const Command& command, const Queue& queue) {
    if (command.rows > 1) {  // no machine has a strided swap
      program_.native = false;
      for (uint32_t row = 0; row < command.rows; ++row) swap(rows_of(command, row, 1), queue);
      return;
    }
    if (swap_fits(command)) return split(command, machine_.limits.swap_align);
    program_.native = false;
    const Slice scratch{scratch_share_ * queue.index, queue.rank, scratch_};
    const Command fence{.op = Op::fence};
    push(fence);
    for (uint64_t done = 0; done < command.bytes; done += scratch_share_) {
      const uint64_t bytes = std::min(scratch_share_, command.bytes - done);
      Slice remote = command.dst;
      Slice own = command.src;
      remote.offset += done;
      own.offset += done;
      for (const auto& [dst, src] : {std::pair{scratch, remote}, {remote, own}, {own, scratch}}) {
        split({.dst = dst, .src = src, .bytes = bytes, .op = Op::copy});
        push(fence);
      }
    }
  }

  void plan_scratch() {
    uint64_t bytes = 0;
    uint16_t queues = 0;
    for (const Queue& queue : program_.queues) {
      for (const Command& command : queue.commands) {
        if (command.op != Op::swap || all_fit(command)) continue;
        bytes = std::max(bytes, command.bytes);
        queues = std::max<uint16_t>(queues, queue.index + 1);
      }
    }
    if (queues == 0) return;
    const uint64_t share = std::max<uint64_t>(1, machine_.limits.swap_scratch_bytes / queues);
    const uint64_t pieces_share = (bytes + kSwapPiecesMax - 1) / kSwapPiecesMax;
    scratch_share_ = std::min(bytes, std::max(share, pieces_share));
    scratch_ = static_cast<BufferId>(program_.buffers.size());
    program_.buffers.push_back(
        {.name = "scratch", .kind = Buffer::Home::local, .bytes = scratch_share_ * queues});
  }

  Program& program_;
  const Machine& machine_;
  std::vector<Command> commands_;
  size_t total_ = 0;  // of the queues that are done
  BufferId scratch_ = 0;
  uint64_t scratch_share_ = 0;
};

}  // namespace

Program legalize(Program program, const Machine& machine) {
  Legalizer(program, machine).run();
  return program;
}

}  // namespace offcore
