#include "core/backend/sdma/hip.h"

#include "core/backend/driver_library.h"
#include "core/base/env.h"
#include "core/base/error.h"

namespace offcore::hip {

namespace {

DriverLibrary<HipRuntime> library_once;

}  // namespace

HipRuntime::HipRuntime(const std::string& path) : OfProcess("the HIP runtime") {
  void* library = nullptr;
  std::string why;
  for (const char* version : {"", ".7", ".6", ".5"}) {  // the bare name comes with headers only
    library = dlopen((path + version).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) break;
    if (why.empty()) why = dlerror();
  }
  if (library == nullptr) {
    fail(Code::unavailable, "AMD's HIP runtime cannot be opened (", why, ")");
  }
  std::string missing;
#define OFFCORE_HIP_FIND(name, returns, parameters)     \
  name = symbol<returns(*) parameters>(library, #name); \
  if (name == nullptr) missing += cat(missing.empty() ? "" : ", ", #name);
  OFFCORE_HIP_TABLE(OFFCORE_HIP_FIND)
#undef OFFCORE_HIP_FIND
  if (!missing.empty()) fail(Code::unavailable, path, " lacks ", missing);
  if (hipInit(0) != kSuccess || hipGetDeviceCount(&devices_) != kSuccess || devices_ == 0) {
    fail(Code::unavailable, "AMD's HIP runtime finds no GPU");
  }
}

const HipRuntime& HipRuntime::open() { return library_once.open(env("OFFCORE_LIBHIP")); }
const HipRuntime& HipRuntime::get() { return library_once.get("the HIP runtime"); }

bool can_open(std::string& why_not) {
  try {
    HipRuntime::open();
    return true;
  } catch (const offcore::Error& error) {
    why_not = error.message();
    return false;
  }
}

void check(HipError error, std::string_view what) {
  if (error == kSuccess) return;
  const char* text = HipRuntime::get().hipGetErrorString(error);
  fail(error == kOutOfMemory ? Code::memory : Code::driver, what, ": ",
       text != nullptr ? text : "unknown error", " (", error, ")");
}

}  // namespace offcore::hip
