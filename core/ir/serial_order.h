// An order of all ranks' commands in which each could be done after the ones before it.
//
// Streams may share a channel of their device, and what waits at its front holds up the rest. Where
// every rank enqueues its queues' commands in this order, all of them get through even if all of
// its streams share one.
#pragma once
#include <vector>

#include "core/ir/program.h"

namespace offcore {

// Commands of one queue, which are next to each other in the order.
struct SerialStep {
  uint32_t queue = 0;
  uint32_t first = 0;
  uint32_t last = 0;  // one past the last
};

// Callers begin; then engine queues go as far as they get before callers do. The program has passed
// verify.
std::vector<SerialStep> serial_order(const Program& program);

// Whether a rank's queues wait amid their commands while others of the rank have signals to send,
// so that it has to enqueue them in the serial order. Armed programs have their own.
bool interleaved(const Program& program);

}  // namespace offcore
