// What engines do to memory: copies and fills of rows in no particular order, waits for words and
// writes of words. All of it reaches memory through the table of mappings when it runs, so that a
// range unmapped meanwhile is an illegal address, as on a GPU.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "tests/fakes/cuda/abi.h"
#include "tests/fakes/cuda/memory.h"
#include "tests/fakes/cuda/stream.h"

namespace fakecuda {

// One side of a copy. `host`: memory the driver was told nothing about is allowed.
struct Side {
  DevicePtr address = 0;
  DevicePtr base = 0;        // what the caller gave, from which offsets lead to the address
  uint64_t pitch = 0;        // from row to row
  uint64_t slice_pitch = 0;  // from slice to slice
  bool host = false;
};

struct Transfer {
  Side dst, src;
  uint64_t width = 0;
  uint64_t rows = 1;
  uint64_t slices = 1;
};

// Copies of one batch are in no order among each other.
Work copy_work(std::vector<Transfer> batch);
Work fill_work(DevicePtr dst, uint64_t count, uint32_t value, unsigned value_bytes);
// The operations of one call, in order; waits give up when the context fails.
Work mem_op_work(std::vector<MemOp> ops);

// Whether the engines for copies to and from the host are busy with others' copies, of all devices.
void hold_host_engines(bool held);

// What the stand-in has done, for tests.
struct Tally {
  std::atomic<uint64_t> plain{0}, strided{0}, batched{0}, fills{0};  // commands run
  std::atomic<uint64_t> same_device{0};  // commands that a GPU would do with a kernel
  std::atomic<uint64_t> crossed{0};      // by the engine for the way back
  // Bytes copied within a GPU by the host's engines: the destination's base, or the source's, is
  // the host's memory.
  std::atomic<uint64_t> to_host_engine{0}, from_host_engine{0};
  std::atomic<uint64_t> rows{0}, bytes{0}, waits{0}, writes{0};
  std::atomic<uint64_t> late_writes{0};  // in streams that had copied: a GPU's engine makes them
};
Tally& tally();

}  // namespace fakecuda
