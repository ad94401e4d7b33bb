// What is known of the GPUs, and what proofs on them need: the stress of the signal forms, and the
// blocks that hold every SM.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "core/backend/cuda/facts.h"
#include "module.h"
#include "process.h"
#include "released.h"
#include "studies/proof/occupation.h"
#include "studies/proof/stress.h"

namespace offcore {
namespace {

nb::dict cuda_facts() {
  const cuda::DriverFacts facts = cuda::driver_facts();
  nb::list gpus;
  for (const cuda::GpuFacts& gpu : facts.gpus) {
    nb::dict row;
    row["ordinal"] = gpu.ordinal;
    row["name"] = gpu.name;
    row["pci"] = gpu.pci;
    row["node"] = gpu.node;
    row["node_refusal"] = gpu.refusal == 0 ? "" : std::strerror(gpu.refusal);
    row["peers"] = gpu.peers;
    gpus.append(row);
  }
  nb::dict told;
  told["driver"] = facts.version;
  told["cuda"] = facts.cuda;
  told["gpus"] = gpus;
  return told;
}

void bind_stress(nb::module_& module) {
  nb::class_<cuda::StressOutcome>(module, "StressOutcome", "What a trial of the stress has seen.")
      .def_ro("operations", &cuda::StressOutcome::operations)
      .def_ro("wrong_words", &cuda::StressOutcome::wrong_words)
      .def_ro("stuck", &cuda::StressOutcome::stuck)
      .def_ro("time_ns", &cuda::StressOutcome::time_ns);
  nb::class_<cuda::Stress>(module, "Stress", "See studies/proof/stress.h.")
      .def(nb::new_([](const std::vector<int>& devices) {
             cuda::Driver::open();
             return owned_that_waits(std::make_unique<cuda::Stress>(devices));
           }),
           nb::arg("devices"))
      .def_prop_ro("strided", &cuda::Stress::strided)
      .def(
          "run",
          [](cuda::Stress& self, const std::string& signals, std::string shape, bool planted,
             uint64_t chunk_bytes, uint32_t operations, double timeout_s) {
            LockReleased released;
            return self.run({.signals = cuda::parse_signals(signals),
                             .shape = std::move(shape),
                             .planted = planted,
                             .chunk_bytes = chunk_bytes,
                             .operations = operations},
                            released.within(timeout_s));
          },
          nb::kw_only(), nb::arg("signals"), nb::arg("shape"), nb::arg("planted"),
          nb::arg("chunk_bytes"), nb::arg("operations"), nb::arg("timeout_s"));
}

void bind_occupation(nb::module_& module) {
  nb::class_<cuda::Occupation>(module, "Occupation", "See studies/proof/occupation.h.")
      .def(nb::new_([](const std::vector<int>& devices, double limit_s) {
             cuda::Driver::open();
             return owned_that_waits(std::make_unique<cuda::Occupation>(devices, limit_s));
           }),
           nb::arg("devices"), nb::arg("limit_s"))
      .def_prop_ro("blocks", &cuda::Occupation::blocks)
      .def_prop_ro("control_ran", &cuda::Occupation::control_ran)
      .def_prop_ro("holds", &cuda::Occupation::holds)
      .def("release", &cuda::Occupation::release, Unlocked());
}

}  // namespace

void bind_proof(nb::module_& module) {
  module.def("cuda_facts", &cuda_facts,
             "The driver and its GPUs: driver, cuda, gpus (ordinal, name, pci, node, peers).");
  module.def("numa_node", &cuda::numa_node, nb::arg("pci"), nb::arg("folder"),
             "The NUMA node of a PCI device by the kernel's files in `folder`; -1: not told.");
  module.def("try_node", &cuda::try_node, nb::arg("node"),
             "The errno with which the kernel refuses memory on a NUMA node; 0: it does not.");
  bind_stress(module);
  bind_occupation(module);
}

}  // namespace offcore
