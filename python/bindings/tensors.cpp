#include "tensors.h"

#include <nanobind/stl/pair.h>

namespace offcore {
namespace {

PyTypeObject* tensor_type = nullptr;

// Names as the interpreter's own tables have them, so that a look-up compares pointers.
struct Names {
  static PyObject* of(const char* name) {
    PyObject* interned = PyUnicode_InternFromString(name);
    if (interned == nullptr) throw nb::python_error();
    return interned;
  }
  PyObject* is_cuda = of("is_cuda");
  PyObject* get_device = of("get_device");
  PyObject* is_contiguous = of("is_contiguous");
  PyObject* data_ptr = of("data_ptr");
  PyObject* nbytes = of("nbytes");
  PyObject* dtype = of("dtype");
  PyObject* shape = of("shape");
};

const Names& names() {
  static const Names* const all = new Names();  // the interpreter may end before they do
  return *all;
}

nb::object checked(PyObject* object) {
  if (object == nullptr) throw nb::python_error();
  return nb::steal(object);
}

nb::object attribute(nb::handle tensor, PyObject* name) {
  return checked(PyObject_GetAttr(tensor.ptr(), name));
}

nb::object call(nb::handle tensor, PyObject* name) {
  PyObject* self = tensor.ptr();  // PyObject_CallMethodNoArgs is not in the stable ABI
  return checked(PyObject_VectorcallMethod(name, &self, 1, nullptr));
}

bool plain(nb::handle given, int device) {
  return is_tensor(given) && attribute(given, names().is_cuda).is(nb::handle(Py_True)) &&
         nb::cast<int>(call(given, names().get_device)) == device &&
         call(given, names().is_contiguous).is(nb::handle(Py_True));
}

nb::object plain_dtype(nb::handle given, int device) {
  return plain(given, device) ? attribute(given, names().dtype) : nb::none();
}

nb::object plain_exchange(const nb::tuple& given, int device) {
  const nb::object out = given[0], inp = given[1], counts = given[2], received = given[3];
  const bool asked = !received.is_none();
  if (device < 0 || !plain(out, device) || !plain(inp, device) || !plain(counts, device) ||
      (asked && !plain(received, device))) {
    return nb::none();
  }
  const auto [counts_at, counts_bytes] = place_of_tensor(counts);
  std::pair<uintptr_t, uint64_t> told{};
  if (asked) told = place_of_tensor(received);
  const auto dtype = [](nb::handle tensor) { return attribute(tensor, names().dtype); };
  nb::tuple facts = nb::make_tuple(place_of_tensor(out), place_of_tensor(inp),
                                   attribute(inp, names().shape), dtype(counts), counts_bytes,
                                   asked ? dtype(received) : nb::none(), told.second);
  return nb::make_tuple(std::move(facts),
                        nb::make_tuple(nb::make_tuple(counts_at),
                                       asked ? nb::make_tuple(told.first) : nb::make_tuple()));
}

}  // namespace

bool is_tensor(nb::handle given) {
  return tensor_type != nullptr && Py_TYPE(given.ptr()) == tensor_type;
}

std::pair<uintptr_t, uint64_t> place_of_tensor(nb::handle tensor) {
  return {nb::cast<uintptr_t>(call(tensor, names().data_ptr)),
          nb::cast<uint64_t>(attribute(tensor, names().nbytes))};
}

void bind_tensors(nb::module_& module) {
  module.def(
      "tensor_class",
      [](nb::type_object type) {
        tensor_type = reinterpret_cast<PyTypeObject*>(type.release().ptr());
      },
      nb::arg("type"), "Makes calls take tensors of that class, torch's.");
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
