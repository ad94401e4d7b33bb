#include "core/base/env.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "core/base/error.h"

namespace offcore {
namespace {

constexpr EnvVariable kVariables[] = {
#define OFFCORE_ENV_ROW(name, fallback, form, meaning) {#name, fallback, form, meaning},
    OFFCORE_ENV_TABLE(OFFCORE_ENV_ROW)
#undef OFFCORE_ENV_ROW
};
constexpr double kSecondsMax = 1e9;

template <typename Number>
bool is_number(std::string_view text, Number least, Number most) {
  Number value{};
  const char* end = text.data() + text.size();
  const auto [stop, bad] = std::from_chars(text.data(), end, value);
  return bad == std::errc() && stop == end && value >= least && value <= most;
}

bool is_one_of(std::string_view text, std::string_view choices) {
  while (!choices.empty()) {
    const size_t length = std::min(choices.find(", "), choices.size());
    if (text == choices.substr(0, length)) return true;
    choices.remove_prefix(std::min(length + 2, choices.size()));
  }
  return false;
}

// What the value must be; empty where it is so.
std::string refusal(std::string_view form, std::string_view value) {
  if (form.empty()) return "";
  if (form == "count") {
    return is_number<uint32_t>(value, 0, UINT32_MAX) ? "" : "a whole number from 0";
  }
  if (form == "seconds") {
    const bool good = is_number<double>(value, 0, kSecondsMax) && !is_number<double>(value, 0, 0);
    return good ? "" : cat("a number of seconds above 0, at most ", kSecondsMax);
  }
  if (form == "host:port") {
    const size_t colon = value.rfind(':');
    const bool good = colon != std::string_view::npos &&
                      is_number<uint32_t>(value.substr(colon + 1), 1, UINT16_MAX);
    return good ? "" : "host:port or [v6]:port";
  }
  return is_one_of(value, form) ? "" : cat("one of ", form);
}

}  // namespace

std::span<const EnvVariable> env_variables() { return kVariables; }

std::string env(const std::string& name) {
  for (const EnvVariable& variable : kVariables) {
    if (name != variable.name) continue;
    const char* value = std::getenv(variable.name);
    if (value == nullptr || *value == '\0') return variable.fallback;
    const std::string wanted = refusal(variable.form, value);
    if (!wanted.empty()) fail(Code::invalid, name, " is '", value, "': it must be ", wanted);
    return value;
  }
  fail(Code::invalid, "environment variable ", name, " is not in core/base/env.h");
}

}  // namespace offcore
