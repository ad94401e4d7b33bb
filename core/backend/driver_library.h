// A driver's library, opened at run time and once in a process.
#pragma once
#include <dlfcn.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/error.h"
#include "core/base/fork.h"

namespace offcore {

template <typename Function>
Function symbol(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

// `Driver` is OfProcess, and opens the library as it is made from its path.
template <typename Driver>
class DriverLibrary {
 public:
  // Throws what the making throws (once more for a path that has failed), unavailable where another
  // path is open, and invalid in a child of a process that had opened it.
  const Driver& open(const std::string& path) {
    if (current_ != nullptr) current_->check_here();
    Opened& opened = opened_.get();
    const std::scoped_lock lock(opened.mutex);
    if (opened.path == path) {
      if (opened.error) throw *opened.error;
      return *opened.driver;
    }
    if (opened.driver != nullptr) {
      fail(Code::unavailable, "this process already uses ", opened.path,
           ": start another one to use ", path);
    }
    opened.path = path;
    opened.error.reset();
    try {
      opened.driver = std::make_unique<Driver>(path);
    } catch (const Error& error) {
      opened.error = error;
      throw;
    }
    current_ = opened.driver.get();
    return *current_;
  }

  // Once it is open.
  const Driver& get(std::string_view what) const {
    if (current_ == nullptr) fail(Code::driver, what, " has not been opened");
    current_->check_here();
    return *current_;
  }

 private:
  struct Opened {
    std::mutex mutex;
    std::string path;
    std::unique_ptr<Driver> driver;
    std::optional<Error> error;
  };
  PerProcess<Opened> opened_;
  const Driver* current_ = nullptr;  // a child of who has opened it sees that too
};

}  // namespace offcore
