// Enumerators by their names.
#pragma once
#include <algorithm>
#include <span>

#include "core/base/error.h"

namespace offcore {

// The enumerator whose place in `names` the text has. Throws invalid: unknown `what`, and the
// names.
template <typename Enum>
Enum parse_name(std::string_view what, std::string_view text,
                std::span<const std::string_view> names) {
  const auto found = std::find(names.begin(), names.end(), text);
  if (found != names.end()) return static_cast<Enum>(found - names.begin());
  std::string known;
  for (const std::string_view name : names) known += cat(known.empty() ? "" : ", ", name);
  fail(Code::invalid, "unknown ", what, " '", text, "': known are ", known);
}

}  // namespace offcore
