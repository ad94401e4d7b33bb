#include "core/base/error.h"

#include <cerrno>
#include <cstring>

namespace offcore {

std::string_view to_string(Code code) {
  switch (code) {
    case Code::invalid:
      return "invalid";
    case Code::unsupported:
      return "unsupported";
    case Code::unavailable:
      return "unavailable";
    case Code::driver:
      return "driver";
    case Code::memory:
      return "memory";
    case Code::timeout:
      return "timeout";
    case Code::cancelled:
      return "cancelled";
    case Code::verify:
      return "verify";
    case Code::mismatch:
      return "mismatch";
    case Code::peer:
      return "peer";
  }
  return "unknown";
}

void fail_errno(Code code, std::string_view what) {
  const int error = errno;
  fail(code, what, ": ", std::strerror(error));
}

}  // namespace offcore
