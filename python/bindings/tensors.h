// Tensors of torch's own class, read without a Python object for each fact. Only what nearly every
// call passes: whatever else a call may take goes by python/offcore/operands.py.
#pragma once
#include <cstdint>
#include <utility>

#include "module.h"

namespace offcore {

// Whether it is of the class that tensor_class() has named, and of no other.
bool is_tensor(nb::handle given);

// A tensor's address and bytes.
std::pair<uintptr_t, uint64_t> place_of_tensor(nb::handle tensor);

}  // namespace offcore
