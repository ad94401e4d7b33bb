// The host backend: software DMA engines over shared memory, in real time, across processes.
//
// An engine is a thread, started by the first program with a large copy for it (queue index modulo
// engines); whichever thread is awake runs whatever is ready. A queue of a launch is resumable:
// where a poll blocks or a copy pauses, its thread goes on with other queues. A thread in Run::wait
// works like an engine, and comes before them, so that a collective needs no thread switch.
//
// - A run that is destroyed before it is done goes on by itself; Launch::owner keeps its memory.
// - A poisoned rank's queues stop before their next command (a copy before its next piece).
// - Destroying the backend stops its engines; what has not ended by then never does.
#pragma once
#include <memory>
#include <vector>

#include "core/backend/backend.h"

namespace offcore::host {

std::unique_ptr<Backend> make_host(const Machine& machine, Rank ranks,
                                   std::vector<Rank> local_ranks);

}  // namespace offcore::host
