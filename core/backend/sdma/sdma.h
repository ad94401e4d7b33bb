// The sdma backend: AMD's copy engines, by rings of packets where the runtime gives them, else by
// its batch copies (submit_path.h). No operation runs a kernel.
//
// All ranks in one process, rank r on GPU r. The host's thread executes callers' queues. Values of
// flag words are compared plain: a launch whose values would wrap is refused. Swaps that are not
// aligned for a launch's memory, or that the path has not, go through scratch memory; the run's
// report says so. Never yet run on AMD hardware; tests run it on a stand-in for the HSA runtime
// whose queues are emulated engines.
#pragma once
#include <memory>
#include <vector>

#include "core/backend/backend.h"

namespace offcore {

Probe probe_sdma();

std::unique_ptr<Backend> make_sdma(const Machine& machine, Rank ranks,
                                   std::vector<Rank> local_ranks);

}  // namespace offcore
