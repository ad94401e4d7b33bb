// User objects: counts of references, which callers and graphs own, and a destructor that runs when
// none is left: later, on a thread of the driver's, where no entry point may be called.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "tests/fakes/cuda/abi.h"
#include "tests/fakes/cuda/entry.h"

namespace fakecuda {

class UserObject {
 public:
  UserObject(void* value, HostFunction destroy, uint64_t count);
  UserObject(const UserObject&) = delete;
  UserObject& operator=(const UserObject&) = delete;

  void retain(uint64_t count) { count_ += count; }
  // Throws invalid value where there are not so many.
  void release(uint64_t count);

 private:
  void* const value_;
  const HostFunction destroy_;
  std::atomic<uint64_t> count_;
};

// One that a graph owns; a copy is one more.
class Reference {
 public:
  explicit Reference(std::shared_ptr<UserObject> object) : object_(std::move(object)) {}
  Reference(const Reference& other) : object_(other.object_) { object_->retain(1); }
  Reference(Reference&&) = default;
  ~Reference() {
    if (object_) object_->release(1);
  }

 private:
  std::shared_ptr<UserObject> object_;
};

Registry<UserObject, UserObjectHandle>& user_objects();
uint64_t live_user_objects();  // whose destructors have yet to return
bool in_destructor();          // whether this thread runs one

}  // namespace fakecuda
