// The simulator: a backend that runs every command of all ranks in virtual time.
//
// launch() runs the whole launch at once and advances the virtual clock; the run then is complete,
// or stuck (its wait throws timeout at once), or has met a dead rank (its wait throws peer). Two
// runs of the same program from the same seed are identical; the seed picks the order of events of
// equal time and which half of a copy moves first.
#pragma once
#include <memory>

#include "core/backend/backend.h"
#include "core/backend/options.h"

namespace offcore::sim {

// A backend for the first `ranks` ranks of a machine, all of them local.
std::unique_ptr<Backend> make_sim(const Machine& machine, Rank ranks, SimOptions options);

}  // namespace offcore::sim
