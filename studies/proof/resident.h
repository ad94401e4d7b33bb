// Kernels that stay on a GPU while its copy engines work: for proofs, never for an operation.
//
//   reader   polls each peer's flag word and, as soon as it is there, reads the peer's chunk from
//            its last word on: whatever a flag overtook is counted (what copies must never do)
//   spinner  holds its place on an SM until it is told to go: with every SM held, what still ends
//            ran without one
//   toucher  writes one word: the control, which cannot run while every SM is held
//
// They are PTX, which the driver compiles when a proof asks for it; nobody needs a toolkit. Every
// loop of theirs ends by itself when the GPU's clock passes a limit. They must be loaded and have
// run once before anything spins: a first launch may wait for the whole device.
#pragma once
#include <memory>
#include <span>

#include "core/backend/cuda/gpu_context.h"

namespace offcore::cuda {

// What `reader` takes, in this order. Words of flags lie kWordBytes apart.
struct ReaderArguments {
  CUdeviceptr chunks = 0;    // the peers' chunks here, by rank
  CUdeviceptr flags = 0;     // the word of rank 0's data
  CUdeviceptr consumed = 0;  // where rank 0 hears that this rank has read its chunk
  uint64_t stride = 0;       // from one rank's memory to the next one's
  CUdeviceptr outcome = 0;   // 64 bits: wrong words are added; 32 bits: the flag that never came
  uint64_t limit_ns = 0;     // of one flag
  uint32_t words = 0;        // of a chunk
  uint32_t own = 0;
  uint32_t ranks = 0;
  uint32_t first = 0;  // the first operation's flag value
  uint32_t count = 0;  // operations
  uint32_t banks = 0;  // operation v sends bank v % banks, ...
  uint32_t fans = 0;   // ... and where this is 1, the bank after it to the second peer, and so on
};

struct SpinnerArguments {
  CUdeviceptr stop = 0;   // a word: go when it is not 0
  CUdeviceptr state = 0;  // a word a block: 1 here, 2 gone when told, 3 gone at the limit
  uint64_t limit_ns = 0;
};

struct ToucherArguments {
  CUdeviceptr word = 0;
  uint32_t value = 0;
};

inline constexpr uint32_t kReaderThreads = 1024;
inline constexpr uint32_t kSpinnerThreads = 512;  // every GPU's SM takes a whole number of these

// What a word of bank `bank` of rank `rank` holds: no two banks, ranks or neighbours agree.
inline constexpr uint32_t kBankStep = 2654435761u;
inline constexpr uint32_t kRankShift = 40503u;

// The kernels, loaded on one GPU.
class Kernels {
 public:
  explicit Kernels(std::shared_ptr<const PrimaryContext> context);
  ~Kernels();
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  void read(CUstream stream, ReaderArguments arguments) const;
  void spin(CUstream stream, uint32_t blocks, SpinnerArguments arguments) const;
  void touch(CUstream stream, ToucherArguments arguments) const;

 private:
  CUfunction function(const char* name) const;
  void launch(CUfunction function, uint32_t blocks, uint32_t threads, CUstream stream,
              std::span<void*> arguments) const;

  std::shared_ptr<const PrimaryContext> context_;
  CUmodule module_ = nullptr;
  CUfunction reader_ = nullptr;
  CUfunction spinner_ = nullptr;
  CUfunction toucher_ = nullptr;
};

}  // namespace offcore::cuda
