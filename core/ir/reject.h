// How a rule rejects a program.
#pragma once
#include <string_view>

#include "core/base/error.h"
#include "core/ir/order.h"

namespace offcore {

template <typename... Parts>
[[noreturn]] void reject(std::string_view rule, const Program& program, Place place,
                         const Parts&... reason) {
  fail(Code::verify, rule, ": ", describe(program, place), ": ", reason...);
}

template <typename... Parts>
[[noreturn]] void reject(std::string_view rule, const Parts&... reason) {
  fail(Code::verify, rule, ": program: ", reason...);
}

}  // namespace offcore
