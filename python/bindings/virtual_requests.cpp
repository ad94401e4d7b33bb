// Requests in virtual time: simulated threads are Python's generators.
#include "virtual_requests.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <utility>

#include "module.h"

namespace offcore {
namespace {

using proxy::HostCalls;
using proxy::PutTicket;
using proxy::RequestPort;
using proxy::VirtualCall;
using proxy::VirtualCallKind;
using proxy::VirtualReply;
using proxy::Word;

// What a simulated thread of that rank can ask for.
struct VirtualPort {
  std::shared_ptr<proxy::VirtualRequests> all;
  Rank rank;

  VirtualCall push(unsigned words, unsigned peer,
                   std::function<PutTicket(const RequestPort&)> call) const {
    return {.kind = VirtualCallKind::push,
            .of = all,
            .rank = rank,
            .push = std::move(call),
            .words = words,
            .peer = peer};
  }
};

// What a call of that kind gives back to its thread.
nb::object reply_of(const VirtualReply& reply, VirtualCallKind kind, bool together) {
  if (kind == VirtualCallKind::work) return nb::cast(std::llround(reply.now_ns));
  if (kind != VirtualCallKind::push) return nb::cast(reply.fault);
  return together ? nb::cast(reply.tickets) : nb::cast(reply.tickets.at(0));
}

// A generator, whose calls are carried out one after the other.
class PythonThread {
 public:
  explicit PythonThread(nb::object generator) : send_(generator.attr("send")) {}

  std::vector<VirtualCall> operator()(const VirtualReply& reply) {
    nb::object yielded;
    try {
      yielded = send_(began_ ? reply_of(reply, kind_, together_) : nb::none());
    } catch (nb::python_error& error) {
      if (error.matches(PyExc_StopIteration)) return {};
      throw;
    }
    began_ = true;
    together_ = nb::isinstance<nb::list>(yielded) || nb::isinstance<nb::tuple>(yielded);
    std::vector<VirtualCall> calls;
    if (!together_) {
      add(calls, yielded);
    } else {
      for (const nb::handle one : yielded) add(calls, one);
    }
    if (calls.empty()) fail(Code::invalid, "requests: a simulated thread yielded no call");
    kind_ = calls[0].kind;
    return calls;
  }

 private:
  static void add(std::vector<VirtualCall>& calls, nb::handle yielded) {
    if (!nb::isinstance<VirtualCall>(yielded)) {
      fail(Code::invalid, "requests: a simulated thread yielded ", nb::repr(yielded).c_str(),
           "; it must be a call of host_port(), or a list of pushes");
    }
    calls.push_back(nb::cast<VirtualCall>(yielded));
  }

  nb::object send_;
  bool began_ = false;
  bool together_ = false;
  VirtualCallKind kind_ = VirtualCallKind::work;
};

int64_t run_threads(const VirtualProxy& self, const std::vector<nb::object>& generators) {
  std::vector<proxy::VirtualThread> threads;
  for (const nb::object& generator : generators) {
    if (!nb::hasattr(generator, "send")) {
      fail(Code::invalid, "run: ", nb::repr(generator).c_str(),
           " is no generator; pass what a function with yield returns");
    }
    threads.emplace_back(PythonThread(generator));
  }
  return std::llround(self.all->run(std::move(threads)));
}

void bind_pushes(nb::class_<VirtualPort>& port) {
  const std::pair<const char*, decltype(&HostCalls::put)> puts[] = {
      {"put", &HostCalls::put}, {"put_signal", &HostCalls::put_signal}};
  for (const auto& [name, put] : puts) {
    port.def(
        name,
        [put = put](const VirtualPort& self, unsigned peer, unsigned dst, unsigned src, Word chunk,
                    Word chunks) {
          return self.push(1, peer, [=](const RequestPort& at) {
            return put(at, peer, dst, src, chunk, chunks);
          });
        },
        nb::arg("peer"), nb::arg("dst"), nb::arg("src"), nb::arg("chunk"), nb::arg("chunks"));
  }
  port.def(
          "signal",
          [](const VirtualPort& self, unsigned peer, unsigned dst) {
            return self.push(
                1, peer, [=](const RequestPort& at) { return HostCalls::signal(at, peer, dst); });
          },
          nb::arg("peer"), nb::arg("dst"))
      .def(
          "put_bytes",
          [](const VirtualPort& self, unsigned peer, unsigned dst, Word dst_offset, unsigned src,
             Word src_offset, Word bytes, bool signalled) {
            if (bytes > proxy::kBytesMax && bytes <= proxy::kOffsetMax) {
              fail(Code::unsupported, "put_bytes: ", bytes, " bytes; simulated ones have ",
                   proxy::kBytesMax, " at most");
            }
            return self.push(2, peer, [=](const RequestPort& at) {
              return HostCalls::put_bytes(at, peer, dst, dst_offset, src, src_offset, bytes,
                                          signalled);
            });
          },
          nb::arg("peer"), nb::arg("dst"), nb::arg("dst_offset"), nb::arg("src"),
          nb::arg("src_offset"), nb::arg("nbytes"), nb::arg("signalled") = false);
}

void bind_waits(nb::class_<VirtualPort>& port) {
  port.def(
          "test",
          [](const VirtualPort& self, const PutTicket& ticket) {
            return HostCalls::test(self.all->port(self.rank), ticket);
          },
          nb::arg("ticket"), "At once: it is no call to yield.")
      .def(
          "received",
          [](const VirtualPort& self, unsigned peer, unsigned buffer) {
            const RequestPort& at = self.all->port(self.rank);
            if (peer >= at.ranks || buffer >= at.buffers) {
              fail(Code::invalid, "received: peer is ", peer, ", buffer ", buffer,
                   "; they must lie in 0..", at.ranks - 1, " and 0..", at.buffers - 1);
            }
            return HostCalls::received(at, peer, buffer);
          },
          nb::arg("peer"), nb::arg("buffer"), "At once: it is no call to yield.")
      .def(
          "wait_sent",
          [](const VirtualPort& self, const PutTicket& ticket, double limit_s) {
            return VirtualCall{.kind = VirtualCallKind::wait_sent,
                               .of = self.all,
                               .rank = self.rank,
                               .ticket = ticket,
                               .limit_ns = limit_ns(limit_s)};
          },
          nb::arg("ticket"), nb::arg("limit_s") = 0.0)
      .def(
          "flush",
          [](const VirtualPort& self, unsigned peer, double limit_s) {
            return VirtualCall{.kind = VirtualCallKind::flush,
                               .of = self.all,
                               .rank = self.rank,
                               .peer = peer,
                               .limit_ns = limit_ns(limit_s)};
          },
          nb::arg("peer"), nb::arg("limit_s") = 0.0)
      .def(
          "wait",
          [](const VirtualPort& self, unsigned peer, unsigned buffer, Word count, double limit_s) {
            return VirtualCall{.kind = VirtualCallKind::wait,
                               .of = self.all,
                               .rank = self.rank,
                               .peer = peer,
                               .buffer = buffer,
                               .count = count,
                               .limit_ns = limit_ns(limit_s)};
          },
          nb::arg("peer"), nb::arg("buffer"), nb::arg("count"), nb::arg("limit_s") = 0.0)
      .def(
          "work",
          [](const VirtualPort& self, double ns) {
            if (!(ns >= 0 && ns <= 1e15)) {
              fail(Code::invalid, "work: ns is ", ns, "; it must lie in 0..1e15");
            }
            return VirtualCall{
                .kind = VirtualCallKind::work, .of = self.all, .rank = self.rank, .work_ns = ns};
          },
          nb::arg("ns"),
          "The thread does something else for so long. It gets the time then, ns of the run.");
}

}  // namespace

std::vector<VirtualProxy> virtual_proxies(const std::shared_ptr<Communicator>& comm,
                                          std::vector<proxy::BufferPlace> buffers,
                                          const proxy::ProxyOptions& options,
                                          proxy::VirtualEngine engine) {
  const auto all = std::make_shared<proxy::VirtualRequests>(
      comm->backend(), comm->ranks(), std::move(buffers), options, engine,
      [comm] { return comm->poisoned(); }, comm);
  std::vector<VirtualProxy> proxies;
  for (const Rank rank : comm->local_ranks()) proxies.push_back({all, rank});
  return proxies;
}

void bind_virtual_requests(nb::module_& module) {
  nb::class_<VirtualCall>(module, "VirtualCall", "What a simulated thread yields.");
  nb::class_<VirtualPort> port(module, "VirtualPort",
                               "What device.cuh does, as calls for simulated threads to yield.");
  bind_pushes(port);
  bind_waits(port);
  nb::class_<VirtualProxy>(module, "VirtualProxy", "The simulated engine of one rank's requests.")
      .def_ro("rank", &VirtualProxy::rank)
      .def_prop_ro("address",
                   [](const VirtualProxy&) -> uintptr_t {
                     fail(Code::unsupported, "sim runs no kernels: threads use host_port()");
                   })
      .def("host_port", [](const VirtualProxy& self) { return VirtualPort{self.all, self.rank}; })
      .def("run", &run_threads, nb::arg("threads"))
      .def("check", [](const VirtualProxy& self) { self.all->check(self.rank); })
      .def_prop_ro("stats",
                   [](const VirtualProxy& self) {
                     const proxy::ProxyStats& stats = self.all->stats(self.rank);
                     return std::tuple(stats.requests, stats.signals, stats.copies, stats.batches,
                                       stats.bytes);
                   })
      .def(
          "drain", [](const VirtualProxy& self, double) { self.all->drain(self.rank); },
          nb::arg("timeout_s"))
      .def(
          "stop", [](const VirtualProxy& self, double) { self.all->stop(self.rank); },
          nb::arg("timeout_s"));
}

}  // namespace offcore
