#include "core/backend/cuda/driver.h"

#include "core/backend/driver_library.h"
#include "core/base/env.h"

namespace offcore::cuda {
namespace {

constexpr int kVersionMin = 12000;

std::string shown_version(int version) { return cat(version / 1000, ".", version % 1000 / 10); }

DriverLibrary<Driver> library_once;

}  // namespace

Driver::Driver(const std::string& path) : OfProcess("the NVIDIA driver") {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    fail(Code::unavailable, "NVIDIA's driver library cannot be opened (", dlerror(),
         "); install the driver, or point OFFCORE_LIBCUDA at its libcuda.so.1");
  }
  const auto get_version = symbol<CUresult (*)(int*)>(library, "cuDriverGetVersion");
  if (get_version == nullptr || get_version(&version_) != kSuccess) {
    fail(Code::unavailable, path, " is not an NVIDIA driver library: it has no cuDriverGetVersion");
  }
  if (version_ < kVersionMin) {
    fail(Code::unavailable, "the NVIDIA driver is for CUDA ", shown_version(version_), "; ",
         shown_version(kVersionMin), " or newer is needed");
  }
  resolve(library);
  const CUresult result = cuInit(0);
  if (result != kSuccess) {
    const char* name = "?";
    cuGetErrorName(result, &name);
    fail(Code::unavailable, "the NVIDIA driver does not start: cuInit says ", name,
         " (no GPU, or none is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES)");
  }
  if (cuDeviceGetCount(&devices_) != kSuccess || devices_ == 0) {
    fail(Code::unavailable, "no NVIDIA GPU is visible (see CUDA_VISIBLE_DEVICES)");
  }
}

void Driver::resolve(void* library) {
  using GetProcAddress = CUresult (*)(const char*, void**, int, uint64_t, int*);
  const auto look_up = symbol<GetProcAddress>(library, "cuGetProcAddress_v2");
  if (look_up == nullptr) {
    fail(Code::unavailable, "the NVIDIA driver has no cuGetProcAddress_v2: update it to CUDA ",
         shown_version(kVersionMin), " or newer");
  }
  const auto find = [&](const char* name, int version) {
    void* function = nullptr;
    int found = 0;
    const CUresult result = look_up(name, &function, version, 0, &found);
    return result == kSuccess && found == 0 ? function : nullptr;
  };
  std::string missing;
#define OFFCORE_CUDA_FIND(name, version, parameters)                     \
  name = reinterpret_cast<CUresult(*) parameters>(find(#name, version)); \
  if (name == nullptr)                                                   \
    missing += cat(missing.empty() ? "" : ", ", #name, " of ", shown_version(version));
  OFFCORE_CUDA_TABLE(OFFCORE_CUDA_FIND)
#undef OFFCORE_CUDA_FIND
  if (!missing.empty()) {
    fail(Code::unavailable, "the NVIDIA driver (CUDA ", shown_version(version_), ") lacks ",
         missing, ": update it");
  }
#define OFFCORE_CUDA_FIND(name, version, parameters) \
  name = reinterpret_cast<CUresult(*) parameters>(find(#name, version));
  OFFCORE_CUDA_OPTIONAL_TABLE(OFFCORE_CUDA_FIND)
#undef OFFCORE_CUDA_FIND
}

const Driver& Driver::open() { return library_once.open(env("OFFCORE_LIBCUDA")); }
const Driver& Driver::get() { return library_once.get("NVIDIA's driver"); }

void fail_result(CUresult result, std::string_view what) {
  const Driver& driver = Driver::get();
  const char* name = nullptr;
  const char* words = nullptr;
  driver.cuGetErrorName(result, &name);
  driver.cuGetErrorString(result, &words);
  fail(result == kOutOfMemory ? Code::memory : Code::driver, what, ": ",
       name != nullptr ? name : "unknown error", " (", result, ")",
       words != nullptr ? cat(", ", words) : "");
}

std::string device_name(int ordinal) {
  const Driver& driver = Driver::get();
  CUdevice device = 0;
  char name[256] = "";
  check(driver.cuDeviceGet(&device, ordinal), "cuDeviceGet");
  check(driver.cuDeviceGetName(name, sizeof name, device), "cuDeviceGetName");
  return name;
}

int attribute(int ordinal, Attribute which) {
  const Driver& driver = Driver::get();
  CUdevice device = 0;
  int value = 0;
  check(driver.cuDeviceGet(&device, ordinal), "cuDeviceGet");
  check(driver.cuDeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

}  // namespace offcore::cuda
