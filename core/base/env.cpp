#include "core/base/env.h"

#include <cstdlib>

#include "core/base/error.h"

namespace offcore {
namespace {

constexpr EnvVariable kVariables[] = {
#define OFFCORE_ENV_ROW(name, fallback, meaning) {#name, fallback, meaning},
    OFFCORE_ENV_TABLE(OFFCORE_ENV_ROW)
#undef OFFCORE_ENV_ROW
};

}  // namespace

std::span<const EnvVariable> env_variables() { return kVariables; }

std::string env(const std::string& name) {
  for (const EnvVariable& variable : kVariables) {
    if (name != variable.name) continue;
    const char* value = std::getenv(variable.name);
    return value != nullptr && *value != '\0' ? value : variable.fallback;
  }
  fail(Code::invalid, "environment variable ", name, " is not in core/base/env.h");
}

}  // namespace offcore
