#include "shim/machine_for.h"

namespace offcore::shim {
namespace {

const Machine kMachines[] = {
#include "machines.inc"
};

}  // namespace

// As in python/offcore/machines.py.
std::string_view card_of(std::string_view gpu) {
  constexpr std::string_view kH100 = "NVIDIA H100 80GB HBM3";
  constexpr std::string_view kH200 = "NVIDIA H200";
  if (gpu.substr(0, kH100.size()) == kH100) return "h100";
  if (gpu.substr(0, kH200.size()) == kH200 && gpu.substr(kH200.size(), 4) != " NVL") return "h200";
  return "nvidia";
}

const Machine* machine_for(const std::string& gpu, Rank ranks) {
  const Machine* found = nullptr;  // the least that has as many ranks
  for (const Machine& machine : kMachines) {
    const bool named = machine.name.substr(0, machine.name.rfind('-')) == card_of(gpu);
    if (!named || machine.ranks < ranks) continue;
    if (found == nullptr || machine.ranks < found->ranks) found = &machine;
  }
  return found;
}

}  // namespace offcore::shim
