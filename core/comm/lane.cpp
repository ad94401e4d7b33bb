#include "core/comm/lane.h"

#include <sys/mman.h>

#include <algorithm>

#include "core/backend/shared_memory.h"

namespace offcore {
namespace {

constexpr uint64_t kSlotBytesMin = 64 << 10;
constexpr uint64_t kSlotAlign = 4096;

ControlMemory of_window(const std::shared_ptr<Window>& window) {
  ControlMemory memory;
  for (Rank rank = 0; rank < window->ranks(); ++rank) memory.bases.push_back(window->base(rank));
  memory.owner = window;
  return memory;
}

}  // namespace

ControlMemory ControlMemory::create(Rendezvous* rendezvous, Rank ranks, uint64_t bytes,
                                    const Deadline& deadline) {
  if (rendezvous != nullptr) {
    SharedMemory shared;
    return of_window(Window::create(shared, rendezvous, ranks, bytes, deadline));
  }
  // One process: ordinary memory, also where the backend's own memory is phantom. Many ranks have
  // many words, few of which are used: pages come as they are touched.
  ControlMemory memory;
  const uint64_t share = (bytes + kWordBytes - 1) / kWordBytes * kWordBytes;
  const uint64_t whole = std::max(share * ranks, kWordBytes);
  constexpr int kLazy = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* data = mmap(nullptr, whole, PROT_READ | PROT_WRITE, kLazy, -1, 0);
  if (data == MAP_FAILED) {
    fail_errno(Code::memory,
               cat("cannot map ", whole, " bytes for the words of ", ranks, " ranks"));
  }
  memory.owner = std::shared_ptr<void>(data, [whole](void* mapped) { munmap(mapped, whole); });
  for (Rank rank = 0; rank < ranks; ++rank) {
    memory.bases.push_back(static_cast<std::byte*>(data) + rank * share);
  }
  return memory;
}

Flags Flags::create(Backend& backend, Rendezvous* rendezvous, Rank ranks, uint64_t words,
                    const Deadline& deadline) {
  const uint64_t bytes = 2 * words * kWordBytes;  // a rank's, and for rank 0 the host's
  if (backend.host_visible()) {
    return {.memory = ControlMemory::create(rendezvous, ranks, bytes, deadline), .words = words};
  }
  return {.memory = of_window(Window::create(backend, rendezvous, ranks, bytes, deadline)),
          .words = words};
}

Flags Flags::part(uint64_t index, uint64_t count) const {
  Flags result{.memory = memory, .words = count};
  for (std::byte*& base : result.memory.bases) base += index * 2 * count * kWordBytes;
  return result;
}

Graph* Lane::find(uint64_t capture) const {
  for (const auto& graph : graphs) {
    if (graph->capture == capture) return graph.get();
  }
  return nullptr;
}

void Slots::grow(Backend& backend, Rendezvous* rendezvous, Rank ranks, uint64_t bytes,
                 const Deadline& deadline) {
  if (window_ && bytes <= bytes_) return;
  const uint64_t rounded =
      bytes <= kSlotBytesMin ? kSlotBytesMin : (bytes + kSlotAlign - 1) / kSlotAlign * kSlotAlign;
  const uint64_t count = turning_ + (guarded_ ? 1 : 0);
  auto window = Window::create(backend, rendezvous, ranks, rounded * count, deadline);
  if (window_) former_.push_back(std::move(window_));
  window_ = std::move(window);
  bytes_ = rounded;
  turn_ = 0;
}

Slots::SlotPlace Slots::take(bool turns) {
  SlotPlace place = upcoming();
  if (!turns) place.offset = turning_ * bytes_;
  // Whoever reads a former slot has been told to be done before this launch: so says the slot rule,
  // and on GPUs "done" means earlier in the stream. They may go when this launch has ended.
  if (turn_ + 2 >= turning_) place.former.swap(former_);
  if (turns) ++turn_;
  return place;
}

void Slots::give_back(SlotPlace place, bool turns) {
  if (turns) --turn_;
  if (!place.former.empty()) former_.swap(place.former);
}

}  // namespace offcore
