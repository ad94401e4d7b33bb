// The simulated fat-tree of multicast collectives.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "module.h"
#include "released.h"
#include "studies/fat_tree/simulate.h"

namespace offcore {
namespace {

void bind_inputs(nb::module_& module) {
  using namespace tree;
  nb::class_<TreeShape>(module, "TreeShape")
      .def(nb::init<>())
      .def_rw("hosts", &TreeShape::hosts)
      .def_rw("hosts_per_leaf", &TreeShape::hosts_per_leaf)
      .def_rw("leaf_ports", &TreeShape::leaf_ports)
      .def_rw("spines", &TreeShape::spines)
      .def_rw("leaves_per_pod", &TreeShape::leaves_per_pod)
      .def_rw("spine_ports", &TreeShape::spine_ports);
  nb::class_<Wire>(module, "TreeWire")
      .def(nb::init<>())
      .def_rw("gbitps", &Wire::gbitps)
      .def_rw("hop_ns", &Wire::hop_ns)
      .def_rw("cut_through", &Wire::cut_through)
      .def_rw("packet_bytes", &Wire::packet_bytes)
      .def_rw("segment_bytes", &Wire::segment_bytes)
      .def_rw("datagram_header", &Wire::datagram_header)
      .def_rw("stream_header", &Wire::stream_header)
      .def_rw("ack_bytes", &Wire::ack_bytes)
      .def_rw("ack_packets", &Wire::ack_packets)
      .def_rw("datagram_send_ns", &Wire::datagram_send_ns)
      .def_rw("datagram_recv_ns", &Wire::datagram_recv_ns)
      .def_rw("recv_workers", &Wire::recv_workers)
      .def_rw("message_ns", &Wire::message_ns);
  nb::class_<Load>(module, "TreeLoad")
      .def(nb::init<>())
      .def_rw("op", &Load::op)
      .def_rw("algorithm", &Load::algorithm)
      .def_rw("bytes", &Load::bytes)
      .def_rw("root", &Load::root)
      .def_rw("chains", &Load::chains)
      .def_rw("radix", &Load::radix)
      .def_rw("segments", &Load::segments)
      .def_rw("loss", &Load::loss)
      .def_rw("seed", &Load::seed)
      .def_rw("alpha_ns", &Load::alpha_ns);
}

}  // namespace

void bind_tree(nb::module_& module) {
  using namespace tree;
  bind_inputs(module);
  nb::class_<TreePhases>(module, "TreePhases")
      .def_ro("barrier_ns", &TreePhases::barrier_ns)
      .def_ro("multicast_ns", &TreePhases::multicast_ns)
      .def_ro("fetch_ns", &TreePhases::fetch_ns)
      .def_ro("handshake_ns", &TreePhases::handshake_ns);
  nb::class_<Outcome>(module, "TreeOutcome")
      .def_ro("host_ns", &Outcome::host_ns)
      .def_ro("phases", &Outcome::phases)
      .def_ro("lost", &Outcome::lost)
      .def_ro("fetched", &Outcome::fetched);
  nb::class_<TreePort>(module, "TreePort")
      .def_prop_ro("source", [](const TreePort& port) { return port.from; })
      .def_prop_ro("target", [](const TreePort& port) { return port.to; })
      .def_ro("bytes", &TreePort::bytes)
      .def_ro("packets", &TreePort::packets)
      .def_ro("queue_bytes_max", &TreePort::queue_bytes_max);
  nb::class_<Simulated>(module, "TreeSimulated")
      .def_ro("outcomes", &Simulated::outcomes)
      .def_ro("ports", &Simulated::ports)
      .def_ro("link_bytes", &Simulated::link_bytes)
      .def_ro("switch_bytes", &Simulated::switch_bytes)
      .def_ro("events", &Simulated::events);
  module.def("simulate_tree", &simulate, nb::arg("shape"), nb::arg("wire"), nb::arg("loads"),
             Unlocked());
}

}  // namespace offcore
