#include "core/comm/lane.h"

namespace offcore {
namespace {

constexpr uint64_t kSlotBytesMin = 64 << 10;
constexpr uint64_t kSlotAlign = 4096;

}  // namespace

ControlMemory ControlMemory::create(Backend& backend, Rendezvous* rendezvous, Rank ranks,
                                    uint64_t bytes, const Deadline& deadline) {
  ControlMemory memory;
  if (rendezvous != nullptr) {
    auto window = Window::create(backend, rendezvous, ranks, bytes, deadline);
    for (Rank rank = 0; rank < ranks; ++rank) memory.bases.push_back(window->base(rank));
    memory.owner = window;
    return memory;
  }
  // One process: ordinary memory, also where the backend's own memory is phantom.
  const uint64_t share = (bytes + kWordBytes - 1) / kWordBytes * kWordBytes;
  struct alignas(kWordBytes) Line {
    std::byte bytes[kWordBytes];
  };
  auto lines = std::make_shared<std::vector<Line>>(share / kWordBytes * ranks);
  for (Rank rank = 0; rank < ranks; ++rank) {
    memory.bases.push_back((*lines)[share / kWordBytes * rank].bytes);
  }
  memory.owner = lines;
  return memory;
}

Flags Flags::create(Backend& backend, Rendezvous* rendezvous, Rank ranks, uint64_t words,
                    const Deadline& deadline) {
  return {
      .memory = ControlMemory::create(backend, rendezvous, ranks, 2 * words * kWordBytes, deadline),
      .words = words};
}

void Slots::grow(Backend& backend, Rendezvous* rendezvous, Rank ranks, uint64_t bytes,
                 const Deadline& deadline) {
  if (window_ && bytes <= bytes_) return;
  const uint64_t rounded =
      bytes <= kSlotBytesMin ? kSlotBytesMin : (bytes + kSlotAlign - 1) / kSlotAlign * kSlotAlign;
  window_ = Window::create(backend, rendezvous, ranks, rounded * kCount, deadline);
  bytes_ = rounded;
  turn_ = 0;
}

}  // namespace offcore
