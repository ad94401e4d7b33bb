// Programs: text, contents, counts and the verifier.
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "core/ir/program.h"
#include "core/ir/text.h"
#include "core/ir/verify.h"
#include "module.h"
#include "released.h"

namespace offcore {
namespace {

std::vector<nb::tuple> buffers_of(const Program& program) {
  std::vector<nb::tuple> rows;
  for (size_t id = kFlagBuffer + 1; id < program.buffers.size(); ++id) {
    const Buffer& buffer = program.buffers[id];
    rows.push_back(nb::make_tuple(buffer.name, to_string(buffer.kind), buffer.bytes));
  }
  return rows;
}

std::vector<nb::tuple> queues_of(const Program& program) {
  std::vector<nb::tuple> rows;
  for (const Queue& queue : program.queues) {
    std::vector<std::string> commands;
    for (const Command& command : queue.commands) commands.push_back(print(command, program));
    const nb::object index =
        queue.index == kCallerQueue ? nb::object(nb::str("caller")) : nb::cast(queue.index);
    rows.push_back(nb::make_tuple(queue.rank, index, commands));
  }
  return rows;
}

}  // namespace

void bind_ir(nb::module_& module) {
  nb::class_<Counts>(module, "Counts", "What a program costs in commands.")
      .def_ro("commands", &Counts::commands, "Of every kind, on engine queues.")
      .def_ro("copies", &Counts::copies, "Copies and swaps.")
      .def_ro("engines", &Counts::engines, "Engine queues in use.")
      .def_ro("syncs", &Counts::syncs, "Signals on engine queues, each row counted.")
      .def_ro("bytes", &Counts::bytes, "Bytes written by copies and swaps.");
  nb::class_<Program> type(module, "Program",
                           "DMA commands of every queue of every rank. str() is its text form.");
  type.def_static("parse", &parse, nb::arg("text"),
                  "Raises invalid, naming line and column, for malformed text.")
      .def_static(
          "parse",
          [](const nb::bytes& text) { return parse(std::string_view(text.c_str(), text.size())); },
          nb::arg("text"))
      .def_prop_ro("text", [](const Program& program) { return print(program); })
      .def("__str__", [](const Program& program) { return print(program); })
      .def(
          "__eq__",
          [](const Program& program, const nb::object& other) {
            return nb::isinstance<Program>(other) && program == nb::cast<const Program&>(other);
          },
          nb::arg("other").none())
      .def_ro("op", &Program::op)
      .def_ro("machine", &Program::machine)
      .def_ro("variant", &Program::variant)
      .def_prop_ro("protocol", [](const Program& program) { return to_string(program.protocol); })
      .def_prop_ro("mode", [](const Program& program) { return to_string(program.mode); })
      .def_ro("ranks", &Program::ranks)
      .def_ro("native", &Program::native)
      .def_ro("flag_words", &Program::flag_words)
      .def_ro("flag_span", &Program::flag_span)
      .def_prop_ro("buffers", &buffers_of, "Rows of (name, kind, bytes), without the flags.")
      .def_prop_ro("queues", &queues_of, "Rows of (rank, index or \"caller\", command texts).")
      .def("counts", [](const Program& program) { return count(program); });
  type.attr("__hash__") = nb::none();  // equal programs are equal by value
  module.def(
      "verify", [](const Program& program) { verify(program); }, nb::arg("program"), Unlocked(),
      "Raises verify, naming rule, queue and command, for a program that breaks a rule.");
}

}  // namespace offcore
