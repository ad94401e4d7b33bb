// SDMA packets, programs as packets, rings and emulated engines.
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <sched.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "core/backend/backend.h"
#include "core/backend/sdma/encode.h"
#include "core/base/error.h"
#include "module.h"
#include "released.h"
#include "studies/sdma/decode.h"
#include "studies/sdma/engine.h"

namespace offcore {
namespace {

using namespace sdma;

using Dwords = std::vector<uint32_t>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::dict fields_of(const Packet& packet) {
  nb::dict fields;
  for (const Bits& bits : layout_of(packet.kind).fields) {
    fields[nb::str(to_string(bits.field).data(), to_string(bits.field).size())] =
        packet[bits.field];
  }
  return fields;
}

nb::tuple shown(const Packet& packet, uint32_t dword) {
  return nb::make_tuple(to_string(packet.kind), fields_of(packet), dword);
}

using Fields = std::map<std::string, uint64_t>;

Packet packet_of(const std::string& kind, const Fields& fields) {
  Packet packet{.kind = parse_kind(kind)};
  const PacketLayout& layout = layout_of(packet.kind);
  for (const auto& [name, value] : fields) {
    const Field field = parse_field(name);
    const bool has = std::any_of(layout.fields.begin(), layout.fields.end(),
                                 [&](const Bits& bits) { return bits.field == field; });
    if (!has) fail(Code::invalid, layout.name, " has no field ", name);
    packet[field] = value;
  }
  return packet;
}

Dwords pack_one(const std::string& kind, const Fields& fields) {
  Dwords dwords;
  pack(packet_of(kind, fields), dwords);
  return dwords;
}

using Place = std::tuple<std::string, uint32_t, uint32_t>;

std::tuple<std::string, uint32_t, std::vector<Place>> packet_at(uint32_t header) {
  const PacketLayout* layout = layout_at(header);
  if (layout == nullptr) fail(Code::invalid, "no packet begins with ", hex(header));
  std::vector<Place> fields;
  for (const Bits& bits : layout->fields) {
    fields.emplace_back(to_string(bits.field), bits.bit, bits.bits);
  }
  return {layout->name, packet_dwords(header), fields};
}

std::vector<nb::tuple> unpack_all(const Dwords& dwords) {
  std::vector<nb::tuple> packets;
  for (const Decoded& decoded : decode(dwords)) {
    packets.push_back(shown(decoded.packet, decoded.dword));
  }
  return packets;
}

BufferId buffer_named(const Program& program, const std::string& name) {
  for (size_t id = 0; id < program.buffers.size(); ++id) {
    if (program.buffers[id].name == name) return static_cast<BufferId>(id);
  }
  fail(Code::invalid, "the program has no buffer named '", name, "'");
}

std::vector<EncodedQueue> streams_of(const std::map<uint32_t, Dwords>& queues) {
  std::vector<EncodedQueue> streams;
  for (const auto& [queue, dwords] : queues) streams.push_back({.queue = queue, .dwords = dwords});
  return streams;
}

void bind_packets(nb::module_& module) {
  module.def("sdma_pack", &pack_one, nb::arg("kind"), nb::arg("fields"), "A packet's dwords.");
  module.def(
      "sdma_unpack", &unpack_all, nb::arg("dwords"),
      "Rows of (kind, fields, first dword), nops left out. Raises invalid, naming the dword.");
  module.def("sdma_packet_at", &packet_at, nb::arg("header"),
             "(name, dwords, rows of (field, first bit, bits)) of the packet that begins with this "
             "dword. Raises invalid where none does.");
  nb::class_<Encoder>(module, "SdmaEncoder", "See core/backend/sdma/encode.h.")
      .def(nb::init<uint64_t>(), nb::arg("copy_bytes_max") = kCopyBytesMax)
      .def("copy", &Encoder::copy, nb::arg("dst"), nb::arg("src"), nb::arg("bytes"))
      .def(
          "broadcast",
          [](Encoder& encoder, const std::vector<uint64_t>& dsts, uint64_t src, uint64_t bytes) {
            encoder.broadcast(dsts, src, bytes);
          },
          nb::arg("dsts"), nb::arg("src"), nb::arg("bytes"))
      .def("strided", &Encoder::strided, nb::arg("dst"), nb::arg("src"), nb::arg("bytes"),
           nb::arg("rows"), nb::arg("dst_step"), nb::arg("src_step"))
      .def("swap", &Encoder::swap, nb::arg("a"), nb::arg("b"), nb::arg("bytes"))
      .def("poll", &Encoder::poll, nb::arg("address"), nb::arg("value"))
      .def("fence", &Encoder::fence, nb::arg("address"), nb::arg("value"))
      .def("timestamp", &Encoder::timestamp, nb::arg("address"))
      .def(
          "add",
          [](Encoder& encoder, const std::string& kind, const Fields& fields) {
            const Packet packet = packet_of(kind, fields);
            if (const std::string why = refusal(packet); !why.empty()) {
              fail(Code::invalid, layout_of(packet.kind).name, ": ", why);
            }
            encoder.add(packet);
          },
          nb::arg("kind"), nb::arg("fields"), "As it is; raises invalid where no engine takes it.")
      .def_prop_ro("dwords", &Encoder::dwords);
}

void bind_streams(nb::module_& module) {
  nb::class_<Addresses>(module, "SdmaAddresses", "See core/backend/sdma/encode_program.h.")
      .def(nb::init<>())
      .def_static("model", &model_addresses, nb::arg("program"))
      .def_rw("scratch", &Addresses::scratch)
      .def_rw("timestamps", &Addresses::timestamps)
      .def_rw("epoch", &Addresses::epoch)
      .def(
          "set",
          [](Addresses& addresses, const Program& program, const std::string& buffer, int rank,
             uint64_t base) {
            addresses.bases[{buffer_named(program, buffer), static_cast<Rank>(rank)}] = base;
          },
          nb::arg("program"), nb::arg("buffer"), nb::arg("rank"), nb::arg("base"),
          "rank -1 is the host.")
      .def("bases", [](const Addresses& addresses, const Program& program) {
        std::vector<nb::tuple> rows;
        for (const auto& [place, base] : addresses.bases) {
          const bool host = place.second == kHostRank;
          rows.push_back(nb::make_tuple(program.buffers.at(place.first).name,
                                        host ? -1 : int{place.second}, base));
        }
        return rows;
      });
  nb::class_<EncodedQueue>(module, "SdmaEncodedQueue", "The packets of one engine queue.")
      .def_ro("queue", &EncodedQueue::queue, "Index into the program's queues.")
      .def_ro("dwords", &EncodedQueue::dwords)
      .def_ro("starts", &EncodedQueue::starts, "Of each command: its first dword.")
      .def("patches",
           [](const EncodedQueue& stream, const Program& program) {
             constexpr const char* kWhat[] = {"address", "flag", "scratch", "timestamp"};
             std::vector<nb::tuple> rows;
             for (const Patch& patch : stream.patches) {
               const bool host = patch.rank == kHostRank;
               const bool address = patch.what == Patch::PatchKind::address;
               rows.push_back(nb::make_tuple(
                   patch.dword, kWhat[static_cast<size_t>(patch.what)],
                   address ? nb::cast(program.buffers.at(patch.buffer).name) : nb::none(),
                   address ? nb::cast(host ? -1 : int{patch.rank}) : nb::none(), patch.value));
             }
             return rows;
           })
      .def("replay", &replay, nb::arg("old"), nb::arg("to"));
  module.def(
      "sdma_encode",
      [](const Program& program, const Addresses& addresses, uint64_t copy_bytes_max,
         bool callers) { return encode(program, addresses, copy_bytes_max, callers); },
      nb::arg("program"), nb::arg("addresses"), nb::arg("copy_bytes_max") = kCopyBytesMax,
      nb::arg("callers") = false,
      "A stream for each engine queue; with `callers` for each caller queue too.");
  module.def(
      "sdma_decode",
      [](const std::map<uint32_t, Dwords>& queues, const Program& program,
         const Addresses& addresses) { return decode(streams_of(queues), program, addresses); },
      nb::arg("queues"), nb::arg("program"), nb::arg("addresses"),
      "The program with these dwords as its engine queues (by index into its queues).");
}

// A ring in memory of its own.
struct OwnRing {
  explicit OwnRing(uint64_t bytes, uint64_t offset)
      : dwords(bytes / 4, 0xffffffffu),  // whatever is fetched has to be written before
        rptr(offset),
        wptr(offset),
        doorbell(offset),
        ring({.dwords = dwords, .rptr = &rptr, .wptr = &wptr, .doorbell = &doorbell}) {}
  Dwords dwords;
  uint64_t rptr;
  uint64_t wptr;
  uint64_t doorbell;
  PacketRing ring;
};

// In parts, as room comes up.
void submit(PacketRing& ring, std::span<const uint32_t> packets, const Deadline& deadline) {
  for (size_t done = 0; done < packets.size();) {
    const size_t part = ring.part_of(packets.subspan(done));
    while (!ring.try_submit(packets.subspan(done, part))) {
      if (deadline.passed()) {
        const RingMemory& memory = ring.memory();
        fail(Code::timeout, "the ring of ", memory.bytes(), " bytes stayed full for ",
             shown_s(deadline.wait_ns()), " s: rptr ", *memory.rptr, ", wptr ", *memory.wptr, "; ",
             done, " of ", packets.size(), " dwords are submitted");
      }
      sched_yield();
    }
    done += part;
  }
}

nb::dict counts_of(const EngineCounts& counts) {
  nb::dict result;
  result["packets"] = counts.packets;
  result["moves"] = counts.moves;
  result["bytes"] = counts.bytes;
  result["overtaken"] = counts.overtaken;
  result["fences"] = counts.fences;
  result["atomics"] = counts.atomics;
  result["polls"] = counts.polls;
  result["parks"] = counts.parks;
  result["timestamps"] = counts.timestamps;
  result["traps"] = counts.traps;
  result["laps"] = counts.laps;
  return result;
}

void bind_engines(nb::module_& module) {
  nb::class_<sdma::EngineMemory>(module, "SdmaMemory", "What emulated engines reach.")
      .def(nb::init<>())
      .def(
          "add",
          [](sdma::EngineMemory& memory, uint64_t address, const Bytes& array) {
            memory.add(address, reinterpret_cast<std::byte*>(array.data()), array.size());
          },
          nb::arg("address"), nb::arg("array"), nb::keep_alive<1, 3>());
  nb::class_<OwnRing>(module, "SdmaRing", "See core/backend/sdma/packet_ring.h.")
      .def(nb::init<uint64_t, uint64_t>(), nb::arg("nbytes"), nb::arg("offset") = 0,
           "offset: what rptr, wptr and doorbell begin with.")
      .def(
          "submit",
          [](OwnRing& self, const Dwords& dwords, double timeout_s) {
            LockReleased released;
            submit(self.ring, dwords, released.within(timeout_s));
          },
          nb::arg("dwords"), nb::arg("timeout_s") = 10.0)
      .def("try_submit",
           [](OwnRing& self, const Dwords& dwords) { return self.ring.try_submit(dwords); })
      .def("part_of",
           [](const OwnRing& self, const Dwords& dwords) { return self.ring.part_of(dwords); })
      .def(
          "poke",
          [](OwnRing& self, const Dwords& dwords, uint64_t doorbell) {
            for (size_t i = 0; i < self.dwords.size() && i < dwords.size(); ++i) {
              self.dwords[i] = dwords[i];
            }
            self.doorbell = doorbell;
          },
          nb::arg("dwords"), nb::arg("doorbell"), "Writes the ring raw, and rings.")
      .def_prop_ro("free_bytes",
                   [](const OwnRing& self) {
                     return self.ring.memory().bytes() - 4 - (self.wptr - self.rptr);
                   })
      .def_ro("rptr", &OwnRing::rptr)
      .def_ro("wptr", &OwnRing::wptr)
      .def_ro("doorbell", &OwnRing::doorbell);
  nb::class_<Engine>(module, "SdmaEngine", "An emulated engine: studies/sdma/engine.h.")
      .def(
          "__init__",
          [](Engine* place, OwnRing& ring, const sdma::EngineMemory& memory, uint64_t seed,
             uint32_t overlap, int64_t now_ns) {
            EngineOptions options{.seed = seed, .overlap = overlap};
            if (now_ns >= 0) options.now_ns = [now_ns] { return now_ns; };
            new (place) Engine(ring.ring.memory(), memory, std::move(options));
          },
          nb::arg("ring"), nb::arg("memory"), nb::arg("seed") = 0, nb::arg("overlap") = 8,
          nb::arg("now_ns") = -1, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
          "now_ns: a time that stands still, instead of the clock.")
      .def(
          "run",
          [](Engine& engine, uint64_t packets_max) {
            LockReleased released;
            return to_string(engine.run(packets_max));
          },
          nb::arg("packets_max") = UINT64_MAX, "idle, busy, parked or faulted.")
      .def_prop_ro("state", [](const Engine& engine) { return to_string(engine.state()); })
      .def_prop_ro("fault", &Engine::fault)
      .def_prop_ro("counts", [](const Engine& engine) { return counts_of(engine.counts()); });
}

}  // namespace

void bind_sdma(nb::module_& module) {
  module.attr("SDMA_WORD_BYTES") = kWordBytes;
  bind_packets(module);
  bind_streams(module);
  bind_engines(module);
}

}  // namespace offcore
