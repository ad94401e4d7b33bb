// Python's bytes, which C++ has as strings.
#pragma once
#include <string>
#include <vector>

#include "module.h"
#include "released.h"

namespace offcore {

inline std::string string_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

inline std::vector<std::string> strings_of(const std::vector<nb::bytes>& all) {
  std::vector<std::string> strings;
  for (const nb::bytes& one : all) strings.push_back(string_of(one));
  return strings;
}

// What `call` gives, which is made without the interpreter's lock.
template <typename Call>
std::vector<nb::bytes> gathered(const Call& call) {
  std::vector<std::string> strings;
  {
    LockReleased released;
    strings = call(released);
  }
  std::vector<nb::bytes> all;
  for (const std::string& one : strings) all.emplace_back(one.data(), one.size());
  return all;
}

}  // namespace offcore
