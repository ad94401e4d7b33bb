#include "core/backend/registry.h"

#include "core/backend/host/host.h"
#include "core/base/error.h"

namespace offcore {
namespace {

std::unique_ptr<Backend> open_sim(const Machine& machine, Rank ranks, std::vector<Rank> local_ranks,
                                  SimOptions options) {
  if (local_ranks.size() != ranks) {
    fail(Code::unsupported, "the simulator runs all ", ranks, " ranks in one process, not ",
         local_ranks.size());
  }
  return make_sim(machine, ranks, std::move(options));
}

std::unique_ptr<Backend> open_host(const Machine& machine, Rank ranks,
                                   std::vector<Rank> local_ranks, SimOptions options) {
  if (options.phantom || options.seed != 0 || !options.faults.empty()) {
    fail(Code::unsupported, "phantom memory, seeds and faults are the simulator's");
  }
  return make_host(machine, ranks, std::move(local_ranks));
}

struct Row {
  Probe probe;
  std::unique_ptr<Backend> (*open)(const Machine&, Rank, std::vector<Rank>, SimOptions);
};

std::vector<Row> rows() {
  return {
      {{.name = "sim", .available = true, .reason = "runs anywhere"}, open_sim},
      {{.name = "host", .available = true, .reason = "runs on any Linux"}, open_host},
      {{.name = "cuda", .reason = "not in this version: NVIDIA's copy engines come next"}, nullptr},
      {{.name = "sdma", .reason = "not in this version: AMD's SDMA engines come later"}, nullptr},
  };
}

}  // namespace

std::vector<Probe> probe_backends() {
  std::vector<Probe> probes;
  for (const Row& row : rows()) probes.push_back(row.probe);
  return probes;
}

std::unique_ptr<Backend> open_backend(const std::string& name, const Machine& machine, Rank ranks,
                                      std::vector<Rank> local_ranks, SimOptions options) {
  std::string known;
  for (const Row& row : rows()) {
    if (row.probe.name == name) {
      if (!row.probe.available) fail(Code::unavailable, "backend ", name, ": ", row.probe.reason);
      return row.open(machine, ranks, std::move(local_ranks), std::move(options));
    }
    known += (known.empty() ? "" : ", ") + row.probe.name;
  }
  fail(Code::invalid, "unknown backend '", name, "'; known: ", known);
}

}  // namespace offcore
