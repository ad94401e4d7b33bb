// Memory that several processes map: a sealed memfd whose pages are reserved when it is made, so
// that running out is an error here and not a signal in the middle of a copy.
#pragma once
#include "core/backend/backend.h"

namespace offcore {

// Zeroed. Throws memory, naming the bytes wanted and the bytes available.
Share allocate_shared(Rank rank, uint64_t bytes);

// Maps a peer's memory; owns fd from here on, also when it throws. Throws mismatch when the
// descriptor holds fewer bytes.
Share import_shared(Rank rank, uint64_t bytes, int fd);

class SharedMemory final : public Memory {
 public:
  Share allocate(Rank rank, uint64_t bytes) override { return allocate_shared(rank, bytes); }
  Share import(Rank rank, uint64_t bytes, int fd) override {
    return import_shared(rank, bytes, fd);
  }
};

}  // namespace offcore
