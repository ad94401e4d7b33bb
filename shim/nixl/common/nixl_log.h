// In place of the header of this name in NIXL, which needs Abseil's: what NIXL's own headers use.
#pragma once
#include <iostream>

#define NIXL_ERROR std::cerr << "\noffcore: "
#define NIXL_ASSERT(condition) static_cast<void>(0)
