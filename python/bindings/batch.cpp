// Batches of copies: policies, entries, plans, and batches under way.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "core/base/error.h"
#include "core/comm/batch_executor.h"
#include "keep.h"
#include "module.h"
#include "place.h"
#include "process.h"
#include "released.h"

namespace offcore {
namespace {

using Numbers = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Homes = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename Column>
auto vector_of(const Column& column) {
  using Value = std::remove_const_t<typename Column::Scalar>;
  return std::vector<Value>(column.data(), column.data() + column.size());
}

BatchEntries entries_of(const Numbers& dsts, const Numbers& srcs, const Numbers& sizes,
                        const std::optional<Homes>& dst_homes,
                        const std::optional<Homes>& src_homes, Rank ranks) {
  BatchEntries entries{.dsts = vector_of(dsts),
                       .srcs = vector_of(srcs),
                       .sizes = vector_of(sizes),
                       .dst_homes = {},
                       .src_homes = {},
                       .ranks = ranks};
  const size_t count = sizes.size();
  entries.dst_homes = dst_homes ? vector_of(*dst_homes) : std::vector<int32_t>(count, kHostHome);
  entries.src_homes = src_homes ? vector_of(*src_homes) : std::vector<int32_t>(count, kHostHome);
  for (const size_t other :
       {dsts.size(), srcs.size(), entries.dst_homes.size(), entries.src_homes.size()}) {
    if (other == count) continue;
    fail(Code::invalid, "a batch of ", dsts.size(), " destinations, ", srcs.size(), " sources and ",
         count, " sizes");
  }
  return entries;
}

void bind_entries(nb::module_& module) {
  nb::class_<BatchEntries>(module, "BatchEntries",
                           "Columns: places, sizes, and homes (ranks; -1: the host).")
      .def(
          "__init__",
          [](BatchEntries* place, const Numbers& dsts, const Numbers& srcs, const Numbers& sizes,
             const std::optional<Homes>& dst_homes, const std::optional<Homes>& src_homes,
             Rank ranks) {
            new (place) BatchEntries(entries_of(dsts, srcs, sizes, dst_homes, src_homes, ranks));
          },
          nb::arg("dsts"), nb::arg("srcs"), nb::arg("sizes"),
          nb::arg("dst_homes").none() = nb::none(), nb::arg("src_homes").none() = nb::none(),
          nb::arg("ranks") = 1, "No homes: all is the host's.")
      .def("locate", &locate_on_gpus, nb::arg("gpu"), Unlocked(),
           "Finds the homes of addresses on GPUs and in pinned memory; ranks then are `gpus`.")
      .def("check_kind", &check_kind, nb::arg("kind"))
      .def_ro("gpus", &BatchEntries::gpus)
      .def_ro("ranks", &BatchEntries::ranks);
  module.def(
      "plan_entries",
      [](const BatchEntries& entries, const std::vector<uint32_t>& swaps, const BatchPolicy& policy,
         const Machine& machine, bool phantom) {
        LockReleased released;
        BatchBases bases;
        std::vector<Slice> seams;
        const Moves moves = moves_of(entries, phantom, bases, seams);
        return plan_batch(moves, swaps, policy, machine, seams);
      },
      nb::arg("entries"), nb::arg("swaps"), nb::arg("policy"), nb::arg("machine"),
      nb::arg("phantom"));
}

std::unique_ptr<BatchRun> start(const std::string& backend, const Machine& machine,
                                const BatchEntries& entries, std::vector<uint32_t> swaps,
                                const BatchPolicy& policy, bool phantom,
                                const std::string& own_copy, std::vector<uintptr_t> streams,
                                nb::object keep, double timeout_s) {
  Released::drop();
  BatchCall call{.entries = entries,
                 .swaps = std::move(swaps),
                 .policy = policy,
                 .phantom = phantom,
                 .streams = std::move(streams),
                 .keep = keep_alive(std::move(keep))};
  LockReleased released;
  BackendOptions options{.sim = {.phantom = phantom}};
  if (backend == "cuda") {
    options.cuda = {.devices = entries.gpus, .own_copy = own_copy, .peers = entries.gpus};
  }
  return BatchExecutor::of(backend, machine, entries.ranks, std::move(options))
      ->start(std::move(call), released.within(timeout_s));
}

void bind_run(nb::module_& module) {
  nb::class_<Calls>(module, "Calls", "How a driver was told of data.")
      .def_ro("batches", &Calls::batches)
      .def_ro("batched", &Calls::batched)
      .def_ro("plain", &Calls::plain)
      .def_ro("strided", &Calls::strided)
      .def_ro("crossed", &Calls::crossed)
      .def_ro("kernels", &Calls::kernels)
      .def_ro("packs", &Calls::packs);
  nb::class_<Report>(module, "Report")
      .def_ro("time_ns", &Report::time_ns)
      .def_ro("phases", &Report::phases)
      .def_ro("timestamps_ns", &Report::timestamps_ns)
      .def_prop_ro("own_copy",
                   [](const Report& self) { return std::string(to_string(self.own_copy)); })
      .def_ro("calls", &Report::calls);
  nb::class_<BatchRun>(module, "BatchRun")
      .def_ro("plan", &BatchRun::plan)
      .def_prop_ro("mode", [](const BatchRun& self) { return std::string(to_string(self.mode)); })
      .def_ro("within", &BatchRun::within)
      .def_ro("plan_ns", &BatchRun::plan_ns)
      .def_ro("submit_ns", &BatchRun::submit_ns)
      .def("done", [](const BatchRun& self) { return self.run->done(); })
      .def(
          "wait",
          [](const BatchRun& self, double timeout_s) {
            LockReleased released;
            wait_in_slices(*self.run, released.within(timeout_s), [](const Error&) {});
            return self.run->report();
          },
          nb::arg("timeout_s"));
  module.def("start_batch", &start, nb::arg("backend"), nb::arg("machine"), nb::arg("entries"),
             nb::arg("swaps"), nb::arg("policy"), nb::arg("phantom"), nb::arg("own_copy"),
             nb::arg("streams"), nb::arg("keep").none(), nb::arg("timeout_s"));
  module.def("close_batches", &BatchExecutor::close_all, Unlocked(),
             "Ends the backends that batches have opened.");
}

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
  bind_entries(module);
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
         const Machine& machine, const std::vector<Place>& seams) {
        LockReleased released;
        std::vector<Slice> slices;
        for (const Place& seam : seams) slices.push_back(slice_of(seam));
        return plan_batch(moves, swaps, policy, machine, slices);
      },
      nb::arg("moves"), nb::arg("swaps"), nb::arg("policy"), nb::arg("machine"),
      nb::arg("seams") = std::vector<Place>{}, "moves: as moves_listed gives them.");
  bind_run(module);
}

}  // namespace offcore
