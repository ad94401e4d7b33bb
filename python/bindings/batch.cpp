// Batches of copies: their plans.
#include "core/plan/batch.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "module.h"

namespace offcore {
namespace {

void bind_policy(nb::module_& module) {
  nb::class_<BatchPolicy>(module, "BatchPolicy", "See core/plan/batch.h.")
      .def(
          "__init__",
          [](BatchPolicy* place, bool merge, std::optional<bool> fold, uint32_t fold_rows_min,
             std::optional<bool> bcst, uint16_t engines, std::optional<uint64_t> b2b_bytes_max,
             std::optional<uint32_t> sub_batch, bool timed, bool captured) {
            new (place) BatchPolicy{.merge = merge,
                                    .fold = fold,
                                    .fold_rows_min = fold_rows_min,
                                    .bcst = bcst,
                                    .engines = engines,
                                    .b2b_bytes_max = b2b_bytes_max,
                                    .sub_batch = sub_batch,
                                    .timed = timed,
                                    .captured = captured};
          },
          nb::kw_only(), nb::arg("merge") = true, nb::arg("fold").none() = nb::none(),
          nb::arg("fold_rows_min") = 4, nb::arg("bcst").none() = nb::none(), nb::arg("engines") = 0,
          nb::arg("b2b_bytes_max").none() = nb::none(), nb::arg("sub_batch").none() = nb::none(),
          nb::arg("timed") = true, nb::arg("captured") = false);
}

}  // namespace

void bind_batch(nb::module_& module) {
  bind_policy(module);
  nb::class_<Batch>(module, "Batch", "A planned batch and what became of its moves.")
      .def_prop_ro("program", [](const Batch& self) { return *self.program; })
      .def_ro("moves", &Batch::moves)
      .def_ro("empty", &Batch::empty)
      .def_ro("merged", &Batch::merged)
      .def_ro("folded", &Batch::folded)
      .def_ro("strided", &Batch::strided)
      .def_ro("bcst", &Batch::bcst)
      .def_ro("swaps", &Batch::swaps)
      .def_ro("bytes", &Batch::bytes);
  module.def(
      "plan_batch",
      [](const Moves& moves, const std::vector<uint32_t>& swaps, const BatchPolicy& policy,
         const Machine& machine) {
        const nb::gil_scoped_release release;
        return plan_batch(moves, swaps, policy, machine);
      },
      nb::arg("moves"), nb::arg("swaps"), nb::arg("policy"), nb::arg("machine"),
      "moves: as moves_listed gives them.");
}

}  // namespace offcore
