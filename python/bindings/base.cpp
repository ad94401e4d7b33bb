// Errors, environment, clocks and the order of memory.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>

#include "core/base/clock.h"
#include "core/base/env.h"
#include "core/base/error.h"
#include "core/base/fork.h"
#include "core/base/host_memory.h"
#include "core/base/place.h"
#include "module.h"
#include "released.h"

namespace offcore {
namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "gcc " __VERSION__;
#endif

// offcore.Error: a RuntimeError with `code` (a string) beside its message.
PyObject* error_type = nullptr;

void raise(const Error& error) {
  nb::object instance = nb::handle(error_type)(error.message());
  instance.attr("code") = std::string(to_string(error.code()));
  PyErr_SetObject(error_type, instance.ptr());
}

}  // namespace

void bind_base(nb::module_& module) {
  error_type = PyErr_NewExceptionWithDoc(
      "offcore.Error",
      "What offcore raises. `code` is one of invalid, unsupported, unavailable, driver, memory,\n"
      "timeout, cancelled, verify, mismatch, peer.",
      PyExc_RuntimeError, nullptr);
  module.attr("Error") = nb::borrow(error_type);
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      if (PyErr_Occurred() == nullptr) raise(error);  // else it ended a wait (released.h)
    }
  });

  waiting_end = end_unlocked;
  module.def("env", &env, nb::arg("name"), "The environment variable's value, or its default.");
  module.def(
      "env_variables",
      [] {
        std::vector<std::tuple<std::string, std::string, std::string>> rows;
        for (const EnvVariable& row : env_variables()) {
          rows.emplace_back(row.name, row.fallback, row.meaning);
        }
        return rows;
      },
      "Every variable that is read, as (name, default, meaning).");
  module.def(
      "build",
      [] {
        return std::make_tuple(std::string(kCompiler), std::string(OFFCORE_VERSION),
                               std::string(OFFCORE_BUILD_COMMIT));
      },
      "The compiler of this build, its version, and the commit it came from (empty: not a "
      "checkout).");
  module.def(
      "host_memory",
      [](const std::string& root) {
        const HostMemory memory = host_memory(root);
        return std::make_pair(memory.total_bytes, memory.available_bytes);
      },
      nb::arg("root") = "",
      "(bytes that this process may use, available): core/base/host_memory.h.");
  module.def("place_here", &place_here,
             "Of the host and network namespace that this thread is in: equal at others there.");
  module.def("now_ns", &now_ns, "The monotonic clock that real-time backends use.");
  module.def(
      "fence", [] { std::atomic_thread_fence(std::memory_order_seq_cst); },
      "What this thread wrote is seen by all before it reads what follows.");
}

}  // namespace offcore
