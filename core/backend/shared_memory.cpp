#include "core/backend/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <string>

#include "core/base/descriptor.h"
#include "core/base/error.h"
#include "core/base/host_memory.h"

namespace offcore {
namespace {

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

[[noreturn]] void fail_memory(uint64_t bytes, const HostMemory& memory) {
  fail(Code::memory, "cannot allocate ", bytes, " bytes of shared memory: of the ",
       memory.total_bytes, " bytes that this process may use, ", memory.available_bytes,
       " are available; use smaller windows or fewer ranks");
}

// posix_fallocate takes pages that the kernel may only get by killing someone: ask first, and leave
// a little for everybody else.
void check_available(uint64_t bytes) {
  constexpr uint64_t kSpareBytes = 64 << 20;
  if (bytes <= kSpareBytes) return;
  const HostMemory memory = host_memory();
  const uint64_t available = memory.available_bytes;
  const bool fits = available >= kSpareBytes && bytes <= available - kSpareBytes;
  if (!fits || bytes > std::numeric_limits<off_t>::max()) fail_memory(bytes, memory);
}

}  // namespace

Share allocate_shared(Rank rank, uint64_t bytes) {
  check_available(bytes);
  Descriptor fd(memfd_create("offcore", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) fail_errno(Code::driver, "cannot create shared memory (memfd_create)");
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    fail_errno(Code::memory, cat("cannot size shared memory to ", bytes, " bytes"));
  }
  int error = 0;
  do {
    error = bytes == 0 ? 0 : posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes));
  } while (error == EINTR);
  if (error != 0) fail_memory(bytes, host_memory());
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
