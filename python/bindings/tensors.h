// Tensors of torch's own class, read without a Python object for each fact. Only what nearly every
// call passes: whatever else a call may take goes by python/offcore/operands.py.
#pragma once
#include <cstdint>
#include <optional>
#include <utility>

#include "core/comm/request.h"
#include "module.h"

namespace offcore {

// Whether it is of the class that tensor_class() has named, and of no other.
bool is_tensor(nb::handle given);

// A tensor's address and bytes.
std::pair<uintptr_t, uint64_t> place_of_tensor(nb::handle tensor);

// Its element type, if reductions take it.
std::optional<DType> reduced_dtype(nb::handle tensor);

inline Operand operand_at(uintptr_t address, uint64_t bytes) {
  return {.data = reinterpret_cast<std::byte*>(address), .bytes = bytes, .given = true};
}

inline Operand operand_of(nb::handle tensor) {
  const auto [address, bytes] = place_of_tensor(tensor);
  return operand_at(address, bytes);
}

// Whether it is such a tensor on that GPU whose bytes lie there as they are: dense, contiguous, and
// no lazy conjugate or negative.
bool is_plain(nb::handle given, int device);

// A name as the interpreter's own tables have it, so that a look-up compares pointers.
class Name {
 public:
  explicit Name(const char* text) : interned_(PyUnicode_InternFromString(text)) {
    if (interned_ == nullptr) throw nb::python_error();
  }
  nb::object of(nb::handle object) const;       // the attribute
  nb::object find(nb::handle object) const;     // the same, or None where there is none
  nb::object call_of(nb::handle object) const;  // what the method returns

 private:
  PyObject* interned_;
};

}  // namespace offcore
