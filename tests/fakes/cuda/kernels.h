// Kernels by name, played by the stand-in: those of studies/proof/resident.cpp and of
// copy_kernel.cpp in core/backend/cuda, whose comments say what they do. And the room that kernels
// need: threads on the SMs of a device.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/fakes/cuda/stream.h"

namespace fakecuda {

// Waits for room for this many threads at once (all there is, where more are asked for), and holds
// it until destroyed.
class Room {
 public:
  Room(Context& context, int64_t threads);
  ~Room();
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

 private:
  Context& context_;
  int64_t threads_;
};

struct Launch {
  unsigned blocks = 0;
  unsigned threads = 0;  // of a block
  std::vector<uint64_t> arguments;
};

// Bytes of each argument of a kernel that the stand-in plays, which become whole words; empty: it
// does not know it.
std::vector<unsigned> kernel_arguments(const std::string& name);
Work kernel_work(const std::string& name, Launch launch);

}  // namespace fakecuda
