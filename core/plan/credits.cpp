// Entry signals sent ahead of their operation.
#include <algorithm>

#include "core/plan/plan.h"

namespace offcore {

Credited split_credits(const Program& program) {
  auto credits = std::make_shared<Program>(program);
  auto rest = std::make_shared<Program>(program);
  credits->protocol = rest->protocol = Protocol::credits;
  for (size_t i = 0; i < program.queues.size(); ++i) {
    auto& ahead = credits->queues[i].commands;
    auto& behind = rest->queues[i].commands;
    const bool caller = program.queues[i].index == kCallerQueue;
    const auto end = std::find_if(ahead.begin(), ahead.end(), [&](const Command& command) {
      return !caller || command.op != Op::signal;
    });
    behind.erase(behind.begin(), behind.begin() + (end - ahead.begin()));
    ahead.erase(end, ahead.end());
  }
  for (auto& half : {credits, rest}) {
    std::erase_if(half->queues, [](const Queue& queue) { return queue.commands.empty(); });
  }
  return {.credits = credits, .rest = rest};
}

}  // namespace offcore
