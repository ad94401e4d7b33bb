// How much memory of this host the process may use: as the kernel tells, and as the control groups
// allow that it is in, of version 1 or 2, at any depth, in a namespace of their own or not.
#pragma once
#include <cstdint>
#include <string>

namespace offcore {

struct HostMemory {
  uint64_t total_bytes = 0;
  uint64_t available_bytes = 0;  // of these, what nobody uses or only caches of files do
};

// `root`: a folder with another /proc and /sys, for tests.
HostMemory host_memory(const std::string& root = "");

// What bounds memory that cannot be swapped out, for an error's text.
std::string locked_memory_limits();

}  // namespace offcore
