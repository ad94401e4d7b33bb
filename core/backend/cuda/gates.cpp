#include "core/backend/cuda/gates.h"

#include <utility>

namespace offcore::cuda {

Gates::Gates(std::shared_ptr<CudaExecutor> executor)
    : executor_(std::move(executor)),
      device_(*executor_->devices().front()),
      memory_(allocate_pinned(device_.gpu().context(), kWords * sizeof(uint32_t))) {}

std::shared_ptr<Gate> Gates::gate(uint32_t line) {
  CUstream stream = nullptr;
  {
    const std::scoped_lock lock(mutex_);
    std::unique_ptr<CudaStream>& place = lines_[line];
    if (place == nullptr) place = device_.gpu().stream();
    stream = place->handle();
  }
  return std::make_shared<CudaGate>(shared_from_this(), stream);
}

Gates::GateWord Gates::take() {
  const std::scoped_lock lock(mutex_);
  for (size_t i = 0; i < kWords; ++i) {
    const size_t index = (next_ + i) % kWords;
    uint32_t* const at = static_cast<uint32_t*>(memory_.get()) + index;
    if (__atomic_load_n(at, __ATOMIC_ACQUIRE) != values_[index]) continue;
    next_ = index + 1;
    return {.at = at, .value = ++values_[index]};
  }
  fail(Code::memory, "all ", kWords, " gates of a transfer are closed: wait for some jobs first");
}

void Gates::enter(uintptr_t stream) {
  const std::scoped_lock lock(mutex_);
  if (!standing_.contains(stream)) executor_->take_armed(device_, 1);
  ++standing_[stream];
}

void Gates::leave(uintptr_t stream) {
  const std::scoped_lock lock(mutex_);
  if (--standing_[stream] > 0) return;
  standing_.erase(stream);
  executor_->give_armed(device_, 1);
}

CudaGate::CudaGate(std::shared_ptr<Gates> of, CUstream line)
    : of_(std::move(of)), line_(line), word_(of_->take()) {}

CudaGate::~CudaGate() {
  open();
  for (const uintptr_t stream : standing_) of_->leave(stream);
}

void CudaGate::operate(CUstream stream, CUstreamMemOp op) const {
  const ContextGuard current = of_->device_.enqueuing();
  op.address = reinterpret_cast<CUdeviceptr>(word_.at);
  op.value = word_.value;
  check(Driver::get().cuStreamBatchMemOp(stream, 1, &op, 0), "cuStreamBatchMemOp of a gate");
}

void CudaGate::enqueue_wait(uintptr_t stream) {
  {
    const std::scoped_lock lock(mutex_);
    of_->enter(stream);
    standing_.push_back(stream);
  }
  operate(reinterpret_cast<CUstream>(stream), {.operation = kOpWait32, .flags = kWaitGeq});
}

void CudaGate::open_in_line() {
  operate(line_, {.operation = kOpWrite32});
  opening_ = true;
}

void CudaGate::open() {
  if (!std::exchange(opening_, true)) __atomic_store_n(word_.at, word_.value, __ATOMIC_RELEASE);
}

}  // namespace offcore::cuda
