#include "core/window/proof.h"

#include <sys/random.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/base/hmac.h"

namespace offcore {

std::string random_bytes(size_t count) {
  std::string bytes(count, '\0');
  if (getrandom(bytes.data(), count, 0) != static_cast<ssize_t>(count)) {
    fail_errno(Code::driver, "cannot get random bytes");
  }
  return bytes;
}

std::string stranger_at(int unix_fd, std::string_view secret) {
  if (!secret.empty()) return {};
  const uid_t theirs = peer_uid(unix_fd);
  if (theirs == geteuid()) return {};
  return cat("a process of user ", theirs, ", not of this rank's user ", geteuid(),
             ": run all ranks as one user, or give them one OFFCORE_JOB_SECRET");
}

std::string Seal::closed(FrameKind kind, std::string_view payload) const {
  return std::string(payload) + code(kind, payload);
}

std::optional<std::string_view> Seal::opened(const Frame& frame) const {
  const std::string_view all = frame.payload;
  if (all.size() < kHmacBytes) return std::nullopt;
  const std::string_view payload = all.substr(0, all.size() - kHmacBytes);
  if (!equal_codes(all.substr(payload.size()), code(frame.kind, payload))) return std::nullopt;
  return payload;
}

std::string Seal::code(FrameKind kind, std::string_view payload) const {
  return hmac_sha256(
      secret_, Packer().number(static_cast<uint16_t>(kind)).text(nonces_).text(payload).bytes());
}

}  // namespace offcore
