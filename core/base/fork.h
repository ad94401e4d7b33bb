// What a fork leaves behind. A child has a copy of its parent's memory, but none of its threads;
// and locks that others held stay locked for ever. So:
//
// - What has threads, locks or connections derives from OfProcess. The bindings refuse it in a
//   child (python/bindings/process.h), before anything looks at it.
// - It is owned by owned_by_process(), owned_that_waits() or OwnedHere, which destroy nothing in a
//   child.
// - Every Descriptor is closed in a child, so that peers see its process die whatever children it
//   has.
// - What a process has one of lies in PerProcess, of which a child begins another.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace offcore {

// Forks between the first process that loaded the library and this one.
inline std::atomic<uint32_t> fork_count{0};
inline uint32_t forks() { return fork_count.load(std::memory_order_relaxed); }

// A descriptor is closed in every child that comes from here on, or no longer.
void close_in_children(int fd);
void keep_in_children(int fd);

class OfProcess {
 public:
  // `name`, for messages: "the communicator".
  explicit OfProcess(const char* name) : name_(name) {}

  // Whether this is the process that made it.
  bool here() const { return born_ == forks(); }
  // Throws invalid in a child of that.
  void check_here() const {
    if (!here()) fail_elsewhere();
  }

 private:
  [[noreturn]] void fail_elsewhere() const;

  const char* name_;
  uint32_t born_ = forks();
};

// Deletes nothing in a child.
struct DeleteHere {
  uint32_t born = forks();

  template <typename Type>
  void operator()(Type* object) const {
    if (born == forks()) delete object;
  }
};

template <typename Type>
using OwnedHere = std::unique_ptr<Type, DeleteHere>;

template <typename Type>
OwnedHere<Type> owned_here(std::unique_ptr<Type> object) {
  return OwnedHere<Type>(object.release());
}

template <typename Type>
std::shared_ptr<Type> owned_by_process(std::unique_ptr<Type> object) {
  return owned_here(std::move(object));
}

// How what waits as it ends is destroyed: destroy(object), with nothing held that others need
// meanwhile. The bindings say how; else it is simply called.
inline std::atomic<void (*)(void (*destroy)(void*), void* object)> waiting_end{nullptr};

struct DeleteWaiting : DeleteHere {
  template <typename Type>
  void operator()(Type* object) const {
    if (born != forks()) return;
    const auto destroy = [](void* held) { delete static_cast<Type*>(held); };
    const auto end = waiting_end.load();
    end != nullptr ? end(destroy, object) : destroy(object);
  }
};

// As owned_by_process(), for objects whose destructors wait: for engines, or for threads that do.
// No lock is held where the last reference to one goes.
template <typename Type>
std::shared_ptr<Type> owned_that_waits(std::unique_ptr<Type> object) {
  return {object.release(), DeleteWaiting()};
}

// Made when first asked for, and never destroyed: threads may use it while the process ends.
template <typename Type>
class PerProcess {
 public:
  Type& get() {
    const uint32_t now = forks();
    Instance* held = held_.load(std::memory_order_acquire);
    if (held != nullptr && held->born == now) return held->value;
    auto made = std::make_unique<Instance>();
    if (held_.compare_exchange_strong(held, made.get(), std::memory_order_acq_rel)) {
      return made.release()->value;
    }
    return held->value;  // another thread's
  }

 private:
  struct Instance {
    uint32_t born = forks();
    Type value;
  };
  std::atomic<Instance*> held_{nullptr};
};

}  // namespace offcore
