// Moves, variants, lowering and the choice of a variant.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "core/base/error.h"
#include "core/plan/plan.h"
#include "core/plan/reduction.h"
#include "module.h"
#include "place.h"

namespace offcore {
namespace {

using Counts64 = std::vector<uint64_t>;
// (buffer, rank, offset); rank -1 is the host.
Place place_of(const Slice& slice) {
  return {slice.buffer, slice.rank == kHostRank ? -1 : int32_t{slice.rank}, slice.offset};
}

Buffer::Home parse_kind(const std::string& text) {
  for (auto kind : {Buffer::Home::window, Buffer::Home::local, Buffer::Home::host}) {
    if (to_string(kind) == text) return kind;
  }
  fail(Code::invalid, "unknown kind of buffer '", text, "': window, local or host");
}

using List = Moves (*)(Rank, std::vector<Buffer>, std::vector<Move>);

Moves batch(List list_of, Rank ranks,
            const std::vector<std::tuple<std::string, std::string, uint64_t>>& buffers,
            const std::vector<std::tuple<Place, Place, uint64_t>>& moves) {
  std::vector<Buffer> declared;
  for (const auto& [name, kind, bytes] : buffers) {
    declared.push_back({.name = name, .kind = parse_kind(kind), .bytes = bytes});
  }
  std::vector<Move> list;
  for (const auto& [dst, src, bytes] : moves) {
    list.push_back({.dst = slice_of(dst), .src = slice_of(src), .bytes = bytes});
  }
  return list_of(ranks, std::move(declared), std::move(list));
}

std::vector<std::string> names(const std::vector<Variant>& variants) {
  std::vector<std::string> result;
  for (const Variant& variant : variants) result.push_back(to_string(variant));
  return result;
}

void bind_moves(nb::module_& module) {
  nb::class_<Moves>(module, "Moves")
      .def_ro("op", &Moves::op)
      .def_ro("ranks", &Moves::ranks)
      .def_ro("in_place", &Moves::in_place)
      .def_ro("full_exchange", &Moves::full_exchange)
      .def_prop_ro(
          "moves",
          [](const Moves& self) {
            std::vector<std::tuple<Place, Place, uint64_t>> list;
            for (const Move& move : self.moves) {
              list.emplace_back(place_of(move.dst), place_of(move.src), move.bytes);
            }
            return list;
          },
          "(dst, src, bytes); a place is (buffer, rank, offset), rank -1 the host.");
  module.def(
      "moves_all_gather",
      [](const Counts64& counts, bool in_place) { return moves_all_gather(counts, in_place); },
      nb::arg("counts"), nb::arg("in_place") = false);
  module.def(
      "moves_all_to_all",
      [](Rank ranks, const Counts64& counts, bool in_place) {
        return moves_all_to_all(ranks, counts, in_place);
      },
      nb::arg("ranks"), nb::arg("counts"), nb::arg("in_place") = false);
  module.def("moves_broadcast", &moves_broadcast, nb::arg("ranks"), nb::arg("root"),
             nb::arg("nbytes"), nb::arg("in_place") = false);
  module.def(
      "moves_scatter",
      [](Rank root, const Counts64& counts) { return moves_scatter(root, counts); },
      nb::arg("root"), nb::arg("counts"));
  module.def(
      "moves_gather", [](Rank root, const Counts64& counts) { return moves_gather(root, counts); },
      nb::arg("root"), nb::arg("counts"));
  for (const auto& [name, list] :
       {std::pair{"moves_batch", &moves_batch}, {"moves_listed", &moves_listed}}) {
    module.def(
        name,
        [list](Rank ranks,
               const std::vector<std::tuple<std::string, std::string, uint64_t>>& buffers,
               const std::vector<std::tuple<Place, Place, uint64_t>>& moves) {
          return batch(list, ranks, buffers, moves);
        },
        nb::arg("ranks"), nb::arg("buffers"), nb::arg("moves"),
        "buffers: (name, kind, bytes), their ids from 1 on; moves: (dst, src, bytes). moves_batch\n"
        "merges them, moves_listed leaves them as they are.");
  }
}

void bind_reductions(nb::module_& module) {
  module.def("equal_parts", &equal_parts, nb::arg("nbytes"), nb::arg("ranks"),
             "The parts in bytes of an array that all ranks reduce, one a rank.");
  module.def(
      "plan_reduction",
      [](const std::string& op, std::vector<uint64_t> parts, const std::string& reduction,
         const std::string& dtype, const std::string& variant, const Machine& machine,
         const ProtocolForm& protocol, Rank root, bool in_place, double scale) {
        const ReductionPlan plan{op,
                                 std::move(parts),
                                 root,
                                 in_place,
                                 {parse_reduce_op(reduction), parse_dtype(dtype), scale}};
        return *plan_reduction(plan, variant, machine, protocol);
      },
      nb::arg("op"), nb::arg("parts"), nb::arg("reduction"), nb::arg("dtype"), nb::arg("variant"),
      nb::arg("machine"), nb::arg("protocol"), nb::arg("root") = 0, nb::arg("in_place") = false,
      nb::arg("scale") = 1.0, "lower, legalize and verify what reduces.");
  module.def(
      "tuned_variant",
      [](const std::string& op, std::vector<uint64_t> parts, const Machine& machine,
         const ProtocolForm& protocol, bool in_place) {
        return tuned_variant({.op = op, .parts = std::move(parts), .in_place = in_place}, machine,
                             protocol);
      },
      nb::arg("op"), nb::arg("parts"), nb::arg("machine"), nb::arg("protocol"), nb::arg("in_place"),
      "What the tuned table has for a reduction, or an empty string.");
}

void bind_scales(nb::module_& module) {
  nb::class_<ScaleRange>(module, "ScaleRange")
      .def(nb::init<uint64_t>(), nb::arg("unit"), "unit: bytes; it divides all counts.")
      .def("holds", &ScaleRange::holds, nb::arg("unit"));
  module.def("part_of", &part_of, nb::arg("program"), nb::arg("rank"),
             "The queues of one rank: no whole program, which verify refuses.");
  module.def("scaled", &scaled, nb::arg("program"), nb::arg("unit"), nb::arg("to"),
             "The program for another unit, which the range of its plan holds.");
}

}  // namespace

void bind_plan(nb::module_& module) {
  bind_moves(module);
  bind_scales(module);
  nb::class_<ProtocolForm>(module, "Protocol")
      .def(
          "__init__",
          [](ProtocolForm* self, bool entry, bool staged, bool captured) {
            new (self) ProtocolForm{.entry = entry, .staged = staged, .captured = captured};
          },
          nb::arg("entry") = true, nb::arg("staged") = false, nb::arg("captured") = false)
      .def("__str__", [](const ProtocolForm& self) { return to_string(protocol_of(self)); });
  module.def("variants", [] { return names(all_variants()); }, "Every variant's name.");
  module.def("default_variant", &default_variant,
             "What `auto` stands for by OFFCORE_VARIANT; raises invalid.");
  module.def(
      "check_variant", [](const std::string& name) { return to_string(parse_variant(name)); },
      nb::arg("name"), "The variant's canonical name; raises invalid for an unknown one.");
  module.def(
      "variants_of",
      [](const Moves& moves, const ProtocolForm& protocol) {
        return names(variants_of(moves, protocol));
      },
      nb::arg("moves"), nb::arg("protocol"), "The variants that these moves can have.");
  module.def(
      "why_not",
      [](const Moves& moves, const std::string& variant, const ProtocolForm& protocol) {
        return why_not(moves, parse_variant(variant), protocol);
      },
      nb::arg("moves"), nb::arg("variant"), nb::arg("protocol"),
      "Why the moves cannot have the variant; empty when they can.");
  module.def(
      "lower",
      [](const Moves& moves, const std::string& variant, const Machine& machine,
         const ProtocolForm& protocol) {
        return lower(moves, parse_variant(variant), machine, protocol);
      },
      nb::arg("moves"), nb::arg("variant"), nb::arg("machine"), nb::arg("protocol"));
  module.def("legalize", &legalize, nb::arg("program"), nb::arg("machine"));
  module.def(
      "plan",
      [](const Moves& moves, const std::string& variant, const Machine& machine,
         const ProtocolForm& protocol, ScaleRange* range) {
        return *plan(moves, parse_variant(variant), machine, protocol, Deadline::never(), range);
      },
      nb::arg("moves"), nb::arg("variant"), nb::arg("machine"), nb::arg("protocol"),
      nb::arg("range").none() = nb::none(),
      "lower, legalize and verify. range: becomes that of the units for which the plan is the "
      "same\n"
      "but for its scale.");
  module.def(
      "choose",
      [](const Moves& moves, uint64_t total_bytes, const Machine& machine,
         const ProtocolForm& protocol) {
        const Choice choice = choose(moves, total_bytes, machine, protocol);
        return nb::make_tuple(to_string(choice.variant), choice.tuned);
      },
      nb::arg("moves"), nb::arg("total_bytes"), nb::arg("machine"), nb::arg("protocol"),
      "(variant, whether the tuned table said so).");
  bind_reductions(module);
}

}  // namespace offcore
