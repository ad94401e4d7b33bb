#include "tensors.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <string>
#include <string_view>
#include <vector>

#include "core/base/error.h"

namespace offcore {
namespace {

PyTypeObject* tensor_type = nullptr;
PyObject* strided = nullptr;  // torch's layout of dense tensors

struct Names {
  Name is_cuda{"is_cuda"};
  Name get_device{"get_device"};
  Name layout{"layout"};
  Name is_contiguous{"is_contiguous"};
  Name is_conj{"is_conj"};
  Name is_neg{"is_neg"};
  Name data_ptr{"data_ptr"};
  Name nbytes{"nbytes"};
  Name dtype{"dtype"};
  Name shape{"shape"};
};

const Names& names() {
  static const Names* const all = new Names();  // the interpreter may end before they do
  return *all;
}

nb::object checked(PyObject* object) {
  if (object == nullptr) throw nb::python_error();
  return nb::steal(object);
}

nb::handle yes() { return Py_True; }

nb::object plain_dtype(nb::handle given, int device) {
  return is_plain(given, device) ? names().dtype.of(given) : nb::none();
}

nb::object plain_exchange(const nb::tuple& given, int device) {
  const nb::object out = given[0], inp = given[1], counts = given[2], received = given[3];
  const bool asked = !received.is_none();
  if (device < 0 || !is_plain(out, device) || !is_plain(inp, device) || !is_plain(counts, device) ||
      (asked && !is_plain(received, device))) {
    return nb::none();
  }
  const auto [counts_at, counts_bytes] = place_of_tensor(counts);
  std::pair<uintptr_t, uint64_t> told{};
  if (asked) told = place_of_tensor(received);
  const auto dtype = [](nb::handle tensor) { return names().dtype.of(tensor); };
  nb::tuple facts = nb::make_tuple(place_of_tensor(out), place_of_tensor(inp),
                                   names().shape.of(inp), dtype(counts), counts_bytes,
                                   asked ? dtype(received) : nb::none(), told.second);
  return nb::make_tuple(std::move(facts),
                        nb::make_tuple(nb::make_tuple(counts_at),
                                       asked ? nb::make_tuple(told.first) : nb::make_tuple()));
}

}  // namespace

nb::object Name::of(nb::handle object) const {
  return checked(PyObject_GetAttr(object.ptr(), interned_));
}

nb::object Name::find(nb::handle object) const {
  PyObject* const found = PyObject_GetAttr(object.ptr(), interned_);
  if (found != nullptr) return nb::steal(found);
  PyErr_Clear();
  return nb::none();
}

nb::object Name::call_of(nb::handle object) const {
  PyObject* self = object.ptr();  // PyObject_CallMethodNoArgs is not in the stable ABI
  return checked(PyObject_VectorcallMethod(interned_, &self, 1, nullptr));
}

bool is_tensor(nb::handle given) {
  return tensor_type != nullptr && Py_TYPE(given.ptr()) == tensor_type;
}

bool is_plain(nb::handle given, int device) {
  const auto is = [&](const Name& question) { return question.call_of(given).is(yes()); };
  return is_tensor(given) && names().is_cuda.of(given).is(yes()) &&
         nb::cast<int>(names().get_device.call_of(given)) == device &&
         names().layout.of(given).is(strided) && is(names().is_contiguous) &&
         !is(names().is_conj) && !is(names().is_neg);
}

std::pair<uintptr_t, uint64_t> place_of_tensor(nb::handle tensor) {
  return {nb::cast<uintptr_t>(names().data_ptr.call_of(tensor)),
          nb::cast<uint64_t>(names().nbytes.of(tensor))};
}

// torch has one object of each dtype.
std::optional<DType> reduced_dtype(nb::handle tensor) {
  static auto* const known = new std::vector<std::pair<nb::object, std::optional<DType>>>;
  const nb::object dtype = names().dtype.of(tensor);
  for (const auto& [object, kind] : *known) {
    if (object.is(dtype)) return kind;
  }
  std::optional<DType> kind;
  const std::string name = nb::cast<std::string>(nb::str(dtype));  // "torch.float32"
  try {
    kind = parse_dtype(std::string_view(name).substr(name.find('.') + 1));
  } catch (const Error&) {  // it only moves
  }
  known->emplace_back(dtype, kind);
  return kind;
}

void bind_tensors(nb::module_& module) {
  module.def(
      "tensor_class",
      [](nb::type_object type, nb::object layout) {
        tensor_type = reinterpret_cast<PyTypeObject*>(type.release().ptr());
        strided = layout.release().ptr();
      },
      nb::arg("type"), nb::arg("strided"),
      "Makes calls take tensors of that class, torch's; `strided` is its layout of dense ones.");
  module.def(
      "plain_dtype", &plain_dtype, nb::arg("given").none(), nb::arg("device"),
      "The dtype of a tensor that calls of a rank on that GPU take as it is; None: it is none,\n"
      "of another class, elsewhere or not contiguous.");
  module.def(
      "plain_exchange", &plain_exchange, nb::arg("given"), nb::arg("device"),
      "What an all_to_all_v of these tensors (output, input, counts, received or None) is known "
      "by,\n"
      "and the addresses of both counts, which calls may change; None: one is no plain tensor.",
      nb::sig("def plain_exchange(given: tuple[object, ...], device: int) -> "
              "tuple[object, tuple[tuple[int], tuple[int, ...]]] | None"));
}

}  // namespace offcore
