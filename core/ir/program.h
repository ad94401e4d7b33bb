// A Program: lists of commands, one per (rank, queue), for ALL ranks. Immutable once built, it is
// what tests pin, what `offcore show` prints and what every backend runs.
//
// Besides its engine queues a rank has one caller queue: the commands that the caller's thread or
// stream executes itself (entry signals, the start word of a prelaunched program, the polls that
// tell that every peer has delivered). A rank's part is complete when its caller queue has ended
// and its engine queues are idle (the caller joins them; no flag is spent on that).
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/reduction.h"
#include "core/ir/command.h"

namespace offcore {

// Whether queues are submitted at the call, captured in a graph, or armed ahead (prelaunch).
// The mode changes which commands are legal, so it is part of the plan key.
enum class Mode : uint8_t { eager, capture, armed };

std::string_view to_string(Mode mode);

// How ranks enter a program, and where peers write (core/comm/lane.h says why each is safe).
enum class Protocol : uint8_t {
  barrier,  // into the output itself, after its owner has signalled that it entered
  credits,  // likewise; the signal is sent ahead of the call, when the output is free
  eager,    // into a slot of the library's, at once; the owner copies it on
  promise,  // into the output itself, at once: callers promise that it is free
};

std::string_view to_string(Protocol protocol);

// What a buffer is for. It follows from the buffer's name, which a program's text shows.
enum class Role : uint8_t {
  data,     // any other name: memory that the program's owner binds by position
  input,    // "in": the caller's
  output,   // "out": the caller's, or the slot that a view shows
  slot,     // "slot": the lane's, where peers write a staged operation
  scratch,  // "scratch": each rank's own
};

Role role_of(std::string_view name);

struct Buffer {
  enum class Home : uint8_t {
    window,  // one per rank, of equal size, mapped by every rank
    local,   // one per rank, seen only by that rank's own queues; `bytes` is the largest
    host,    // one, in host memory, seen by all
    paged,   // as local, but its bytes lie in pages (backend/page_table.h), whole blocks a command:
             // cores copy them to or from a local buffer of the rank's, engines a host one, where
             // the pages of one block may lie in rows
  };
  std::string name;
  Home kind = Home::window;
  uint64_t bytes = 0;
  Role role = role_of(name);

  friend bool operator==(const Buffer&, const Buffer&) = default;
};

std::string_view to_string(Buffer::Home kind);

// The entry at [kFlagBuffer] of every program; how large it is, flag_words says.
inline Buffer flag_buffer() { return {.name = "flag", .kind = Buffer::Home::window, .bytes = 0}; }

struct Queue {
  Rank rank = 0;
  uint16_t index = 0;  // the engine, or kCallerQueue
  std::vector<Command> commands;

  friend bool operator==(const Queue&, const Queue&) = default;
};

std::string queue_name(const Queue& queue);  // "3.1", "3.caller"

struct Program {
  std::string op;       // "all_gather"
  std::string machine;  // "mi300x-8"
  std::string variant;  // "prelaunch_b2b"
  Protocol protocol = Protocol::promise;
  Mode mode = Mode::eager;
  Rank ranks = 0;
  bool native = true;        // false where a command had to be expanded for this machine
  uint32_t flag_words = 0;   // per rank, and again in host memory
  uint16_t flag_span = 0;    // largest flag value; the lane's epoch moves on by this much a launch
  std::optional<Rank> only;  // the one rank whose queues are here: see core/plan/scale.h
  std::optional<Reduction> reduction;  // what reduce commands compute
  std::vector<Buffer> buffers;         // index = BufferId; [kFlagBuffer] is the flags themselves
  std::vector<Queue> queues;  // sorted by rank, then index: a rank's caller queue comes last

  friend bool operator==(const Program&, const Program&) = default;
};

using Bases = std::vector<std::pair<BufferId, Rank>>;  // sorted, each once

// Adds which ranks' buffers a command addresses: what has to be bound before it can run. Throws
// invalid where the program has no such buffer or rank.
void collect_bases(const Program& program, const Command& command, Bases& bases);

// Whether two copies address the same buffers of the same ranks; false: it takes a closer look.
inline bool same_bases(const Command& a, const Command& b) {
  const auto same = [](const Slice& x, const Slice& y) {
    return x.buffer == y.buffer && x.rank == y.rank;
  };
  const auto simple = [](const Command& c) {
    return c.op == Op::copy && c.dst_step != kRankStep && c.src_step != kRankStep;
  };
  return simple(a) && simple(b) && same(a.dst, b.dst) && same(a.src, b.src);
}

// What a program costs in commands: what the paper counts.
struct Counts {
  uint32_t commands = 0;  // of every kind, on engine queues
  uint32_t copies = 0;    // copy and swap commands
  uint32_t engines = 0;   // engine queues in use
  uint32_t syncs = 0;     // signals on engine queues, each row counted
  uint64_t bytes = 0;     // bytes written by copies (a swap writes twice its bytes)

  friend bool operator==(const Counts&, const Counts&) = default;
};

Counts count(const Program& program);

// Whether the rank copies from its own memory to its own: its own slice, or out of a slot.
bool copies_within(const Program& program, Rank rank);

}  // namespace offcore
