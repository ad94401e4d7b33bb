#include "core/kv/submit.h"

#include <algorithm>

#include "core/ir/verify.h"

namespace offcore::kv {
namespace {

// What a launch keeps; a failed one poisons its wakeup, so each has its own.
struct Held {
  std::shared_ptr<const void> keep;
  Wakeup wakeup{};
};

}  // namespace

std::shared_ptr<Run> submit(Backend& backend, Direction direction, const Layout& layout, Part part,
                            std::shared_ptr<const void> keep, bool checked) {
  const auto lane = static_cast<uint16_t>(direction);
  auto program = std::make_shared<Program>();
  program->op = direction == Direction::load ? "kv_load" : "kv_store";
  program->machine = backend.machine().name;
  program->variant = "b2b";
  program->protocol = "promise";
  program->ranks = 1;
  program->native = backend.machine().native.strided;
  program->buffers = {
      flag_buffer(),
      {.name = "cache", .kind = Buffer::Kind::local, .bytes = layout.span()},
      {.name = "rows", .kind = Buffer::Kind::host, .bytes = part.rows_span},
  };
  program->queues.push_back({.rank = 0, .index = lane, .commands = std::move(part.commands)});
  if (checked) verify(*program);
  auto held = std::make_shared<Held>();
  held->keep = std::move(keep);
  Launch launch{.binding = Binding(program->buffers.size(), 1),
                .lane = lane,
                .wakeups = {&held->wakeup},
                .owner = held};
  launch.binding.base(kCache, 0) = layout.base();
  launch.binding.base(kRows, kHostRank) = part.rows;
  return backend.load(std::move(program))->launch(launch);
}

}  // namespace offcore::kv
