// How processes prove that they are ranks of one job.
//
// With OFFCORE_JOB_SECRET, the same at all ranks, they prove that they know it, wherever they are
// and whoever runs them. Without one they are processes of one user on one host, which the kernel
// tells at the two ends of a Unix socket.
#pragma once
#include <optional>
#include <string>
#include <string_view>

#include "core/window/socket.h"

namespace offcore {

std::string random_bytes(size_t count);

// Why whoever is at the other end of a Unix socket is none of this job's; empty: it may be.
std::string stranger_at(int unix_fd, std::string_view secret);

// Ends the frames of one conversation with a code that nobody makes who does not know the secret,
// nor takes from another conversation: the two nonces, one of each side, are its own.
class Seal {
 public:
  static constexpr size_t kNonceBytes = 32;

  Seal(std::string secret, std::string_view nonces) : secret_(std::move(secret)), nonces_(nonces) {}
  std::string closed(FrameKind kind, std::string_view payload) const;
  // A frame's payload without its code; empty where that is wrong.
  std::optional<std::string_view> opened(const Frame& frame) const;

 private:
  std::string code(FrameKind kind, std::string_view payload) const;

  std::string secret_;
  std::string nonces_;
};

}  // namespace offcore
