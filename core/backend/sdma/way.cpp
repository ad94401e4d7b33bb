#include "core/backend/sdma/way.h"

#include "core/backend/sdma/hip.h"
#include "core/backend/sdma/hsa.h"
#include "core/base/error.h"

namespace offcore::sdma {
namespace {

struct Found {
  size_t gpus = 0;
  std::string name;
  const char* way = "";
  bool hip = false;
};

Found find() {
  const hsa::Runtime& runtime = hsa::Runtime::open();
  const hsa::Gpu& first = runtime.gpus()[0];
  Found found{.gpus = runtime.gpus().size(), .name = first.name};
  for (const hsa::Gpu& gpu : runtime.gpus()) {
    if (gpu.pool.handle != 0 && runtime.host_pool().handle != 0) continue;
    fail(Code::unavailable, "a GPU or the host has no memory that may be allocated");
  }
  if (first.name.starts_with("gfx94") && runtime.has_queues()) {
    found.way = "user-mode SDMA queues (hsa_amd_queue_create)";
  } else if (runtime.has_batch_copy()) {
    found.way = "hsa_amd_memory_async_batch_copy: no prelaunch";
  } else {
    std::string missing;
    if (!hip::can_open(missing)) {
      fail(Code::unavailable, "this HSA runtime has neither hsa_amd_queue_create nor ",
           "hsa_amd_memory_async_batch_copy, and ", missing, ": a newer ROCm has them");
    }
    found.way = "hipMemcpyBatchAsync: no prelaunch, no swaps";
    found.hip = true;
  }
  return found;
}

}  // namespace

Ring& Way::ring(uint32_t, Rank, uint16_t) {
  fail(Code::unsupported, "this way has no rings of its own");
}

std::unique_ptr<Ticket> Way::copy(Rank, std::span<const Piece>) {
  fail(Code::unsupported, "copies go through this way's rings");
}

std::string told_way() {
  const Found found = find();
  return cat(found.gpus, " GPUs (", found.name, ") by ", found.way,
             "; never yet run on AMD hardware: packets and rings are tested on emulated engines");
}

std::unique_ptr<Way> open_way(const Machine& machine, Rank ranks) {
  const Found found = find();
  if (found.gpus < ranks) {
    fail(Code::unavailable, ranks, " ranks need as many GPUs; there are ", found.gpus);
  }
  return found.hip ? make_hip_way(ranks) : make_hsa_way(machine, ranks);
}

}  // namespace offcore::sdma
