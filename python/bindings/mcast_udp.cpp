// The UDP transport of multicast: what opens a node on sockets.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core/mcast/udp/node.h"
#include "module.h"
#include "process.h"
#include "released.h"

namespace offcore {
namespace {

using mcast::EndpointNode;
using mcast::Loops;
using mcast::UdpOptions;

uint32_t chunk_bytes_for(const std::vector<nb::bytes>& addresses, bool sealed) {
  std::vector<std::string> texts;
  for (const nb::bytes& one : addresses) texts.emplace_back(one.c_str(), one.size());
  return mcast::chunk_bytes_for(texts, sealed);
}

}  // namespace

void bind_mcast_udp(nb::module_& module) {
  nb::class_<UdpOptions>(module, "McastUdpOptions", "core/mcast/udp/node.h")
      .def(nb::init<>())
      .def_rw("interface", &UdpOptions::interface)
      .def_rw("ipv6", &UdpOptions::ipv6)
      .def_rw("multicast_group", &UdpOptions::multicast_group)
      .def_rw("port", &UdpOptions::port)
      .def_rw("hops", &UdpOptions::hops)
      .def_rw("gso", &UdpOptions::gso)
      .def_rw("gro", &UdpOptions::gro)
      .def_rw("datagram_bytes", &UdpOptions::datagram_bytes)
      .def_rw("buffer_bytes", &UdpOptions::buffer_bytes)
      .def_rw("namespace_fd", &UdpOptions::namespace_fd);
  nb::class_<Loops>(module, "McastLoops", "Threads that nodes run on: core/mcast/udp/node.h")
      .def_static("start", &Loops::start, nb::arg("receive_workers"), nb::arg("send_workers"),
                  nb::arg("spin_ns"));
  module.def(
      "open_udp_node",
      [](const UdpOptions& options, const Loops& loops) {
        return owned_by_process(mcast::open_udp_node(options, loops));
      },
      nb::arg("options"), nb::arg("loops"), Unlocked());
  module.def("mcast_chunk_bytes_for", &chunk_bytes_for, nb::arg("addresses"), nb::arg("sealed"));
}

}  // namespace offcore
