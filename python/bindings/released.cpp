#include "released.h"

#include <mutex>
#include <vector>

namespace offcore {
namespace {

// An engine thread may be the last to hold an object, and must not wait for the interpreter's lock:
// whoever holds that lock may be joining the thread. It leaves the object here; the interpreter
// drops it soon after.
std::mutex mutex;
std::vector<PyObject*> objects;

void release(PyObject* object) {
  {
    const std::scoped_lock lock(mutex);
    objects.push_back(object);
  }
  // Fails when its queue is full: then a later one, or the next operation, drops all of them.
  if (Py_IsInitialized()) Py_AddPendingCall([](void*) { return drop_released(), 0; }, nullptr);
}

}  // namespace

void drop_released() {
  std::vector<PyObject*> released;
  {
    const std::scoped_lock lock(mutex);
    released.swap(objects);
  }
  for (PyObject* object : released) Py_DECREF(object);
}

std::shared_ptr<void> keep_alive(nb::object object) {
  if (object.is_none()) return nullptr;
  return {object.release().ptr(), [](void* pointer) { release(static_cast<PyObject*>(pointer)); }};
}

}  // namespace offcore
