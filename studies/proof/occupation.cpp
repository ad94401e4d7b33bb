#include "studies/proof/occupation.h"

#include <algorithm>
#include <atomic>

#include "core/backend/cuda/executor.h"
#include "core/base/threads.h"

namespace offcore::cuda {
namespace {

constexpr double kStartS = 3;
constexpr double kEndS = 5;
constexpr uint32_t kHere = 1;
constexpr uint32_t kRan = 7;

std::atomic_ref<uint32_t> word_at(const std::shared_ptr<void>& words, uint32_t index) {
  return std::atomic_ref<uint32_t>(static_cast<uint32_t*>(words.get())[index]);
}

}  // namespace

Occupation::Occupation(const std::vector<int>& ordinals, double limit_s)
    : OfProcess("the occupation") {
  if (ordinals.empty()) fail(Code::invalid, "no GPU to hold");
  if (!(limit_s > 0) || limit_s > 60) fail(Code::invalid, "a limit of 0 to 60 s, not ", limit_s);
  uint32_t words = 1;
  for (int ordinal : ordinals) {
    const std::shared_ptr<const GpuContext> gpu = GpuContext::of(ordinal);
    const int sms = attribute(ordinal, Attribute::multiprocessors);
    const int threads = attribute(ordinal, Attribute::multiprocessor_threads);
    seats_.push_back({.gpu = gpu,
                      .blocks = gpu->stream(),
                      .control = gpu->stream(),
                      .kernels = std::make_unique<Kernels>(gpu->context()),
                      .count = static_cast<uint32_t>(sms * threads) / kSpinnerThreads,
                      .at = words});
    blocks_ += seats_.back().count;
    words += 1 + seats_.back().count;
  }
  words_ = allocate_pinned(seats_[0].gpu->context(), words * sizeof(uint32_t));
  try {
    fill(limit_s);
  } catch (...) {
    let_go();
    throw;
  }
}

void Occupation::fill(double limit_s) {
  for (const OccupiedGpu& seat : seats_) warm_up(seat);
  const auto limit_ns = static_cast<uint64_t>(limit_s * 1e9);
  for (const OccupiedGpu& seat : seats_) {
    seat.kernels->spin(
        seat.blocks->handle(), seat.count,
        {.stop = address(seat, 0), .state = address(seat, seat.at + 1), .limit_ns = limit_ns});
  }
  const Deadline deadline = Deadline::after_s(std::min(kStartS, limit_s));
  while (!holds()) {
    if (deadline.passed()) {
      fail(Code::driver, "not all blocks that should fill the SMs start: does something ",
           "else hold the GPU?");
    }
    nap(0);
  }
  for (const OccupiedGpu& seat : seats_) {
    seat.kernels->touch(seat.control->handle(), {.word = address(seat, seat.at), .value = kRan});
  }
}

Occupation::~Occupation() { let_go(); }

void Occupation::let_go() {
  try {
    release();
  } catch (const Error&) {
    keep_for_good(std::make_shared<std::vector<OccupiedGpu>>(std::move(seats_)));
    keep_for_good(std::move(words_));
  }
}

CUdeviceptr Occupation::address(const OccupiedGpu& seat, uint32_t word) const {
  const ContextGuard current = seat.gpu->current();
  CUdeviceptr base = 0;
  check(Driver::get().cuMemHostGetDevicePointer(&base, words_.get(), 0),
        "cuMemHostGetDevicePointer");
  return base + word * sizeof(uint32_t);
}

uint32_t Occupation::read(uint32_t word) const {
  return word_at(words_, word).load(std::memory_order_acquire);
}

// A first launch may wait for the whole device: now nothing spins yet.
void Occupation::warm_up(const OccupiedGpu& seat) const {
  word_at(words_, 0) = 1;  // stop at once
  seat.kernels->spin(seat.blocks->handle(), 1,
                     {.stop = address(seat, 0), .state = address(seat, seat.at + 1)});
  seat.kernels->touch(seat.control->handle(), {.word = address(seat, seat.at), .value = kRan});
  if (!wait_idle(kStartS)) {
    fail(Code::driver, "a kernel does not end: does something else hold the GPU?");
  }
  word_at(words_, 0) = 0;
  word_at(words_, seat.at) = 0;
  word_at(words_, seat.at + 1) = 0;
}

bool Occupation::wait_idle(double limit_s) const {
  const Deadline deadline = Deadline::after_s(limit_s);
  const int64_t began_ns = now_ns();
  for (const OccupiedGpu& seat : seats_) {
    const ContextGuard current = seat.gpu->current();
    for (const CudaStream* stream : {seat.blocks.get(), seat.control.get()}) {
      for (;;) {
        const CUresult result = Driver::get().cuStreamQuery(stream->handle());
        if (result == kSuccess) break;
        if (result != kNotReady) check(result, "a GPU failed: cuStreamQuery");
        if (deadline.passed()) return false;
        nap(now_ns() - began_ns);
      }
    }
  }
  return true;
}

bool Occupation::control_ran() const {
  return std::any_of(seats_.begin(), seats_.end(),
                     [&](const OccupiedGpu& seat) { return read(seat.at) == kRan; });
}

bool Occupation::holds() const {
  for (const OccupiedGpu& seat : seats_) {
    for (uint32_t block = 0; block < seat.count; ++block) {
      if (read(seat.at + 1 + block) != kHere) return false;
    }
  }
  return true;
}

bool Occupation::release() {
  if (seats_.empty()) return false;
  word_at(words_, 0).store(1, std::memory_order_release);
  if (!released_ && !wait_idle(kEndS)) {
    fail(Code::driver, "the blocks on the GPUs do not end: end this process");
  }
  released_ = true;
  return std::all_of(seats_.begin(), seats_.end(),
                     [&](const OccupiedGpu& seat) { return read(seat.at) == kRan; });
}

}  // namespace offcore::cuda
