// Python objects in the hands of operations under way.
#pragma once
#include <memory>
#include <mutex>
#include <vector>

#include "core/base/fork.h"
#include "module.h"

namespace offcore {

// Python objects that operations have let go of. An engine thread may be the last to hold one, and
// must not wait for the interpreter's lock: whoever holds that lock may be joining the thread. It
// leaves the object here; the interpreter drops it soon after.
class Released {
 public:
  static void add(PyObject* object) {
    {
      Released& all = here_.get();
      const std::scoped_lock lock(all.mutex_);
      all.objects_.push_back(object);
    }
    // Fails when its queue is full: then a later one, or the next operation, drops all of them.
    if (Py_IsInitialized()) Py_AddPendingCall([](void*) { return drop(), 0; }, nullptr);
  }

  static void drop() {
    std::vector<PyObject*> objects;
    {
      Released& all = here_.get();
      const std::scoped_lock lock(all.mutex_);
      objects.swap(all.objects_);
    }
    for (PyObject* object : objects) Py_DECREF(object);
  }

 private:
  std::mutex mutex_;
  std::vector<PyObject*> objects_;
  static PerProcess<Released> here_;
};

inline PerProcess<Released> Released::here_;

// Holds a Python object from C++ memory that any thread may release.
inline std::shared_ptr<void> keep_alive(nb::object object) {
  if (object.is_none()) return nullptr;
  return {object.release().ptr(),
          [](void* pointer) { Released::add(static_cast<PyObject*>(pointer)); }};
}

}  // namespace offcore
