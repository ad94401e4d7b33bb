// The cuda backend: NVIDIA's copy engines by the driver API, opened at run time. No
// operation runs a kernel, unless a caller asks for one (copy_kernel.h).
//
// All ranks in one process, rank r on device r, or one process a GPU. Windows are physical
// allocations that every rank maps (memory.h); commands become asynchronous copies and stream
// memory operations (stream_encoder.h) on the caller's stream or on the backend's own (executor.h).
// The driver does not show when a command runs: a report tells the time until the host saw the end
// and the host's share of it, and nothing by command. NVLink multicast is never used.
#pragma once
#include <memory>
#include <vector>

#include "core/backend/backend.h"
#include "core/backend/options.h"

namespace offcore {

Probe probe_cuda();

std::unique_ptr<Backend> make_cuda(const Machine& machine, Rank ranks,
                                   std::vector<Rank> local_ranks, const CudaOptions& options);

}  // namespace offcore
