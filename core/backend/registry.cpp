#include "core/backend/registry.h"

#include "core/backend/cuda/cuda.h"
#include "core/backend/cuda/pointer_info.h"
#include "core/backend/host/host.h"
#include "core/backend/sdma/sdma.h"
#include "core/backend/sim/sim.h"
#include "core/base/error.h"

namespace offcore {
namespace {

void refuse_sim(const sim::SimOptions& options) {
  if (options.phantom || options.seed != 0 || !options.faults.empty() || options.fetch_path) {
    fail(Code::unsupported, "phantom, seed, faults and packets are options of backend sim");
  }
}

void refuse_cuda(const CudaOptions& options) {
  if (!(options == CudaOptions{})) {
    fail(Code::unsupported,
         "device, devices, signals, own_copy and sms are options of backend cuda");
  }
}

std::unique_ptr<Backend> open_sim(const Machine& machine, Rank ranks, std::vector<Rank> local_ranks,
                                  BackendOptions options) {
  refuse_cuda(options.cuda);
  if (local_ranks.size() != ranks) {
    fail(Code::unsupported, "the simulator runs all ", ranks, " ranks in one process, not ",
         local_ranks.size());
  }
  return sim::make_sim(machine, ranks, std::move(options.sim));
}

std::unique_ptr<Backend> open_host(const Machine& machine, Rank ranks,
                                   std::vector<Rank> local_ranks, BackendOptions options) {
  refuse_sim(options.sim);
  refuse_cuda(options.cuda);
  return host::make_host(machine, ranks, std::move(local_ranks));
}

std::unique_ptr<Backend> open_cuda(const Machine& machine, Rank ranks,
                                   std::vector<Rank> local_ranks, BackendOptions options) {
  refuse_sim(options.sim);
  return make_cuda(machine, ranks, std::move(local_ranks), options.cuda);
}

std::unique_ptr<Backend> open_sdma(const Machine& machine, Rank ranks,
                                   std::vector<Rank> local_ranks, BackendOptions options) {
  refuse_sim(options.sim);
  refuse_cuda(options.cuda);
  return make_sdma(machine, ranks, std::move(local_ranks));
}

Probe probe_sim() { return {.name = "sim", .available = true, .reason = "runs anywhere"}; }
Probe probe_host() { return {.name = "host", .available = true, .reason = "runs on any Linux"}; }

constexpr BackendRow kRows[] = {
    {"sim", probe_sim, open_sim},
    {"host", probe_host, open_host},
    {"cuda", probe_cuda, open_cuda},
    {"sdma", probe_sdma, open_sdma},
};
std::vector<const BackendRow*> added_rows;

}  // namespace

std::vector<Probe> probe_backends() {
  std::vector<Probe> probes;
  for (const BackendRow& row : kRows) probes.push_back(row.probe());
  return probes;
}

std::unique_ptr<PointerLookup> open_pointers(int device) {
  return std::make_unique<cuda::PointerInfo>(device);
}

std::optional<size_t> first_on_gpu(std::span<const uint64_t> addresses,
                                   std::span<const uint64_t> bytes) {
  return cuda::first_on_gpu(addresses, bytes);
}

void add_backend(const BackendRow& row) { added_rows.push_back(&row); }

std::unique_ptr<Backend> open_backend(const std::string& name, const Machine& machine, Rank ranks,
                                      std::vector<Rank> local_ranks, BackendOptions options) {
  std::string known;
  for (const BackendRow& row : kRows) {
    if (name == row.name) {
      const Probe probe = row.probe();
      if (!probe.available) fail(probe.refusal, "backend ", name, ": ", probe.reason);
      return row.open(machine, ranks, std::move(local_ranks), std::move(options));
    }
    known += cat(known.empty() ? "" : ", ", row.name);
  }
  for (const BackendRow* row : added_rows) {
    if (name == row->name) return row->open(machine, ranks, std::move(local_ranks), options);
  }
  fail(Code::invalid, "unknown backend '", name, "'; known: ", known);
}

}  // namespace offcore
