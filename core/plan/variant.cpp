#include "core/plan/variant.h"

#include <array>
#include <charconv>

#include "core/base/env.h"
#include "core/base/error.h"

namespace offcore {
namespace {

constexpr std::array<std::string_view, 5> kKindNames = {"pcpy", "bcst", "swap", "b2b", "fan"};
constexpr std::string_view kPrelaunch = "prelaunch_";
constexpr uint16_t kEnginesMax = 256;

}  // namespace

bool one_engine(const Variant& variant) {
  const bool one = variant.kind == Variant::Shape::b2b || variant.kind == Variant::Shape::fan;
  return variant.engines == 1 || (variant.engines == 0 && one);
}

std::string to_string(const Variant& variant) {
  std::string text;
  if (variant.prelaunch) text += kPrelaunch;
  text += kKindNames[static_cast<size_t>(variant.kind)];
  if (variant.engines != 0) text += cat(":", variant.engines);
  return text;
}

Variant parse_variant(std::string_view text) {
  Variant variant;
  std::string_view rest = text;
  if (rest.starts_with(kPrelaunch)) {
    variant.prelaunch = true;
    rest.remove_prefix(kPrelaunch.size());
  }
  const std::string_view kind = rest.substr(0, rest.find(':'));
  size_t index = 0;
  while (index < kKindNames.size() && kKindNames[index] != kind) ++index;
  bool valid = index < kKindNames.size();
  if (valid && kind.size() < rest.size()) {
    const std::string_view digits = rest.substr(kind.size() + 1);
    const char* end = digits.data() + digits.size();
    const auto [stop, error] = std::from_chars(digits.data(), end, variant.engines);
    valid = error == std::errc() && stop == end && variant.engines >= 1 &&
            variant.engines <= kEnginesMax;
  }
  if (!valid) {
    std::string known;
    for (std::string_view name : kKindNames) known += cat(name, ", ");
    fail(Code::invalid, "unknown variant '", text, "': known are ", known,
         "each also as prelaunch_NAME, and NAME:E for at most E engines a rank (1..", kEnginesMax,
         ")");
  }
  variant.kind = static_cast<Variant::Shape>(index);
  return variant;
}

std::string default_variant() {
  std::string text = env("OFFCORE_VARIANT");
  if (text == "auto") return text;
  try {
    return to_string(parse_variant(text));
  } catch (const Error& error) {
    fail(error.code(), "OFFCORE_VARIANT: ", error.message());
  }
}

std::vector<Variant> all_variants() {
  std::vector<Variant> variants;
  for (bool prelaunch : {false, true}) {
    for (size_t kind = 0; kind < kKindNames.size(); ++kind) {
      variants.push_back({.kind = static_cast<Variant::Shape>(kind), .prelaunch = prelaunch});
    }
  }
  return variants;
}

}  // namespace offcore
