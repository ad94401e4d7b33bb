#include "shim/exchange.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "shim/library.h"

namespace offcore::shim {
namespace {

constexpr std::chrono::microseconds kNap{50};
constexpr uint32_t kNapsBetweenChecks = 200;

}  // namespace

Exchange::Exchange(Comm comm, Rank rank, Rank ranks, int device, size_t text_max)
    : comm_(comm),
      rank_(rank),
      ranks_(ranks),
      text_max_(text_max),
      slot_bytes_(text_max + sizeof(uint64_t)),
      gpu_(cuda::GpuContext::of(device)) {
  const cuda::ContextGuard current = gpu_->current();
  stream_ = gpu_->stream();
  cuda::check(cuda::Driver::get().cuMemAlloc(&memory_, slot_bytes_ * (ranks + size_t{1})),
              "cuMemAlloc");
}

Exchange::~Exchange() {
  if (memory_ == 0) return;
  try {
    const cuda::ContextGuard current = gpu_->current();
    cuda::Driver::get().cuMemFree(memory_);
  } catch (const Error&) {  // the context is gone, and the memory with it
  }
}

// Whether a call that NCCL has begun may still end well.
void Exchange::check_comm() const {
  const Library& real = Library::of_process();
  NcclResult state = kNcclInProgress;
  while (state == kNcclInProgress) {  // of a communicator that does not block
    if (cancelled_) fail(Code::cancelled, "the communicator was aborted");
    if (real.CommGetAsyncError == nullptr) return;
    const NcclResult result = real.CommGetAsyncError(comm_, &state);
    if (result != kNcclSuccess) state = result;
    if (state == kNcclInProgress) std::this_thread::sleep_for(kNap);
  }
  if (state != kNcclSuccess) fail(Code::peer, "NCCL's communicator has failed with ", state);
}

std::vector<std::string> Exchange::all_gather(std::string text) {
  check_comm();
  text.resize(std::min(text.size(), text_max_));
  std::string slots(slot_bytes_ * ranks_, '\0');
  const uint64_t length = text.size();
  std::memcpy(slots.data(), &length, sizeof length);
  std::memcpy(slots.data() + sizeof length, text.data(), length);
  const auto at = [](cuda::CUdeviceptr address) { return reinterpret_cast<void*>(address); };
  void* const own = at(memory_ + slot_bytes_ * ranks_);
  const cuda::ContextGuard current = gpu_->current();
  gpu_->copy(own, slots.data(), slot_bytes_);
  const auto stream = reinterpret_cast<Stream>(stream_->handle());
  const auto gather = [&] {
    const Inside guard;
    const Library& real = Library::of_process();
    return real.AllGather(own, at(memory_), slot_bytes_, kNcclUint8, comm_, stream);
  };
  const NcclResult result = gather();
  if (result != kNcclSuccess && result != kNcclInProgress) {
    fail(Code::peer, "NCCL's all-gather fails with ", result);
  }
  check_comm();
  for (uint32_t naps = 0;; ++naps) {
    const cuda::CUresult state = cuda::Driver::get().cuStreamQuery(stream_->handle());
    if (state == cuda::kSuccess) break;
    if (state != cuda::kNotReady) cuda::fail_result(state, "cuStreamQuery");
    if (naps % kNapsBetweenChecks == 0) check_comm();
    std::this_thread::sleep_for(kNap);
  }
  gpu_->copy(slots.data(), at(memory_), slots.size());
  std::vector<std::string> texts;
  for (Rank rank = 0; rank < ranks_; ++rank) {
    uint64_t bytes = 0;
    std::memcpy(&bytes, slots.data() + rank * slot_bytes_, sizeof bytes);
    if (bytes > text_max_) fail(Code::mismatch, "rank ", rank, " sent something else");
    texts.push_back(slots.substr(rank * slot_bytes_ + sizeof bytes, bytes));
  }
  return texts;
}

}  // namespace offcore::shim
