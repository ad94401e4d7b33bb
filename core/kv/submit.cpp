#include "core/kv/submit.h"

#include <algorithm>

#include "core/ir/verify.h"
#include "core/plan/plan.h"

namespace offcore::kv {
namespace {

// What a launch keeps; a failed one poisons its wakeups, so each has its own.
struct SubmitOwner {
  std::shared_ptr<const void> keep;
  std::optional<PageTable> pages;
  Wakeup wakeups[2]{};
};

// The program with the signal by which the cache's owner would learn that a neighbour is through:
// the worker sees that by the run's end.
Program with_signal(Program program) {
  const Slice word{.rank = kOwner, .buffer = kFlagBuffer};
  program.flag_words = 1;
  program.flag_span = 1;
  program.queues[0].commands.push_back({.dst = word, .value = 1, .op = Op::signal});
  const Command poll{.dst = word, .value = 1, .op = Op::poll};
  program.queues.insert(program.queues.begin(), {kOwner, kCallerQueue, {poll}});
  return program;
}

}  // namespace

std::shared_ptr<Run> submit(const SubmitTarget& target, const Layout& layout, Part part,
                            std::shared_ptr<const void> keep, bool checked) {
  const bool load = target.direction == Direction::load;
  const bool lent = target.rank == kNeighbour;
  const Machine& machine = target.backend.machine();
  auto program = std::make_shared<Program>();
  program->op = load ? "kv_load" : "kv_store";
  program->machine = machine.name;
  program->variant = "b2b";
  program->ranks = lent ? 2 : 1;
  program->native = machine.native.strided;
  program->buffers = {
      flag_buffer(),
      {.name = "cache",
       .kind = lent ? Buffer::Home::window : Buffer::Home::local,
       .bytes = layout.span()},
      {.name = "rows", .kind = Buffer::Home::host, .bytes = part.rows_span},
  };
  if (target.stage != nullptr || part.pages_at) {  // kPages comes behind it
    program->buffers.push_back(
        {.name = "stage", .kind = Buffer::Home::local, .bytes = target.stage_bytes});
  }
  if (part.pages_at) {
    const uint64_t bytes = part.pages_at->blocks.size() * part.pages_at->block_bytes;
    program->buffers.push_back({.name = "pages", .kind = Buffer::Home::paged, .bytes = bytes});
  }
  program->queues.push_back(
      {.rank = target.rank, .index = target.lane, .commands = std::move(part.commands)});
  *program = legalize(std::move(*program), machine);
  if (checked) verify(lent ? with_signal(*program) : *program);
  auto held = std::make_shared<SubmitOwner>();
  held->keep = std::move(keep);
  held->pages = part.pages_at;
  Launch launch{.binding = Binding(program->buffers.size(), program->ranks),
                .lane = target.lane,
                .wakeups = {&held->wakeups[kOwner]},
                .crossed = target.crossed,
                .gives_way = target.gives_way,
                .after = target.after,
                .owner = held};
  launch.binding.base(kCache, kOwner) = layout.base();
  launch.binding.base(kRows, kHostRank) = part.rows;
  if (lent) launch.wakeups.push_back(&held->wakeups[kNeighbour]);
  if (target.stage != nullptr) launch.binding.base(kStage, target.rank) = target.stage;
  if (held->pages) {
    launch.binding.base(kPages, kOwner) = reinterpret_cast<std::byte*>(&*held->pages);
  }
  return target.backend.load(std::move(program))->launch(launch);
}

}  // namespace offcore::kv
