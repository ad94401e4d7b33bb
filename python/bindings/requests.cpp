// Requests of running kernels: engines that answer them, and the calls of host threads.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "bytes.h"
#include "core/base/digest.h"
#include "core/comm/communicator.h"
#include "core/proxy/host_calls.h"
#include "core/proxy/proxy.h"
#include "module.h"
#include "process.h"
#include "released.h"
#include "studies/requests/simulated.h"
#include "studies/requests/timed.h"
#include "studies/requests/trial.h"
#include "virtual_requests.h"

namespace offcore {
namespace {

using proxy::HostCalls;
using proxy::PutTicket;
using proxy::RequestPort;
using proxy::RequestProxy;
using proxy::Word;

// A port that threads of this process reach as it stands.
struct HostPort {
  RequestPort port;
};

// What ranks compare before any of them answers requests.
std::string facts_of(const proxy::ProxyOptions& options,
                     const std::vector<proxy::BufferPlace>& buffers) {
  std::string text = cat("chunks of ", options.chunk_bytes, " bytes, ");
  std::string planned;
  for (const auto& rank : options.schedule) {
    planned += '/';
    for (const proxy::PlannedRequest& one : rank) {
      planned += cat(one.op, ',', one.peer, ',', one.dst, ',', one.src, ',', one.chunk, ',',
                     one.chunks, ';');
    }
  }
  text += planned.empty() ? "no schedule, buffers" : cat("schedule ", digest(planned), ", buffers");
  for (const proxy::BufferPlace& buffer : buffers)
    text += cat(" ", buffer.offset, "+", buffer.bytes);
  return text;
}

void compare(Communicator& self, const std::string& own, const Deadline& deadline) {
  if (self.local_ranks().size() == self.ranks()) return;
  const std::vector<std::string> all = self.exchange("requests", own, deadline);
  for (Rank rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == own) continue;
    fail(Code::mismatch, "requests: rank ", self.local_ranks()[0], " registers ", own, "; rank ",
         rank, " ", all[rank]);
  }
}

// A window, and where in it a buffer lies.
using Place = std::tuple<const Window*, uint64_t, uint64_t>;

void check_apart(const std::vector<Place>& places) {
  const auto& [out, out_at, out_bytes] = places.at(0);
  const auto& [in, in_at, in_bytes] = places.at(1);
  if (out == in && out_at < in_at + in_bytes && in_at < out_at + out_bytes) {
    fail(Code::invalid, "all_to_all_v: input and output overlap; pass separate buffers");
  }
}

// The engines of the local ranks, by name. Collective.
std::variant<std::vector<std::shared_ptr<RequestProxy>>, std::vector<VirtualProxy>> open_requests(
    Communicator& self, const std::vector<Place>& places,
    const std::vector<
        std::vector<std::tuple<uint32_t, Rank, uint32_t, uint32_t, uint64_t, uint64_t>>>& schedule,
    uint64_t chunk_bytes, uint32_t slots, double limit_s, double spin_s, bool exchanges,
    const std::string& engine, double timeout_s) {
  LockReleased released;
  const Deadline deadline = released.within(timeout_s);
  if (exchanges) check_apart(places);
  const Capabilities able = self.backend().capabilities();
  const proxy::VirtualEngine wanted = proxy::virtual_engine(engine, !schedule.empty());
  if (able.virtual_time == nullptr && engine != "auto") {
    fail(Code::unsupported, "requests: engine ", engine, " is simulated, on backend sim alone");
  }
  if (able.virtual_time == nullptr && able.request_engines == nullptr) {
    fail(Code::unsupported,
         "requests: this backend has no engine for them; host, cuda and sim have");
  }
  std::vector<proxy::BufferPlace> buffers;
  for (const auto& [window, offset, bytes] : places) {
    buffers.push_back({const_cast<Window*>(window)->shared_from_this(), offset, bytes});
  }
  proxy::ProxyOptions options{.chunk_bytes = chunk_bytes,
                              .slots = slots,
                              .limit_s = limit_s,
                              .spin_s = spin_s,
                              .exchanges = exchanges};
  for (const auto& rank : schedule) {
    auto& planned = options.schedule.emplace_back();
    for (const auto& [op, peer, dst, src, chunk, chunks] : rank) {
      planned.push_back({static_cast<proxy::RequestOp>(op), peer, dst, src, chunk, chunks});
    }
  }
  options = proxy::settled(options, buffers, self.ranks());
  compare(self, facts_of(options, buffers), deadline);
  if (able.virtual_time != nullptr) {
    return virtual_proxies(self.shared_from_this(), std::move(buffers), options, wanted);
  }
  const auto control = self.window(proxy::control_bytes(self.ranks(), options.schedule), deadline);
  const auto communicator = self.shared_from_this();
  std::vector<std::shared_ptr<RequestProxy>> proxies;
  for (const Rank rank : self.local_ranks()) {
    proxies.push_back(owned_that_waits(std::make_unique<RequestProxy>(
        self.backend(), rank, control, buffers, options,
        [communicator] { return communicator->poisoned(); }, communicator)));
  }
  return proxies;
}

nb::class_<HostPort> bind_pushes(nb::module_& module) {
  nb::class_<PutTicket>(module, "PutTicket", "A request under way.")
      .def_ro("position", &PutTicket::position)
      .def_ro("peer", &PutTicket::peer)
      .def_ro("fault", &PutTicket::fault);
  nb::class_<HostPort> port(module, "HostPort", "What device.cuh does, by a thread of this host.");
  port.def(
          "put",
          [](const HostPort& self, unsigned peer, unsigned dst, unsigned src, Word chunk,
             Word chunks) { return HostCalls::put(self.port, peer, dst, src, chunk, chunks); },
          nb::arg("peer"), nb::arg("dst"), nb::arg("src"), nb::arg("chunk"), nb::arg("chunks"),
          Unlocked())
      .def(
          "put_signal",
          [](const HostPort& self, unsigned peer, unsigned dst, unsigned src, Word chunk,
             Word chunks) {
            return HostCalls::put_signal(self.port, peer, dst, src, chunk, chunks);
          },
          nb::arg("peer"), nb::arg("dst"), nb::arg("src"), nb::arg("chunk"), nb::arg("chunks"),
          Unlocked())
      .def(
          "signal",
          [](const HostPort& self, unsigned peer, unsigned dst) {
            return HostCalls::signal(self.port, peer, dst);
          },
          nb::arg("peer"), nb::arg("dst"), Unlocked())
      .def(
          "put_bytes",
          [](const HostPort& self, unsigned peer, unsigned dst, Word dst_offset, unsigned src,
             Word src_offset, Word bytes, bool signalled) {
            return HostCalls::put_bytes(self.port, peer, dst, dst_offset, src, src_offset, bytes,
                                        signalled);
          },
          nb::arg("peer"), nb::arg("dst"), nb::arg("dst_offset"), nb::arg("src"),
          nb::arg("src_offset"), nb::arg("nbytes"), nb::arg("signalled") = false, Unlocked());
  return port;
}

void bind_waits(nb::class_<HostPort>& port) {
  port.def(
          "test",
          [](const HostPort& self, const PutTicket& ticket) {
            return HostCalls::test(self.port, ticket);
          },
          nb::arg("ticket"))
      .def(
          "wait_sent",
          [](const HostPort& self, const PutTicket& ticket, double limit_s) {
            return HostCalls::wait_sent(self.port, ticket, limit_ns(limit_s));
          },
          nb::arg("ticket"), nb::arg("limit_s") = 0.0, Unlocked())
      .def(
          "flush",
          [](const HostPort& self, unsigned peer, double limit_s) {
            return HostCalls::flush(self.port, peer, limit_ns(limit_s));
          },
          nb::arg("peer"), nb::arg("limit_s") = 0.0, Unlocked())
      .def(
          "received",
          [](const HostPort& self, unsigned peer, unsigned buffer) {
            return HostCalls::received(self.port, peer, buffer);
          },
          nb::arg("peer"), nb::arg("buffer"))
      .def(
          "wait",
          [](const HostPort& self, unsigned peer, unsigned buffer, Word count, double limit_s) {
            return HostCalls::wait(self.port, peer, buffer, count, limit_ns(limit_s));
          },
          nb::arg("peer"), nb::arg("buffer"), nb::arg("count"), nb::arg("limit_s") = 0.0,
          Unlocked());
}

void bind_host_port(nb::module_& module) {
  nb::class_<HostPort> port = bind_pushes(module);
  bind_waits(port);
  module.def(
      "host_port",
      [](const nb::bytes& bytes) {
        HostPort made;
        if (bytes.size() != sizeof made.port) fail(Code::invalid, "these bytes are no port");
        std::memcpy(&made.port, bytes.data(), sizeof made.port);
        return made;
      },
      nb::arg("port"), "A port as RequestProxy.port has it, of memory that this host reaches.");
}

void bind_trials(nb::module_& module) {
  module.def(
      "trial_ring",
      [](uint32_t producers, uint64_t requests, uint32_t slots, uint32_t lanes) {
        LockReleased released;
        if (lanes == 0 || producers % lanes != 0) fail(Code::invalid, "producers are whole warps");
        const RingTrial done = trial_ring(producers, requests, slots, lanes);
        return std::pair(done.wrong, done.time_ns);
      },
      nb::arg("producers"), nb::arg("requests"), nb::arg("slots"), nb::arg("lanes") = 1,
      "Racing threads and one reader of a ring: requests lost, doubled, reordered or torn, and "
      "ns.");
  module.def(
      "simulate_ring",
      [](uint32_t producers, uint64_t requests, uint32_t slots, uint64_t seed) {
        LockReleased released;
        const SimulatedRing found = simulate_ring(producers, requests, slots, seed);
        return std::tuple(found.wrong, found.time_ns, found.operations, found.waits);
      },
      nb::arg("producers"), nb::arg("requests"), nb::arg("slots"), nb::arg("seed"),
      "The ring in virtual time: wrong requests, ns, operations of memory, looks for room.");
  module.def(
      "trial_exchange",
      [](const std::vector<HostPort*>& ports, const std::vector<uintptr_t>& sends,
         const std::vector<uintptr_t>& receives, uint32_t producers, uint64_t rounds,
         uint64_t chunk_bytes) {
        std::vector<ExchangeEnd> ends;
        for (size_t i = 0; i < ports.size(); ++i) {
          ends.push_back({&ports[i]->port, reinterpret_cast<std::byte*>(sends[i]),
                          reinterpret_cast<const std::byte*>(receives[i])});
        }
        LockReleased released;
        return trial_exchange(ends, producers, rounds, chunk_bytes);
      },
      nb::arg("ports"), nb::arg("sends"), nb::arg("receives"), nb::arg("producers"),
      nb::arg("rounds"), nb::arg("chunk_bytes"),
      "Threads of these ranks send stamped chunks to every other rank: how many were wrong.");
  module.def(
      "trial_soak",
      [](const HostPort& sender, const HostPort& receiver, uint32_t lanes, uint32_t each,
         uint32_t buffers, uint64_t slots, uintptr_t clocks) {
        LockReleased released;
        return trial_soak(sender.port, receiver.port, {lanes, each, buffers, slots},
                          reinterpret_cast<const Word*>(clocks));
      },
      nb::arg("sender"), nb::arg("receiver"), nb::arg("lanes"), nb::arg("each"), nb::arg("buffers"),
      nb::arg("slots"), nb::arg("clocks"),
      "Threads push what offcore.tools.driven.soak draws: how many of them failed.");
}

void bind_times(nb::module_& module) {
  module.def(
      "time_trips",
      [](const HostPort& first, const HostPort& second, uint64_t chunks, uint32_t rounds) {
        LockReleased released;
        return time_trips(first.port, second.port, chunks, rounds);
      },
      nb::arg("first"), nb::arg("second"), nb::arg("chunks"), nb::arg("rounds"),
      "Round trips between two ranks' threads, ns; empty: a call failed.");
  module.def(
      "time_plain_trips",
      [](std::pair<uintptr_t, uintptr_t> dst, std::pair<uintptr_t, uintptr_t> src, uint64_t bytes,
         uint32_t rounds) {
        std::byte* dsts[] = {reinterpret_cast<std::byte*>(dst.first),
                             reinterpret_cast<std::byte*>(dst.second)};
        const std::byte* srcs[] = {reinterpret_cast<const std::byte*>(src.first),
                                   reinterpret_cast<const std::byte*>(src.second)};
        LockReleased released;
        return time_plain_trips(dsts, srcs, bytes, rounds);
      },
      nb::arg("dsts"), nb::arg("srcs"), nb::arg("nbytes"), nb::arg("rounds"),
      "The same by threads that copy for themselves.");
  module.def(
      "time_pushes",
      [](const HostPort& port, uint32_t rounds) {
        LockReleased released;
        PushTimes times = time_pushes(port.port, rounds);
        return std::pair(std::move(times.pushed), std::move(times.taken));
      },
      nb::arg("port"), nb::arg("rounds"),
      "What a push takes its thread, and until the engine has taken it: ns.");
  module.def(
      "time_messages",
      [](const HostPort& port, uint32_t threads, uint64_t each, uint64_t chunks, uint64_t stride,
         uint64_t chunks_of_buffer) {
        LockReleased released;
        return time_messages(port.port, {threads, each, chunks, stride, chunks_of_buffer});
      },
      nb::arg("port"), nb::arg("threads"), nb::arg("each"), nb::arg("chunks"), nb::arg("stride"),
      nb::arg("chunks_of_buffer"), "ns until all have ended; 0: a call failed.");
  module.def(
      "time_copies",
      [](uintptr_t dst, uintptr_t src, uint64_t bytes, uint64_t count, uint64_t bytes_of_buffer) {
        LockReleased released;
        return time_copies(reinterpret_cast<std::byte*>(dst),
                           reinterpret_cast<const std::byte*>(src), bytes, count, bytes_of_buffer);
      },
      nb::arg("dst"), nb::arg("src"), nb::arg("nbytes"), nb::arg("count"),
      nb::arg("bytes_of_buffer"), "The same by a loop of memcpy: ns.");
}

// An all-to-all with counts on the device, under way.
struct Exchange {
  std::vector<std::shared_ptr<RequestProxy>> proxies;
  std::vector<uint64_t> calls;
  nb::object kept;
  double timeout_s;

  bool done() const {
    for (size_t i = 0; i < proxies.size(); ++i) {
      if (!proxies[i]->exchanged(calls[i])) return false;
    }
    return true;
  }

  // All ranks' parts end, or do not, before the first one's error.
  void wait(std::optional<double> within_s) const {
    LockReleased released;
    const Deadline deadline = released.within(within_s.value_or(timeout_s));
    std::optional<Error> failure;
    for (size_t i = 0; i < proxies.size(); ++i) {
      try {
        proxies[i]->wait_exchange(calls[i], deadline);
      } catch (const Error& error) {
        if (!failure) failure = error;
      }
    }
    if (failure) throw Error(*failure);
  }
};

// All-to-alls of the same two buffers, with counts of one kind. Buffer 0 is written, 1 is read.
struct Exchanges {
  std::vector<std::shared_ptr<RequestProxy>> proxies;
  uint64_t width;  // bytes of a count
  uint64_t unit;   // bytes that it counts

  // Addresses of the counts and of the received ones, one a local rank; these and `streams` may be
  // empty.
  Exchange start(const std::pair<std::vector<uintptr_t>, std::vector<uintptr_t>>& at,
                 const std::vector<uintptr_t>& streams, nb::object kept, double timeout_s) const {
    const auto& [counts, received] = at;
    Exchange made{proxies, {}, std::move(kept), timeout_s};
    LockReleased released;
    for (size_t i = 0; i < proxies.size(); ++i) {
      made.calls.push_back(proxies[i]->exchange(
          {.counts = reinterpret_cast<const void*>(counts[i]),
           .received = received.empty() ? nullptr : reinterpret_cast<void*>(received[i]),
           .wide = width == 8,
           .unit_bytes = unit,
           .dst = 0,
           .src = 1,
           .stream = streams.empty() ? 0 : streams[i]}));
    }
    return made;
  }
};

void bind_exchanges(nb::module_& module) {
  nb::class_<Exchange>(module, "Exchange", "An all_to_all_v with counts on the device, under way.")
      .def("done", &Exchange::done,
           "Whether it has ended. Only `wait` tells whether it ended well.")
      .def("wait", &Exchange::wait, nb::arg("timeout") = nb::none(),
           "Waits until the output is complete and the input may be written again. Raises `Error`: "
           "invalid (counts that have no room somewhere: on all ranks, and nothing was sent), "
           "timeout, peer, driver. After the last three these buffers can have no other call.");
  nb::class_<Exchanges>(module, "Exchanges", "Such calls of the same two buffers.")
      .def(
          "__init__",
          [](Exchanges* self, std::vector<std::shared_ptr<RequestProxy>> proxies, uint64_t width,
             uint64_t unit) { new (self) Exchanges{std::move(proxies), width, unit}; },
          nb::arg("proxies"), nb::arg("width"), nb::arg("unit"))
      .def("start", &Exchanges::start, nb::arg("at"), nb::arg("streams"), nb::arg("kept"),
           nb::arg("timeout_s"));
}

void bind_proxy(nb::module_& module) {
  nb::class_<RequestProxy>(module, "RequestProxy", "The engine of one local rank's requests.")
      .def_prop_ro("rank", &RequestProxy::rank)
      .def_prop_ro(
          "address",
          [](const RequestProxy& self) { return reinterpret_cast<uintptr_t>(self.port_address()); })
      .def_prop_ro("port",
                   [](const RequestProxy& self) {
                     return nb::bytes(reinterpret_cast<const char*>(&self.port()),
                                      sizeof(RequestPort));
                   })
      .def("host_port",
           [](const RequestProxy& self) {
             if (self.host_visible()) return HostPort{self.port()};
             fail(Code::unsupported, "host_port needs backend host or sim; give kernels port()");
           })
      .def(
          "run",
          [](const RequestProxy&, const nb::object&) {
            fail(Code::unsupported, "requests: threads are simulated on backend sim alone");
          },
          nb::arg("threads"))
      .def("check", &RequestProxy::check, Unlocked())
      .def_prop_ro("stats",
                   [](const RequestProxy& self) {
                     const proxy::ProxyStats stats = self.stats();
                     return std::tuple(stats.requests, stats.signals, stats.copies, stats.batches,
                                       stats.bytes);
                   })
      .def(
          "drain",
          [](RequestProxy& self, double timeout_s) {
            LockReleased released;
            self.drain(released.within(timeout_s));
          },
          nb::arg("timeout_s"))
      .def(
          "stop",
          [](nb::handle_t<RequestProxy> self, double timeout_s) {
            RequestProxy* const here = if_here(self);
            LockReleased released;
            if (here != nullptr) here->stop(released.within(timeout_s));
          },
          nb::arg("timeout_s"));
}

}  // namespace

void bind_requests(nb::module_& module) {
  bind_host_port(module);
  bind_trials(module);
  bind_times(module);
  bind_virtual_requests(module);
  bind_proxy(module);
  bind_exchanges(module);
  module.def("open_requests", &open_requests, nb::arg("comm"), nb::arg("buffers"),
             nb::arg("schedule"), nb::arg("chunk_bytes"), nb::arg("slots"), nb::arg("limit_s"),
             nb::arg("spin_s"), nb::arg("exchanges"), nb::arg("engine"), nb::arg("timeout_s"),
             nb::sig("def open_requests(comm: Communicator, buffers: collections.abc.Sequence["
                     "tuple[Window, int, int]], schedule: collections.abc.Sequence[collections.abc."
                     "Sequence[tuple[int, int, int, int, int, int]]], chunk_bytes: int, slots: "
                     "int, limit_s: float, "
                     "spin_s: float, exchanges: bool, engine: str, timeout_s: float) -> "
                     "list[RequestProxy] | list[VirtualProxy]"));
  module.def(
      "place_of",
      [](Communicator& self, Rank rank, uintptr_t address, uint64_t bytes) {
        const auto place = self.place_of(rank, reinterpret_cast<std::byte*>(address), bytes);
        return std::pair(place.window, place.offset);
      },
      nb::arg("comm"), nb::arg("rank"), nb::arg("address"), nb::arg("nbytes"),
      "Which window memory of the local rank that is; (None, 0): none.");
}

}  // namespace offcore
