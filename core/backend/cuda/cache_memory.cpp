#include "core/backend/cuda/cache_memory.h"

#include <array>
#include <thread>

#include "core/base/clock.h"

namespace offcore::cuda {
namespace {

constexpr double kThroughS = 0.25;

std::shared_ptr<const GpuContext> context_of(int ordinal) {
  const Driver& driver = Driver::open();
  if (ordinal < 0 || ordinal >= driver.devices()) {
    fail(Code::invalid, "there is no GPU ", ordinal, " of ", driver.devices());
  }
  return GpuContext::of(ordinal);
}

uint64_t memory_of_gpu(const GpuContext& gpu) {
  const ContextGuard current = gpu.current();
  size_t free = 0;
  size_t total = 0;
  check(Driver::get().cuMemGetInfo(&free, &total), "cuMemGetInfo");
  return total;
}

}  // namespace

CachePool::CachePool(int ordinal, uint64_t bytes)
    : gpu_(context_of(ordinal)),
      range_(gpu_->context(), rounded(bytes == 0 ? 2 * memory_of_gpu(*gpu_) : bytes, kGranule)) {}

std::byte* CachePool::take(uint64_t bytes) {
  sweep();
  const uint64_t whole = rounded(bytes, kGranule);
  const std::optional<uint64_t> offset = range_.room(whole);
  if (!offset) return nullptr;
  try {
    range_.map(*offset, Allocation::create(*gpu_, whole, false));
  } catch (const Error& error) {
    if (error.code() == Code::memory) return nullptr;
    throw;
  }
  try {
    range_.open(std::array{gpu_->device()}, *offset);
  } catch (...) {
    range_.unmap(*offset);
    throw;
  }
  parts_.emplace(*offset, whole);
  taken_ += whole;
  return reinterpret_cast<std::byte*>(range_.base() + *offset);
}

void CachePool::give(std::byte* part) {
  const auto found = parts_.find(reinterpret_cast<CUdeviceptr>(part) - range_.base());
  if (found == parts_.end()) return;
  sweep();
  const bool waits = leaving_.empty();  // else one before has waited in vain
  leaving_.push_back({found->first, found->second, std::nullopt});
  parts_.erase(found);
  const Deadline deadline = Deadline::after_s(kThroughS);
  while (!through(leaving_.back()) && waits && !deadline.passed()) std::this_thread::yield();
  sweep();
}

bool CachePool::through(LeavingPart& part) {
  if (!part.through) {
    const ContextGuard current = gpu_->current();
    const Driver& driver = Driver::get();
    CudaEvent all = gpu_->event();
    if (driver.cuCtxRecordEvent != nullptr) {
      if (driver.cuCtxRecordEvent(gpu_->context()->handle(), all.handle()) != kSuccess)
        return false;
    } else {  // before CUDA 12.5
      if (driver.cuCtxSynchronize() != kSuccess) return false;
      all.record(nullptr);
    }
    part.through.emplace(std::move(all));
  }
  return part.through->passed();
}

void CachePool::sweep() {
  std::erase_if(leaving_, [&](LeavingPart& part) {
    if (!through(part)) return false;
    range_.unmap(part.offset);
    taken_ -= part.bytes;
    return true;
  });
}

std::unique_ptr<TensorsAtSteps> TensorsAtSteps::map(const GpuContext& gpu,
                                                    std::span<const MemoryExtent> tensors) {
  std::vector<RankMemory> memories;
  for (const MemoryExtent& tensor : tensors) {
    const auto bytes = static_cast<uint64_t>(tensor.last - tensor.first);
    memories.push_back(
        RankMemory::mapped_at(gpu, reinterpret_cast<CUdeviceptr>(tensor.first), bytes));
    if (memories.back().bytes() < memories.back().head + bytes) return nullptr;
  }
  const StrideLayout layout = StrideLayout::of(memories);
  if (!layout.possible) return nullptr;
  return std::unique_ptr<TensorsAtSteps>(
      new TensorsAtSteps(gpu, std::move(memories), tensors, layout));
}

TensorsAtSteps::TensorsAtSteps(const GpuContext& gpu, std::vector<RankMemory> memories,
                               std::span<const MemoryExtent> tensors, const StrideLayout& layout)
    : memories_(std::move(memories)),
      layout_(layout),
      range_(gpu.context(), memories_.size() * layout.stride()) {
  for (size_t i = 0; i < memories_.size(); ++i) {
    owners_.push_back(reinterpret_cast<CUdeviceptr>(tensors[i].first));
    range_.map(i * layout_.stride() + layout_.lead - memories_[i].head, memories_[i]);
  }
  range_.open(std::array{gpu.device()});
}

std::byte* TensorsAtSteps::at(size_t tensor) const {
  return reinterpret_cast<std::byte*>(range_.base() + tensor * layout_.stride() + layout_.lead);
}

// Owners let go of a tensor as a whole, so that one allocation of each tells.
bool TensorsAtSteps::intact() const {
  for (size_t i = 0; i < memories_.size(); ++i) {
    if (!memories_[i].allocations.front()->lies_at(owners_[i])) return false;
  }
  return true;
}

}  // namespace offcore::cuda
