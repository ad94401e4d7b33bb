// The machine files of NVIDIA GPUs, for libraries that have no Python to read them.
#pragma once
#include <string>
#include <string_view>

#include "core/machine/machine.h"

namespace offcore::shim {

// "h100", "h200", or "nvidia" for all others. `gpu`: as the driver names it.
std::string_view card_of(std::string_view gpu);

// The profile of a host of such GPUs, as python/offcore/machines.py chooses it; null: too many
// ranks.
const Machine* machine_for(const std::string& gpu, Rank ranks);

}  // namespace offcore::shim
