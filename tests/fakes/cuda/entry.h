// The border of the library: every entry point runs inside enter(), which counts the call, injects
// the faults asked for and turns failures into the driver's codes.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "tests/fakes/cuda/abi.h"
#include "tests/fakes/cuda/seen.h"

namespace fakecuda {

struct Failure {
  Result code;
};

inline void require(bool holds, Result code) {
  if (!holds) throw Failure{code};
}

enum class When { kAlways, kStart, kInitialized };

// Counts a call of the entry point. Throws what keeps it from running: a planted fault, no cuInit,
// a driver too old for it, a process forked from one that had called cuInit.
void begin_call(const char* name, When when);
// Counts and fails like a call: for what happens inside engines.
Result planted_fault(const char* name);
uint64_t calls_of(const std::string& name);
void set_initialized();

template <typename Body>
Result enter(const char* name, Body&& body, When when = When::kInitialized) noexcept {
  const Hidden hidden;
  try {
    begin_call(name, when);
    body();
    return kSuccess;
  } catch (const Failure& failure) {
    return failure.code;
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  } catch (...) {
    return kUnknown;
  }
}

// What lives behind opaque handles of one kind. A handle is never given out twice.
template <typename Object, typename Handle>
class Registry {
 public:
  Registry(uint64_t kind, Result stale) : next_(kind << 40), stale_(stale) {}

  Handle add(std::shared_ptr<Object> object) {
    const std::lock_guard lock(mutex_);
    next_ += 16;
    objects_.emplace(next_, std::move(object));
    return (Handle)next_;
  }
  std::shared_ptr<Object> find(Handle handle) const {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find((uint64_t)handle);
    require(found != objects_.end(), stale_);
    return found->second;
  }
  std::vector<std::shared_ptr<Object>> all() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Object>> found;
    for (const auto& [number, object] : objects_) found.push_back(object);
    return found;
  }
  std::shared_ptr<Object> remove(Handle handle) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find((uint64_t)handle);
    require(found != objects_.end(), stale_);
    auto object = std::move(found->second);
    objects_.erase(found);
    return object;
  }
  // It was given out, and is no more.
  bool gone(Handle handle) const {
    const std::lock_guard lock(mutex_);
    const auto number = (uint64_t)handle;
    return number >> 40 == next_ >> 40 && number <= next_ && !objects_.contains(number);
  }
  template <typename Doomed>
  void remove_if(Doomed&& doomed) {
    const std::lock_guard lock(mutex_);
    std::erase_if(objects_, [&](const auto& entry) { return doomed(*entry.second); });
  }
  uint64_t size() const {
    const std::lock_guard lock(mutex_);
    return objects_.size();
  }

 private:
  mutable std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Object>> objects_;
  uint64_t next_;
  Result stale_;
};

}  // namespace fakecuda
