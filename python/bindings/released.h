// Python objects that the core keeps alive, and that any of its threads may let go of.
#pragma once
#include <memory>

#include "module.h"

namespace offcore {

// Holds a Python object from C++ memory that any thread may release. None: null.
std::shared_ptr<void> keep_alive(nb::object object);

// Drops what was let go of; called with the interpreter's lock.
void drop_released();

}  // namespace offcore
