#include "core/backend/sdma/submit_path.h"

#include <cstring>

#include "core/backend/sdma/hip.h"
#include "core/backend/sdma/hsa.h"
#include "core/base/error.h"

namespace offcore::sdma {
namespace {

struct Found {
  size_t gpus = 0;
  std::string name;
  enum class FoundKind : uint8_t { queues, batch_copy, hip_batch } kind = FoundKind::queues;
  std::string path;
};

Found find() {
  const hsa::HsaRuntime& runtime = hsa::HsaRuntime::open();
  const hsa::Gpu& first = runtime.gpus()[0];
  Found found{.gpus = runtime.gpus().size(), .name = first.name};
  for (const hsa::Gpu& gpu : runtime.gpus()) {
    if (gpu.pool.handle != 0 && runtime.host_pool().handle != 0) continue;
    fail(Code::unavailable, "a GPU or the host has no memory that may be allocated");
  }
  const std::string no_queues = why_no_queues();
  if (no_queues.empty()) {
    found.path = "user-mode SDMA queues (hsa_amd_queue_create)";
    return found;
  }
  if (runtime.has_batch_copy()) {
    found.kind = Found::FoundKind::batch_copy;
    found.path = cat("hsa_amd_memory_async_batch_copy: no prelaunch (", no_queues, ")");
    return found;
  }
  std::string missing;
  if (!hip::can_open(missing)) {
    fail(Code::unavailable, no_queues, "; it lacks hsa_amd_memory_async_batch_copy; and ", missing,
         ": a newer ROCm has them");
  }
  found.kind = Found::FoundKind::hip_batch;
  found.path = cat("hipMemcpyBatchAsync: no prelaunch, no swaps (", no_queues,
                   "; it lacks hsa_amd_memory_async_batch_copy)");
  return found;
}

}  // namespace

SubmitPath::Pinned SubmitPath::pin(std::byte* data, uint64_t bytes) {
  const std::optional<Rank> place = own_->place_of(data);
  if (!place) return pin_callers(data, bytes);
  return {.address = reinterpret_cast<uint64_t>(data), .place = *place, .owner = nullptr};
}

Share SubmitPath::keep(Rank place, uint64_t bytes, void* data, void (*release)(void*)) {
  Share share{.rank = place == kHostRank ? Rank{0} : place, .bytes = bytes};
  if (data == nullptr) return share;
  std::memset(data, 0, bytes);
  share.data = static_cast<std::byte*>(data);
  own_->add(share.data, bytes, place);
  share.owner = std::shared_ptr<void>(data, [own = own_, release](void* memory) {
    own->remove(static_cast<std::byte*>(memory));
    release(memory);
  });
  return share;
}

PacketRing& SubmitPath::ring(uint32_t, Rank, uint16_t, bool) {
  fail(Code::unsupported, "this path has no rings of its own");
}

std::unique_ptr<Ticket> SubmitPath::copy(Rank, std::span<const BatchCopy>) {
  fail(Code::unsupported, "copies go through this path's rings");
}

std::string path_summary() {
  const Found found = find();
  return cat(found.gpus, " GPUs (", found.name, ") by ", found.path);
}

std::unique_ptr<SubmitPath> open_path(Rank ranks) {
  const Found found = find();
  if (found.gpus < ranks) {
    fail(Code::unavailable, ranks, " ranks need as many GPUs; there are ", found.gpus);
  }
  if (found.kind == Found::FoundKind::hip_batch) return make_hip_path(ranks);
  return make_hsa_path(ranks, found.kind == Found::FoundKind::queues);
}

}  // namespace offcore::sdma
