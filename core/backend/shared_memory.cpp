#include "core/backend/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "core/base/descriptor.h"
#include "core/base/error.h"

namespace offcore {
namespace {

// The first number after `name` in a file of "name number" lines; the largest when there is none.
uint64_t number_after(const char* path, const std::string& name) {
  std::ifstream file(path);
  for (std::string word; file >> word;) {
    uint64_t number = 0;
    if (word == name && file >> number) return number;
  }
  return std::numeric_limits<uint64_t>::max();
}

// What this process may still take, by the kernel's estimate and by its control group's limit.
uint64_t available_bytes() {
  const uint64_t free_kib = number_after("/proc/meminfo", "MemAvailable:");
  uint64_t available = free_kib > UINT64_MAX / 1024 ? UINT64_MAX : free_kib * 1024;
  uint64_t limit = 0;
  uint64_t used = 0;
  std::ifstream limit_file("/sys/fs/cgroup/memory.max");
  std::ifstream used_file("/sys/fs/cgroup/memory.current");
  if (limit_file >> limit && used_file >> used) {
    available = std::min(available, limit > used ? limit - used : 0);
  }
  return available;
}

// A mapping and the descriptor behind it.
struct Mapping {
  Descriptor fd;
  void* data = nullptr;
  uint64_t bytes = 0;
  ~Mapping() {
    if (data != nullptr) munmap(data, bytes);
  }
};

Share map(Rank rank, uint64_t bytes, Descriptor fd) {
  auto mapping = std::make_shared<Mapping>();
  mapping->fd = std::move(fd);
  if (bytes > 0) {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, mapping->fd.get(), 0);
    if (data == MAP_FAILED) fail_errno(Code::memory, cat("cannot map ", bytes, " bytes"));
    mapping->data = data;
    mapping->bytes = bytes;
  }
  return {.rank = rank,
          .bytes = bytes,
          .fd = mapping->fd.get(),
          .data = static_cast<std::byte*>(mapping->data),
          .owner = mapping};
}

[[noreturn]] void fail_memory(uint64_t bytes, uint64_t available) {
  fail(Code::memory, "cannot allocate ", bytes, " bytes of shared memory: ", available,
       " bytes are available; use smaller windows or fewer ranks");
}

}  // namespace

Share allocate_shared(Rank rank, uint64_t bytes) {
  // posix_fallocate takes pages that the kernel may only get by killing someone: ask first, and
  // leave a little for everybody else.
  constexpr uint64_t kSpareBytes = 64 << 20;
  const uint64_t available = available_bytes();
  if (bytes > std::numeric_limits<off_t>::max() ||
      (bytes > kSpareBytes && (available < kSpareBytes || bytes > available - kSpareBytes))) {
    fail_memory(bytes, available);
  }
  Descriptor fd(memfd_create("offcore", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) fail_errno(Code::driver, "cannot create shared memory (memfd_create)");
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    fail_errno(Code::memory, cat("cannot size shared memory to ", bytes, " bytes"));
  }
  int error = 0;
  do {
    error = bytes == 0 ? 0 : posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes));
  } while (error == EINTR);
  if (error != 0) fail_memory(bytes, available);
  // Nobody may shrink it under a peer's copy.
  fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  return map(rank, bytes, std::move(fd));
}

Share import_shared(Rank rank, uint64_t bytes, int fd) {
  Descriptor owned(fd);
  struct stat status{};
  if (fstat(owned.get(), &status) != 0) {
    fail_errno(Code::driver, cat("the descriptor of rank ", rank, "'s memory is not usable"));
  }
  if (static_cast<uint64_t>(status.st_size) < bytes) {
    fail(Code::mismatch, "rank ", rank, " shares ", status.st_size, " bytes where ", bytes,
         " are expected");
  }
  return map(rank, bytes, std::move(owned));
}

}  // namespace offcore
