// The multicast protocol: groups, nodes that run it, and the network in memory.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bytes.h"
#include "core/base/error.h"
#include "core/mcast/siphash.h"
#include "core/mcast/udp/node.h"
#include "keep.h"
#include "module.h"
#include "process.h"
#include "released.h"
#include "studies/sim_network.h"

namespace offcore {
namespace {

using mcast::BlockLayout;
using mcast::ChunkRun;
using mcast::Endpoint;
using mcast::EndpointCounters;
using mcast::Faults;
using mcast::Group;
using mcast::GroupKey;
using mcast::GroupRank;
using mcast::Loops;
using mcast::Message;
using mcast::Operation;
using mcast::OperationKind;
using mcast::OperationReport;
using mcast::SimNetwork;
using mcast::UdpNode;
using mcast::UdpOptions;

std::array<std::byte, 16> secret_of(const nb::bytes& bytes) {
  std::array<std::byte, 16> secret{};
  if (bytes.size() != secret.size()) {
    fail(Code::invalid, "a secret of ", bytes.size(), " bytes: it must have ", secret.size());
  }
  std::memcpy(secret.data(), bytes.c_str(), secret.size());
  return secret;
}

std::span<const std::byte> span_of(const nb::bytes& bytes) {
  return {reinterpret_cast<const std::byte*>(bytes.c_str()), bytes.size()};
}

OperationKind kind_of(const std::string& name) {
  if (name == "broadcast") return OperationKind::broadcast;
  if (name == "all_gather") return OperationKind::all_gather;
  if (name == "reduce_scatter") return OperationKind::reduce_scatter;
  fail(Code::invalid, "no operation ", name, ": broadcast, all_gather or reduce_scatter");
}

nb::dict dict_of(const OperationReport& report) {
  nb::dict dict;
  dict["bytes"] = report.bytes;
  dict["datagrams"] = report.datagrams;
  dict["lost_chunks"] = report.lost_chunks;
  dict["fetched_chunks"] = report.fetched_chunks;
  dict["fetches"] = report.fetches;
  dict["shares"] = report.shares;
  dict["cutoffs"] = report.cutoffs;
  dict["barrier_ns"] = report.barrier_ns;
  dict["multicast_ns"] = report.multicast_ns;
  dict["recovery_ns"] = report.recovery_ns;
  dict["handshake_ns"] = report.handshake_ns;
  dict["exchange_ns"] = report.exchange_ns;
  return dict;
}

nb::dict dict_of(const EndpointCounters& counters) {
  nb::dict dict = dict_of(counters.sum);
  dict["datagrams"] = counters.received.taken;
  dict["datagram_bytes"] = counters.received.bytes;
  dict["duplicates"] = counters.received.duplicates;
  dict["foreign"] = counters.received.foreign;
  dict["stale"] = counters.received.stale;
  dict["malformed"] = counters.received.malformed;
  dict["forged"] = counters.received.forged;
  dict["operations"] = counters.operations;
  dict["failed"] = counters.failed;
  dict["sent_datagrams"] = counters.sent_datagrams;
  dict["sent_bytes"] = counters.sent_bytes;
  dict["served_chunks"] = counters.served_chunks;
  dict["messages"] = counters.messages;
  dict["refused_messages"] = counters.refused_messages;
  dict["state_bytes"] = counters.state_bytes;
  return dict;
}

// (operation, dtype, scale), of a reduce-scatter.
using ReductionWords = std::tuple<std::string, std::string, double>;

Reduction parse_reduction(const ReductionWords& words) {
  const auto& [op, dtype, scale] = words;
  const Reduction reduction{.op = parse_reduce_op(op), .dtype = parse_dtype(dtype), .scale = scale};
  check(reduction, "reduce_scatter");
  return reduction;
}

std::shared_ptr<Operation> submit(Endpoint& endpoint, const std::string& kind, GroupRank root,
                                  uintptr_t out, std::vector<uint64_t> counts, nb::object keep,
                                  uintptr_t in, const std::optional<ReductionWords>& words) {
  Released::drop();
  std::optional<Reduction> reduction;
  if (words) reduction = parse_reduction(*words);
  mcast::OperationRequest request{.kind = kind_of(kind),
                                  .root = root,
                                  .out = reinterpret_cast<std::byte*>(out),
                                  .in = reinterpret_cast<const std::byte*>(in),
                                  .counts = std::move(counts),
                                  .keep = keep_alive(std::move(keep)),
                                  .reduction = reduction};
  LockReleased released;
  return endpoint.submit(std::move(request));
}

nb::dict wait(const Operation& operation, double timeout_s) {
  const auto ended = [&] {
    LockReleased released;
    return operation.wait(released.within(timeout_s));
  };
  return dict_of(ended());
}

void bind_group(nb::module_& module) {
  nb::class_<Group>(module, "McastGroup", "core/mcast/group.h")
      .def(nb::init<>())
      .def_prop_rw(
          "tag", [](const Group& self) { return self.key.tag; },
          [](Group& self, uint64_t tag) { self.key.tag = tag; })
      .def("set_secret",
           [](Group& self, const nb::bytes& bytes) { self.key.secret = secret_of(bytes); })
      .def("check", [](const Group& self) { mcast::check(self); })
      .def_rw("rank", &Group::rank)
      .def_rw("ranks", &Group::ranks)
      .def_rw("chunk_bytes", &Group::chunk_bytes)
      .def_rw("subgroups", &Group::subgroups)
      .def_rw("chains", &Group::chains)
      .def_rw("multicast", &Group::multicast)
      .def_rw("sealed", &Group::sealed)
      .def_rw("first_op", &Group::first_op)
      .def_rw("share_bytes", &Group::share_bytes)
      .def_rw("link_bytes_s", &Group::link_bytes_s)
      .def_rw("alpha_ns", &Group::alpha_ns)
      .def_rw("settle_ns", &Group::settle_ns)
      .def_rw("timeout_ns", &Group::timeout_ns)
      .def_rw("silence_ns", &Group::silence_ns)
      .def_rw("fetch_bytes", &Group::fetch_bytes)
      .def_rw("fetches_in_flight", &Group::fetches_in_flight);
  nb::class_<Operation>(module, "McastOperation", "core/mcast/operation.h")
      .def_prop_ro("ended", &Operation::ended)
      .def("wait", &wait, nb::arg("timeout_s"), "The report; throws the operation's error.");
}

void bind_udp(nb::module_& module) {
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
      "mcast_chunk_bytes_for",
      [](const std::vector<nb::bytes>& addresses, bool sealed) {
        return mcast::chunk_bytes_for(strings_of(addresses), sealed);
      },
      nb::arg("addresses"), nb::arg("sealed"));
}

void bind_node(nb::module_& module) {
  nb::class_<UdpNode>(module, "McastNode", "core/mcast/udp/node.h")
      .def_prop_ro("address",
                   [](const UdpNode& self) {
                     const std::string address = self.address();
                     return nb::bytes(address.data(), address.size());
                   })
      .def(
          "start",
          [](UdpNode& self, const Group& group, const std::vector<nb::bytes>& addresses) {
            const std::vector<std::string> all = strings_of(addresses);
            LockReleased released;
            self.start(group, all);
          },
          nb::arg("group"), nb::arg("addresses"))
      .def(
          "submit",
          [](UdpNode& self, const std::string& kind, GroupRank root, uintptr_t out,
             std::vector<uint64_t> counts, nb::object keep, uintptr_t in,
             const std::optional<ReductionWords>& reduction) {
            return submit(self.endpoint(), kind, root, out, std::move(counts), std::move(keep), in,
                          reduction);
          },
          nb::arg("kind"), nb::arg("root"), nb::arg("out"), nb::arg("counts"),
          nb::arg("keep").none(), nb::arg("inp") = 0, nb::arg("reduction") = nb::none())
      .def("close",
           [](nb::handle_t<UdpNode> self) {
             UdpNode* const here = if_here(self);
             LockReleased released;
             if (here != nullptr) here->close();
           })
      .def_prop_ro("closed", [](UdpNode& self) { return self.endpoint().closed(); })
      .def_prop_ro("counters", [](UdpNode& self) {
        nb::dict dict = dict_of(self.endpoint().counters());
        for (const auto& [name, value] : self.counters()) dict[name.c_str()] = value;
        return dict;
      });
  module.def(
      "open_udp_node",
      [](const UdpOptions& options, const Loops& loops) {
        return owned_that_waits(std::make_unique<UdpNode>(options, loops));
      },
      nb::arg("options"), nb::arg("loops"), Unlocked());
}

void bind_sim_network(nb::module_& module) {
  nb::class_<Faults>(module, "McastFaults", "studies/sim_network.h")
      .def(nb::init<>())
      .def_rw("seed", &Faults::seed)
      .def_rw("loss", &Faults::loss)
      .def_rw("burst_begin", &Faults::burst_begin)
      .def_rw("burst_end", &Faults::burst_end)
      .def_rw("duplicate", &Faults::duplicate)
      .def_rw("reorder", &Faults::reorder)
      .def_rw("reorder_ns", &Faults::reorder_ns)
      .def_rw("latency_ns", &Faults::latency_ns)
      .def_rw("jitter_ns", &Faults::jitter_ns)
      .def_rw("gather_ns", &Faults::gather_ns)
      .def_rw("queue_bytes", &Faults::queue_bytes)
      .def_rw("drain_bytes_s", &Faults::drain_bytes_s)
      .def_rw("together", &Faults::together)
      .def_rw("scatter", &Faults::scatter);
  nb::class_<SimNetwork>(module, "McastSimNetwork", "studies/sim_network.h")
      .def(nb::init<std::vector<Group>, const Faults&>(), nb::arg("groups"), nb::arg("faults"))
      .def_prop_ro("now_ns", &SimNetwork::now_ns)
      .def(
          "submit",
          [](SimNetwork& self, GroupRank rank, const std::string& kind, GroupRank root,
             uintptr_t out, std::vector<uint64_t> counts, nb::object keep, size_t communicator,
             uintptr_t in, const std::optional<ReductionWords>& reduction) {
            return submit(self.endpoint(rank, communicator), kind, root, out, std::move(counts),
                          std::move(keep), in, reduction);
          },
          nb::arg("rank"), nb::arg("kind"), nb::arg("root"), nb::arg("out"), nb::arg("counts"),
          nb::arg("keep").none(), nb::arg("communicator") = 0, nb::arg("inp") = 0,
          nb::arg("reduction") = nb::none())
      .def("run_until", &SimNetwork::run_until, nb::arg("until_ns"))
      .def("close", [](SimNetwork& self, GroupRank rank) { self.endpoint(rank, 0).close(); })
      .def(
          "counters",
          [](SimNetwork& self, GroupRank rank, size_t communicator) {
            return dict_of(self.endpoint(rank, communicator).counters());
          },
          nb::arg("rank"), nb::arg("communicator") = 0)
      .def("drop", &SimNetwork::drop, nb::arg("receiver"), nb::arg("source"), nb::arg("psn"))
      .def("slow", &SimNetwork::slow, nb::arg("rank"))
      .def("cut", &SimNetwork::cut, nb::arg("side"), nb::arg("from_ns"), nb::arg("until_ns"),
           nb::arg("reliable_too"))
      .def("kill", &SimNetwork::kill, nb::arg("rank"), nb::arg("after_calls"), nb::arg("told_ns"))
      .def("dead", &SimNetwork::dead, nb::arg("rank"))
      .def("calls", &SimNetwork::calls, nb::arg("rank"))
      .def(
          "inject",
          [](SimNetwork& self, GroupRank to, uint32_t subgroup, const nb::bytes& bytes,
             uint32_t segment_bytes) { self.inject(to, subgroup, span_of(bytes), segment_bytes); },
          nb::arg("to"), nb::arg("subgroup"), nb::arg("bytes"), nb::arg("segment_bytes"))
      .def(
          "inject_message",
          [](SimNetwork& self, GroupRank to, GroupRank from, const nb::bytes& bytes) {
            if (bytes.size() != mcast::kMessageBytes) return false;
            const std::optional<Message> message = mcast::decode(span_of(bytes).data());
            if (message) self.inject(to, from, *message);
            return message.has_value();
          },
          nb::arg("to"), nb::arg("sender"), nb::arg("bytes"),
          "Whether the bytes are a message at all.");
}

// What tests and tools ask about formats and schedules.
void bind_formats(nb::module_& module) {
  module.def(
      "mcast_siphash",
      [](const nb::bytes& key, const nb::bytes& bytes) {
        return mcast::siphash(secret_of(key), {}, span_of(bytes));
      },
      nb::arg("key"), nb::arg("bytes"));
  nb::class_<BlockLayout>(module, "McastBlockLayout", "core/mcast/block_layout.h")
      .def(
          "__init__",
          [](BlockLayout* self, const Group& group, const std::string& kind, GroupRank root,
             const std::vector<uint64_t>& counts) {
            new (self) BlockLayout(group, kind_of(kind), root, counts);
          },
          nb::arg("group"), nb::arg("kind"), nb::arg("root"), nb::arg("counts"))
      .def_prop_ro("bytes", &BlockLayout::bytes)
      .def("chunks", &BlockLayout::chunks, nb::arg("source"))
      .def("offset", &BlockLayout::offset, nb::arg("source"), nb::arg("psn"))
      .def(
          "part",
          [](const BlockLayout& self, GroupRank source, uint32_t subgroup) {
            const ChunkRun part = self.part(source, subgroup);
            return std::pair(part.psn, part.chunks);
          },
          nb::arg("source"), nb::arg("subgroup"), "(first PSN, chunks)")
      .def("subgroup_of", &BlockLayout::subgroup_of, nb::arg("source"), nb::arg("psn"))
      .def(
          "bytes_of",
          [](const BlockLayout& self, GroupRank source, uint32_t psn, uint32_t chunks) {
            return self.bytes_of({.source = source, .psn = psn, .chunks = chunks});
          },
          nb::arg("source"), nb::arg("psn"), nb::arg("chunks"))
      .def("begins", &BlockLayout::begins, nb::arg("rank"))
      .def("sends", &BlockLayout::sends, nb::arg("rank"))
      .def("next", &BlockLayout::next, nb::arg("rank"))
      .def("previous", &BlockLayout::previous, nb::arg("rank"));
}

}  // namespace

void bind_mcast(nb::module_& module) {
  module.def(
      "check_reduction", [](const ReductionWords& words) { parse_reduction(words); },
      nb::arg("reduction"), "Raises invalid for what no reduce-scatter does.");
  bind_group(module);
  bind_udp(module);
  bind_node(module);
  bind_sim_network(module);
  bind_formats(module);
}

}  // namespace offcore
