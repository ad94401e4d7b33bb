#include "core/plan/variant.h"

#include <array>
#include <charconv>

#include "core/base/env.h"
#include "core/base/error.h"

namespace offcore {
namespace {

constexpr std::array<std::string_view, 6> kKindNames = {"pcpy", "bcst", "swap",
                                                        "b2b",  "fan",  "pipelined"};
constexpr std::string_view kPrelaunch = "prelaunch_";
constexpr uint16_t kEnginesMax = 256;
constexpr uint64_t kChunkBytesMax = uint64_t{1} << 40;

// "256", "64K", "1M": whole powers have their letter.
std::string bytes_text(uint64_t bytes) {
  if (bytes % (1 << 20) == 0) return cat(bytes >> 20, "M");
  return bytes % (1 << 10) == 0 ? cat(bytes >> 10, "K") : cat(bytes);
}

bool parse_bytes(std::string_view text, uint64_t& bytes) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, bytes);
  if (error != std::errc()) return false;
  const std::string_view unit(stop, static_cast<size_t>(end - stop));
  if (unit == "K" || unit == "M") {
    const int shift = unit == "K" ? 10 : 20;
    if (bytes > kChunkBytesMax >> shift) return false;
    bytes <<= shift;
  } else if (!unit.empty()) {
    return false;
  }
  return bytes > 0 && bytes <= kChunkBytesMax && bytes % 256 == 0;
}

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
  if (variant.chunk_bytes != 0) text += cat(":", bytes_text(variant.chunk_bytes));
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
  const bool pipelined = index == static_cast<size_t>(Variant::Shape::pipelined);
  valid = valid && !(pipelined && variant.prelaunch);
  if (valid && kind.size() < rest.size()) {
    const std::string_view number = rest.substr(kind.size() + 1);
    const char* end = number.data() + number.size();
    if (pipelined) {
      valid = parse_bytes(number, variant.chunk_bytes);
    } else {
      const auto [stop, error] = std::from_chars(number.data(), end, variant.engines);
      valid = error == std::errc() && stop == end && variant.engines >= 1 &&
              variant.engines <= kEnginesMax;
    }
  }
  if (!valid) {
    std::string known;
    for (size_t i = 0; i + 1 < kKindNames.size(); ++i) known += cat(kKindNames[i], ", ");
    fail(Code::invalid, "unknown variant '", text, "': known are ", known,
         "each also as prelaunch_NAME, and NAME:E for at most E engines a rank (1..", kEnginesMax,
         "); and pipelined, also as pipelined:SIZE for chunks of SIZE bytes (a multiple of 256, as "
         "512K or 1M)");
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
      if (prelaunch && kind == static_cast<size_t>(Variant::Shape::pipelined)) continue;
      variants.push_back({.kind = static_cast<Variant::Shape>(kind), .prelaunch = prelaunch});
    }
  }
  return variants;
}

}  // namespace offcore
