// Errors: one exception type with a code and a message that says what to do.
#pragma once
#include <cstdint>
#include <exception>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

namespace offcore {

enum class Code : uint8_t {
  invalid,      // an argument is wrong
  unsupported,  // correct, but this operation, machine or backend cannot do it
  unavailable,  // a backend or a library is missing
  driver,       // a driver or the operating system refused
  memory,       // out of memory
  timeout,      // a wait ran past its limit
  cancelled,    // aborted by this rank
  verify,       // a program breaks a rule
  mismatch,     // ranks disagree
  peer,         // another rank died or aborted
};

std::string_view to_string(Code code);

class Error : public std::exception {
 public:
  Error(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  Code code() const { return code_; }
  const std::string& message() const { return message_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  Code code_;
  std::string message_;
};

// What did not happen: whatever it was for is as it was before, and it may be tried again.
class Refused final : public Error {
 public:
  explicit Refused(const Error& error) : Error(error) {}
};

// Joins its arguments into a string. (std::format needs a newer compiler than g++ 12.)
template <typename... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return std::move(stream).str();
}

template <typename... Parts>
[[noreturn]] void fail(Code code, const Parts&... parts) {
  throw Error(code, cat(parts...));
}

// An operating-system call failed: adds errno's text.
[[noreturn]] void fail_errno(Code code, std::string_view what);

}  // namespace offcore
