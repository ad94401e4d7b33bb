#include "shim/library.h"

#include <dlfcn.h>
#include <unistd.h>

#include "core/base/env.h"
#include "core/base/error.h"

namespace offcore::shim {
namespace {

// The file that an address belongs to, and where it is loaded.
Dl_info object_of(const void* address) {
  Dl_info info{};
  dladdr(address, &info);
  return info;
}

const Dl_info& own_object() {
  static const Dl_info own = object_of(reinterpret_cast<const void*>(&own_object));
  return own;
}

std::string beside_own() {
  const std::string own = own_object().dli_fname;
  const size_t folder = own.find_last_of('/');
  const std::string base = folder == std::string::npos ? "." : own.substr(0, folder);
  return base + "/../nvidia/nccl/lib/libnccl.so.2";
}

}  // namespace

void tell(const std::string& text) {
  const std::string line = cat("offcore nccl-shim [", getpid(), "]: ", text, "\n");
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

Library& Library::of_process() {
  static auto* const library = new Library();  // never destroyed: threads may outlive statics
  return *library;
}

Library::Library() {
  try {
    open();
  } catch (const Error& error) {
    refusal_ = error.message();
  }
  if (!refusal_.empty()) tell(refusal_);
  if (!loaded()) return;
#define OFFCORE_NCCL_FIND(name, parameters) \
  name = reinterpret_cast<NcclResult(*) parameters>(dlsym(handle_, "nccl" #name));
  OFFCORE_NCCL_CALLED(OFFCORE_NCCL_FIND)
#undef OFFCORE_NCCL_FIND
  if (GetVersion != nullptr) GetVersion(&version_);
}

// Whether a handle leads to a NCCL that is not this one.
bool Library::take(void* handle) {
  void* const known = handle == nullptr ? nullptr : dlsym(handle, "ncclGetVersion");
  if (known == nullptr) return false;
  const Dl_info info = object_of(known);
  if (info.dli_fbase == own_object().dli_fbase) return false;
  handle_ = handle;
  path_ = info.dli_fname;
  return true;
}

void Library::open() {
  constexpr const char* kName = "libnccl.so.2";
  const std::string named = env("OFFCORE_NCCL_LIBRARY");
  if (!named.empty()) {
    void* const handle = dlopen(named.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) fail(Code::unavailable, "OFFCORE_NCCL_LIBRARY: ", dlerror());
    if (take(handle)) return;
    fail(Code::unavailable, "OFFCORE_NCCL_LIBRARY: ", named, " is no NCCL, or the shim itself");
  }
  if (take(RTLD_NEXT)) return;
  if (take(dlopen(kName, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD))) return;
  if (take(dlopen(kName, RTLD_NOW | RTLD_LOCAL))) return;
  if (take(dlopen(beside_own().c_str(), RTLD_NOW | RTLD_LOCAL))) return;
  fail(Code::unavailable, "found no ", kName, " to pass calls on to: set OFFCORE_NCCL_LIBRARY to ",
       "its path");
}

void* Library::find(const char* name) {
  void* const function = loaded() ? dlsym(handle_, name) : nullptr;
  if (function != nullptr) return function;
  const std::scoped_lock lock(mutex_);
  if (told_.insert(name).second) {
    tell(loaded() ? cat(path_, " has no ", name, ": it is older than NCCL's header here")
                  : cat(name, " fails: ", refusal_));
  }
  return nullptr;
}

}  // namespace offcore::shim
