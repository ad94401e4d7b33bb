// A file descriptor that closes itself, and in every child of the process (fork.h).
#pragma once
#include <unistd.h>

#include <utility>

#include "core/base/fork.h"

namespace offcore {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {
    if (fd >= 0) close_in_children(fd);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)), born_(other.born_) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(born_, other.born_);
    return *this;
  }
  ~Descriptor() {
    // In a child it is closed already, and its number perhaps another's.
    if (const int fd = release(); fd >= 0 && born_ == forks()) ::close(fd);
  }
  int get() const { return fd_; }
  // The caller's from here on, in children too.
  int release() {
    if (fd_ >= 0 && born_ == forks()) keep_in_children(fd_);
    return std::exchange(fd_, -1);
  }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
  uint32_t born_ = forks();
};

}  // namespace offcore
