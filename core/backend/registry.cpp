#include "core/backend/registry.h"

#include "core/backend/sim/sim.h"
#include "core/base/error.h"

namespace offcore {
namespace {

std::unique_ptr<Backend> open_sim(const Machine& machine, Rank ranks,
                                  const std::vector<Rank>& local_ranks) {
  if (local_ranks.size() != ranks) {
    fail(Code::unsupported, "the simulator runs all ", ranks, " ranks in one process, not ",
         local_ranks.size());
  }
  return make_sim(machine, ranks, {});
}

struct Row {
  Probe (*probe)();
  std::unique_ptr<Backend> (*open)(const Machine&, Rank, const std::vector<Rank>&);
};

const Row kRows[] = {
    {[] { return Probe{.name = "sim", .available = true, .reason = "runs anywhere"}; }, open_sim},
};

}  // namespace

std::vector<Probe> probe_backends() {
  std::vector<Probe> probes;
  for (const Row& row : kRows) probes.push_back(row.probe());
  return probes;
}

std::unique_ptr<Backend> open_backend(const std::string& name, const Machine& machine, Rank ranks,
                                      std::vector<Rank> local_ranks) {
  std::string known;
  for (const Row& row : kRows) {
    const Probe probe = row.probe();
    if (probe.name == name) {
      if (!probe.available) fail(Code::unavailable, "backend ", name, ": ", probe.reason);
      return row.open(machine, ranks, local_ranks);
    }
    known += (known.empty() ? "" : ", ") + probe.name;
  }
  fail(Code::invalid, "unknown backend '", name, "'; known: ", known);
}

}  // namespace offcore
