// Counts of calls, by name.
#pragma once

namespace fakenccl {

void count(const char* name);

}  // namespace fakenccl
