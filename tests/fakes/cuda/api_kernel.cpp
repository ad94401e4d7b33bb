// Entry points for modules and kernels. A module is PTX text; only kernels that the stand-in knows
// can be played (kernels.h).
#include <algorithm>
#include <cstring>

#include "tests/fakes/cuda/kernels.h"

namespace fakecuda {
namespace {

using ModuleHandle = struct ModuleTag*;
using FunctionHandle = struct FunctionTag*;

struct Module {
  std::string text;
};

struct Function {
  std::string name;
};

Registry<Module, ModuleHandle>& modules() {
  static auto* const value = new Registry<Module, ModuleHandle>(7, kInvalidHandle);
  return *value;
}

Registry<Function, FunctionHandle>& functions() {
  static auto* const value = new Registry<Function, FunctionHandle>(8, kInvalidHandle);
  return *value;
}

}  // namespace

FAKE_API Result cuModuleLoadData(ModuleHandle* module, const void* image) {
  return enter("cuModuleLoadData", [&] {
    current_context();
    require(module != nullptr && image != nullptr, kInvalidValue);
    std::string text(static_cast<const char*>(image));
    require(text.find(".version") != text.npos && text.find(".target") != text.npos, kInvalidPtx);
    *module = modules().add(std::make_shared<Module>(Module{std::move(text)}));
  });
}

FAKE_API Result cuModuleUnload(ModuleHandle module) {
  return enter("cuModuleUnload", [&] {
    current_context();
    modules().remove(module);
  });
}

FAKE_API Result cuModuleGetFunction(FunctionHandle* function, ModuleHandle module,
                                    const char* name) {
  return enter("cuModuleGetFunction", [&] {
    current_context();
    require(function != nullptr && name != nullptr, kInvalidValue);
    const auto found = modules().find(module);
    const std::string entry = std::string(".entry ") + name + "(";
    require(found->text.find(entry) != std::string::npos, kNotFound);
    *function = functions().add(std::make_shared<Function>(Function{name}));
  });
}

FAKE_API Result cuFuncGetParamInfo(FunctionHandle function, size_t index, size_t* offset,
                                   size_t* size) {
  return enter("cuFuncGetParamInfo", [&] {
    const auto sizes = kernel_arguments(functions().find(function)->name);
    require(index < sizes.size() && offset != nullptr, kInvalidValue);
    *offset = 0;
    for (size_t i = 0; i <= index; ++i) {
      const size_t aligned = std::min(sizes[i], 8u);
      *offset = (*offset + aligned - 1) / aligned * aligned + (i < index ? sizes[i] : 0);
    }
    if (size != nullptr) *size = sizes[index];
  });
}

FAKE_API Result cuLaunchKernel(FunctionHandle function, unsigned grid_x, unsigned grid_y,
                               unsigned grid_z, unsigned block_x, unsigned block_y,
                               unsigned block_z, unsigned shared_bytes, StreamHandle stream,
                               void** arguments, void** extra) {
  return enter("cuLaunchKernel", [&] {
    const auto kernel = functions().find(function);
    const auto sizes = kernel_arguments(kernel->name);
    require(!sizes.empty(), kNotSupported);
    require(grid_x > 0 && grid_y == 1 && grid_z == 1, kInvalidValue);
    require(block_x > 0 && block_x <= 1024 && block_y == 1 && block_z == 1, kInvalidValue);
    require(shared_bytes == 0 && arguments != nullptr && extra == nullptr, kInvalidValue);
    Launch launch{grid_x, block_x, {}};
    for (size_t i = 0; i < sizes.size(); ++i) {  // as the driver: read before the call returns
      std::vector<uint64_t> words((sizes[i] + 7) / 8);
      std::memcpy(words.data(), arguments[i], sizes[i]);
      launch.arguments.insert(launch.arguments.end(), words.begin(), words.end());
    }
    stream_of(stream)->push(kernel_work(kernel->name, std::move(launch)));
  });
}

}  // namespace fakecuda
