// Memory for an allocator of the caller's framework, which knows functions by name only and passes
// them nothing that says whose memory they give: so there is a pair of functions, a door, for every
// pool that can be open at once. A closed pool lives until its last part has come back.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>

#include "core/backend/cuda/cache_memory.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/window/arena.h"
#include "core/window/window.h"
#include "module.h"
#include "process.h"

namespace offcore {
namespace {

constexpr uint64_t kPoolAlign = 512;  // what CUDA's own allocations are aligned to

// What a pool gives parts of.
class PoolMemory {
 public:
  virtual ~PoolMemory() = default;
  virtual void* take(uint64_t bytes, int device) = 0;  // null: there is no room
  virtual void give(std::byte* part) = 0;
  virtual uint64_t taken_bytes() = 0;
};

class WindowMemory final : public PoolMemory {
 public:
  WindowMemory(std::shared_ptr<Window> window, Rank rank)
      : window_(std::move(window)),
        base_(window_->base(rank)),
        arena_(window_->bytes(), kPoolAlign) {}
  void* take(uint64_t bytes, int) override {
    const auto offset = arena_.take(bytes);
    return offset ? base_ + *offset : nullptr;
  }
  void give(std::byte* part) override { arena_.give(static_cast<uint64_t>(part - base_)); }
  uint64_t taken_bytes() override { return arena_.taken_bytes(); }

 private:
  std::shared_ptr<Window> window_;
  std::byte* base_;
  Arena arena_;
};

class CacheMemory final : public PoolMemory {
 public:
  CacheMemory(int device, uint64_t bytes) : device_(device), pool_(device, bytes) {}
  void* take(uint64_t bytes, int device) override {
    return device == device_ ? pool_.take(bytes) : nullptr;
  }
  void give(std::byte* part) override { pool_.give(part); }
  uint64_t taken_bytes() override { return pool_.taken_bytes(); }

 private:
  int device_;
  cuda::CachePool pool_;
};

struct Pool {
  std::unique_ptr<PoolMemory> memory;
  bool closed = false;
};

struct Door {
  std::mutex mutex;
  std::unique_ptr<Pool> pool;

  // The framework's code takes no exceptions, and null for "out of memory".
  void* take(uint64_t bytes, int device) noexcept {
    const std::scoped_lock lock(mutex);
    if (!pool || pool->closed) return nullptr;
    try {
      return pool->memory->take(bytes, device);
    } catch (const std::exception& why) {
      Log("memory pool").info("nothing to give: ", why.what());
      return nullptr;
    }
  }

  void give(void* part) noexcept {
    std::unique_ptr<Pool> done;  // freed without the mutex
    const std::scoped_lock lock(mutex);
    if (!pool || part == nullptr) return;
    try {
      pool->memory->give(static_cast<std::byte*>(part));
      done = left();
    } catch (const std::exception& why) {  // a GPU that has failed, or a driver that is going
      Log("memory pool").info("keeps what came back: ", why.what());
    }
  }

  void close() {
    std::unique_ptr<Pool> done;
    const std::scoped_lock lock(mutex);
    if (!pool) return;
    pool->closed = true;
    done = left();
  }

  // The pool, if it is closed and all has come back. The caller locks.
  std::unique_ptr<Pool> left() {
    const bool gone = pool && pool->closed && pool->memory->taken_bytes() == 0;
    return gone ? std::move(pool) : nullptr;
  }
};

#define OFFCORE_DOORS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define OFFCORE_ONE(n) +1
// A framework may give parts back after the interpreter has ended, and in a child.
PerProcess<std::array<Door, OFFCORE_DOORS(OFFCORE_ONE)>> doors_here;
#undef OFFCORE_ONE
auto& doors() { return doors_here.get(); }

uint32_t open_door(std::unique_ptr<PoolMemory> memory) {
  for (uint32_t number = 0; number < doors().size(); ++number) {
    Door& door = doors()[number];
    const std::scoped_lock lock(door.mutex);
    const std::unique_ptr<Pool> done = door.left();  // a stream was still using its memory
    if (door.pool) continue;
    door.pool = std::make_unique<Pool>(Pool{.memory = std::move(memory)});
    return number;
  }
  fail(Code::unsupported, "more than ", doors().size(),
       " memory pools in a process: delete one, and the tensors in it");
}

uint32_t open_pool(Window& window, Rank rank) {
  if (rank >= window.ranks()) fail(Code::invalid, "rank ", rank, " is not in this window");
  return open_door(std::make_unique<WindowMemory>(window.shared_from_this(), rank));
}

uint32_t open_cache_pool(int device, uint64_t bytes) {
  return open_door(std::make_unique<CacheMemory>(device, bytes));
}

// A torch.cuda.MemPool that takes its memory from a door, and closes it when it goes.
nb::object mem_pool(uint32_t door) {
  const nb::module_ core = nb::module_::import_("offcore._core");
  try {
    const std::string number = std::to_string(door);
    const nb::module_ torch = nb::module_::import_("torch.cuda");
    // For good: torch holds only its address, and tensors, which outlive the pool, go by it.
    static auto* const allocators = new std::map<uint32_t, nb::object>;
    nb::object& allocator = (*allocators)[door];
    if (!allocator.is_valid()) {
      allocator = torch.attr("memory").attr("CUDAPluggableAllocator")(
          nb::str(core.attr("__file__")), "offcore_pool_take_" + number,
          "offcore_pool_give_" + number);
    }
    nb::object pool = torch.attr("MemPool")(allocator.attr("allocator")());
    nb::module_::import_("weakref").attr("finalize")(pool, core.attr("close_pool"), door);
    return pool;
  } catch (...) {
    doors().at(door).close();
    throw;
  }
}

nb::object cache_pool(std::optional<int> device, uint64_t nbytes) {
  if (!device) {
    device = nb::cast<int>(nb::module_::import_("torch.cuda").attr("current_device")());
  }
  return mem_pool(open_cache_pool(*device, nbytes));
}

constexpr const char* kCachePool =
    R"(A torch.cuda.MemPool for the tensors of a KV cache, with a tensor a layer.

    pool = kv.cache_pool()
    with torch.cuda.use_mem_pool(pool):
        caches = [torch.zeros(2, blocks, 16, heads, dim, device="cuda") for _ in range(layers)]
    layout = kv.Layout(caches, block_axis=1)  # one strided copy a block, or two

Tensors of 10 MiB and more that are allocated one after the other lie at equal steps in one reserved
range of addresses, so that a block takes as few copies as in one tensor. Smaller ones share
segments of 20 MiB, and fold within each.

device: the GPU; by default torch's current one. nbytes: the range, 0 for twice the GPU's memory.
Physical memory is taken for each segment of torch's, and goes with it. Raises `Error`: unavailable,
invalid; unsupported with more than 8 pools in a process. Tensors on another GPU do not come from
it: torch reports that it is out of memory.)";

}  // namespace

#define OFFCORE_DOOR(n)                                                                            \
  extern "C" __attribute__((visibility("default"))) void* offcore_pool_take_##n(                   \
      size_t bytes, int device, void*) {                                                           \
    return doors()[n].take(bytes, device);                                                         \
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
  module.def("open_cache_pool", &open_cache_pool, nb::arg("device"), nb::arg("nbytes"),
             "The same of a GPU's memory at equal steps.");
  module.def("mem_pool", &mem_pool, nb::arg("door"));
  module.def("cache_pool", &cache_pool, nb::arg("device") = nb::none(), nb::arg("nbytes") = 0,
             kCachePool);
  module.def(
      "close_pool", [](uint32_t door) { doors().at(door).close(); }, nb::arg("door"),
      "Nothing more is given; the memory goes when its last part has come back.");
  module.def(
      "pool_taken_bytes",
      [](uint32_t number) -> uint64_t {
        Door& door = doors().at(number);
        const std::scoped_lock lock(door.mutex);
        return door.pool ? door.pool->memory->taken_bytes() : 0;
      },
      nb::arg("door"));
  nb::class_<Arena>(module, "Arena", "First-fit parts of a range of addresses.")
      .def(nb::init<uint64_t, uint64_t>(), nb::arg("bytes"), nb::arg("align"))
      .def("take", &Arena::take, nb::arg("bytes"))
      .def("give", &Arena::give, nb::arg("offset"))
      .def_prop_ro("taken_bytes", &Arena::taken_bytes);
}

}  // namespace offcore
