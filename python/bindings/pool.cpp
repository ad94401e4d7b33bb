// Window memory for an allocator of the caller's framework, which knows functions by name only and
// passes them nothing that says whose memory they give: so there is a pair of functions, a door,
// for every pool that can be open at once. A closed pool lives until its last part has come back.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include <array>
#include <memory>
#include <mutex>

#include "core/base/error.h"
#include "core/window/arena.h"
#include "core/window/window.h"
#include "module.h"
#include "process.h"

namespace offcore {
namespace {

constexpr uint64_t kPoolAlign = 512;  // what CUDA's own allocations are aligned to

struct Pool {
  std::shared_ptr<Window> window;
  std::byte* base = nullptr;
  Arena arena;
  bool closed = false;
};

struct Door {
  std::mutex mutex;
  std::unique_ptr<Pool> pool;

  void* take(uint64_t bytes) {
    const std::scoped_lock lock(mutex);
    if (!pool || pool->closed) return nullptr;
    const auto offset = pool->arena.take(bytes);
    return offset ? pool->base + *offset : nullptr;
  }

  void give(void* part) {
    std::unique_ptr<Pool> done;  // freed without the mutex
    const std::scoped_lock lock(mutex);
    if (!pool || part == nullptr) return;
    pool->arena.give(static_cast<uint64_t>(static_cast<std::byte*>(part) - pool->base));
    if (pool->closed && pool->arena.empty()) done = std::move(pool);
  }

  void close() {
    std::unique_ptr<Pool> done;
    const std::scoped_lock lock(mutex);
    if (!pool) return;
    pool->closed = true;
    if (pool->arena.empty()) done = std::move(pool);
  }
};

#define OFFCORE_DOORS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define OFFCORE_ONE(n) +1
// A framework may give parts back after the interpreter has ended, and in a child.
PerProcess<std::array<Door, OFFCORE_DOORS(OFFCORE_ONE)>> doors_here;
#undef OFFCORE_ONE
auto& doors() { return doors_here.get(); }

uint32_t open_pool(Window& window, Rank rank) {
  if (rank >= window.ranks()) fail(Code::invalid, "rank ", rank, " is not in this window");
  for (uint32_t number = 0; number < doors().size(); ++number) {
    Door& door = doors()[number];
    const std::scoped_lock lock(door.mutex);
    if (door.pool) continue;
    door.pool = std::make_unique<Pool>(Pool{.window = window.shared_from_this(),
                                            .base = window.base(rank),
                                            .arena = {window.bytes(), kPoolAlign}});
    return number;
  }
  fail(Code::unsupported, "more than ", doors().size(),
       " memory pools in a process: delete one, and the tensors in it");
}

}  // namespace

#define OFFCORE_DOOR(n)                                                                            \
  extern "C" __attribute__((visibility("default"))) void* offcore_pool_take_##n(size_t bytes, int, \
                                                                                void*) {           \
    return doors()[n].take(bytes);                                                                 \
  }                                                                                                \
  extern "C" __attribute__((visibility("default"))) void offcore_pool_give_##n(void* part, size_t, \
                                                                               int, void*) {       \
    doors()[n].give(part);                                                                         \
  }
OFFCORE_DOORS(OFFCORE_DOOR)
#undef OFFCORE_DOOR

void bind_pool(nb::module_& module) {
  module.def("open_pool", &open_pool, nb::arg("window"), nb::arg("rank"),
             "A rank's window memory as offcore_pool_take_N and offcore_pool_give_N: gives N.");
  module.def(
      "close_pool", [](uint32_t door) { doors().at(door).close(); }, nb::arg("door"),
      "Nothing more is given; the memory goes when its last part has come back.");
  module.def(
      "pool_taken_bytes",
      [](uint32_t number) -> uint64_t {
        Door& door = doors().at(number);
        const std::scoped_lock lock(door.mutex);
        return door.pool ? door.pool->arena.taken_bytes() : 0;
      },
      nb::arg("door"));
  nb::class_<Arena>(module, "Arena", "First-fit parts of a range of addresses.")
      .def(nb::init<uint64_t, uint64_t>(), nb::arg("bytes"), nb::arg("align"))
      .def("take", &Arena::take, nb::arg("bytes"))
      .def("give", &Arena::give, nb::arg("offset"))
      .def_prop_ro("taken_bytes", &Arena::taken_bytes);
}

}  // namespace offcore
