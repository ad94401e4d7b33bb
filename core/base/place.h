// The host and network namespace that a process is in: whose Unix sockets and loopback it shares.
#pragma once
#include <cstdint>

namespace offcore {

uint64_t place_here();  // of the calling thread; equal at others that are there

}  // namespace offcore
