// Machines as data and the cost model.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core/machine/cost.h"
#include "core/machine/machine.h"
#include "module.h"

namespace offcore {
namespace {

void bind_parts(nb::module_& module) {
  nb::enum_<Topology>(module, "Topology")
      .value("full", Topology::full)
      .value("switched", Topology::switched)
      .value("shared", Topology::shared);
  nb::enum_<FlagHome>(module, "FlagHome")
      .value("host", FlagHome::host)
      .value("peer", FlagHome::peer);
  nb::class_<Native>(module, "Native")
      .def_rw("strided", &Native::strided)
      .def_rw("bcst_rows", &Native::bcst_rows)
      .def_rw("swap", &Native::swap)
      .def_rw("strided_flags", &Native::strided_flags)
      .def_rw("signals_aside", &Native::signals_aside);
  nb::class_<Limits>(module, "Limits")
      .def_rw("copy_bytes_max", &Limits::copy_bytes_max)
      .def_rw("pitch_bytes_max", &Limits::pitch_bytes_max)
      .def_rw("rows_max", &Limits::rows_max)
      .def_rw("swap_align", &Limits::swap_align)
      .def_rw("bcst_align", &Limits::bcst_align)
      .def_rw("swap_scratch_bytes", &Limits::swap_scratch_bytes);
  nb::class_<Links>(module, "Links")
      .def_rw("link_gbps", &Links::link_gbps)
      .def_rw("egress_gbps", &Links::egress_gbps)
      .def_rw("ingress_gbps", &Links::ingress_gbps)
      .def_rw("host_gbps", &Links::host_gbps)
      .def_rw("local_gbps", &Links::local_gbps)
      .def_rw("engine_gbps", &Links::engine_gbps)
      .def_rw("strided_gbps", &Links::strided_gbps)
      .def_rw("bcst_gbps", &Links::bcst_gbps)
      .def_rw("swap_gbps", &Links::swap_gbps);
  nb::class_<Batches>(module, "Batches")
      .def_rw("b2b_bytes_max", &Batches::b2b_bytes_max)
      .def_rw("call_min", &Batches::call_min)
      .def_rw("sub_batch", &Batches::sub_batch)
      .def_rw("sub_batch_max", &Batches::sub_batch_max)
      .def_rw("copy_ns", &Batches::copy_ns);
  nb::class_<Pages>(module, "Pages")
      .def_rw("sub_batch_first", &Pages::sub_batch_first)
      .def_rw("sub_batch_apart", &Pages::sub_batch_apart)
      .def_rw("small_bytes", &Pages::small_bytes)
      .def_rw("small_first", &Pages::small_first)
      .def_rw("small_first_bytes", &Pages::small_first_bytes)
      .def_rw("both_bytes_max", &Pages::both_bytes_max)
      .def_rw("both_part_bytes", &Pages::both_part_bytes)
      .def_rw("hop_ns", &Pages::hop_ns)
      .def_rw("pack_plain_below", &Pages::pack_plain_below)
      .def_rw("pack_strided_below", &Pages::pack_strided_below);
  nb::class_<Cost>(module, "Cost")
      .def_rw("control_ns", &Cost::control_ns)
      .def_rw("doorbell_ns", &Cost::doorbell_ns)
      .def_rw("doorbell_growth", &Cost::doorbell_growth)
      .def_rw("wake_ns", &Cost::wake_ns)
      .def_rw("fetch_ns", &Cost::fetch_ns)
      .def_rw("setup_ns", &Cost::setup_ns)
      .def_rw("issue_ns", &Cost::issue_ns)
      .def_rw("overlap", &Cost::overlap)
      .def_rw("sync_ns", &Cost::sync_ns)
      .def_rw("poll_ns", &Cost::poll_ns)
      .def_rw("host_poll_ns", &Cost::host_poll_ns)
      .def_rw("trigger_ns", &Cost::trigger_ns)
      .def_rw("launch_ns", &Cost::launch_ns)
      .def_rw("reduce_gbps", &Cost::reduce_gbps)
      .def_rw("push_gbps", &Cost::push_gbps)
      .def_rw("step_ns", &Cost::step_ns);
}

void bind_request_costs(nb::module_& module) {
  nb::class_<RequestCosts>(module, "RequestCosts")
      .def_rw("push_ns", &RequestCosts::push_ns)
      .def_rw("reach_ns", &RequestCosts::reach_ns)
      .def_rw("take_ns", &RequestCosts::take_ns)
      .def_rw("see_ns", &RequestCosts::see_ns)
      .def_rw("event_ns", &RequestCosts::event_ns)
      .def_rw("overlap", &RequestCosts::overlap)
      .def_rw("store_gbps", &RequestCosts::store_gbps)
      .def_rw("device_gbps", &RequestCosts::device_gbps)
      .def_rw("device_trip_ns", &RequestCosts::device_trip_ns)
      .def_rw("device_overlap", &RequestCosts::device_overlap);
}

}  // namespace

void bind_machine(nb::module_& module) {
  bind_parts(module);
  bind_request_costs(module);
  nb::class_<TunedRow>(module, "TunedRow")
      .def(nb::init<>())
      .def_rw("op", &TunedRow::op)
      .def_rw("ranks", &TunedRow::ranks)
      .def_rw("in_place", &TunedRow::in_place)
      .def_rw("bytes_min", &TunedRow::bytes_min)
      .def_rw("bytes_max", &TunedRow::bytes_max)
      .def_rw("variant", &TunedRow::variant)
      .def_rw("signals", &TunedRow::signals)
      .def_rw("entry", &TunedRow::entry)
      .def_rw("staged", &TunedRow::staged)
      .def_rw("bytes", &TunedRow::bytes)
      .def_rw("time_us", &TunedRow::time_us);
  nb::class_<Machine>(module, "Machine", "A machine as data: see core/machine/machine.h.")
      .def(nb::init<>())
      .def_rw("name", &Machine::name)
      .def_rw("vendor", &Machine::vendor)
      .def_rw("ranks", &Machine::ranks)
      .def_rw("engines_peer", &Machine::engines_peer)
      .def_rw("engines_host", &Machine::engines_host)
      .def_rw("topology", &Machine::topology)
      .def_rw("flags", &Machine::flags)
      .def_rw("native", &Machine::native)
      .def_rw("limits", &Machine::limits)
      .def_rw("links", &Machine::links)
      .def_rw("cost", &Machine::cost)
      .def_rw("batches", &Machine::batches)
      .def_rw("pages", &Machine::pages)
      .def_rw("requests", &Machine::requests)
      .def_rw("tuned", &Machine::tuned)
      .def_rw("signals", &Machine::signals)
      .def_rw("tuned_version", &Machine::tuned_version)
      .def(
          "check", [](const Machine& machine) { check(machine); },
          "Raises invalid when a field makes no sense.");
  nb::class_<Phases>(module, "Phases")
      .def_ro("control_ns", &Phases::control_ns)
      .def_ro("schedule_ns", &Phases::schedule_ns)
      .def_ro("copy_ns", &Phases::copy_ns)
      .def_ro("sync_ns", &Phases::sync_ns)
      .def_prop_ro("total_ns", &Phases::total_ns);
  module.def(
      "estimate",
      [](const Program& program, const Machine& machine) { return estimate(program, machine); },
      nb::arg("program"), nb::arg("machine"), "A program's estimated phases on a machine.");
}

}  // namespace offcore
