#include "core/backend/cuda/signal_words.h"

#include <numeric>

namespace offcore::cuda {
namespace {

constexpr uint64_t kValueBytes = sizeof(uint32_t);

PeerMapping own_words(Rank ranks, std::span<const std::shared_ptr<LocalGpu>> devices) {
  std::vector<RankMemory> parts(ranks);
  for (const auto& device : devices) {
    parts[device->rank()].allocations = {Allocation::create(device->gpu(), 1, false)};
  }
  const RankMemory first = parts[devices.front()->rank()];
  for (RankMemory& part : parts) part = part.allocations.empty() ? first : part;
  return PeerMapping(std::move(parts), devices);
}

}  // namespace

SignalWords::SignalWords(Rank ranks, std::span<const std::shared_ptr<LocalGpu>> devices)
    : mapping_(own_words(ranks, devices)) {}

CUdeviceptr SignalWords::take(const LocalGpu& device, uint64_t count) {
  const std::scoped_lock lock(mutex_);
  Free& free = free_[device.rank()];
  std::vector<CUdeviceptr>& returned = free.returned[count];
  if (!returned.empty()) {
    const CUdeviceptr words = returned.back();
    returned.pop_back();
    return words;
  }
  if ((free.next + count) * kWordBytes > mapping_.stride()) {
    fail(Code::unsupported, "too many queues on one GPU: its ", mapping_.stride() / kWordBytes,
         " words are all in use");
  }
  const CUdeviceptr words = mapping_.part(device.rank()) + kWordBytes * free.next;
  free.next += count;
  return words;
}

void SignalWords::give(const LocalGpu& device, CUdeviceptr words, uint64_t count) {
  const std::scoped_lock lock(mutex_);
  free_[device.rank()].returned[count].push_back(words);
}

SignalTable::SignalTable(std::shared_ptr<const LocalGpu> device, std::shared_ptr<SignalWords> words)
    : block_(std::move(device), std::move(words), 2 * kHalf * kValueBytes / kWordBytes) {}

void SignalTable::prepare(uint32_t first, uint32_t count) {
  for (Half& half : halves_) half.prepared = false;
  if (count == 0) return;
  const uint32_t last = first + count - 1;
  prepare(first / kHalf);
  if (last / kHalf != first / kHalf) prepare(last / kHalf);
}

void SignalTable::prepare(uint32_t turn) {
  Half& half = halves_[turn % 2];
  if (!half.filled || half.turn != turn) {
    if (half.read != nullptr && !half.read->passed()) return;
    std::vector<uint32_t> values(kHalf);
    std::iota(values.begin(), values.end(), turn * kHalf);
    half.filled = false;
    block_.device().gpu().copy(reinterpret_cast<void*>(at(turn * kHalf)), values.data(),
                               kHalf * kValueBytes);
    half = {.filled = true, .turn = turn, .prepared = false, .read = nullptr};
  }
  half.prepared = true;
}

void SignalTable::used_until(const std::shared_ptr<const CudaEvent>& done) {
  for (Half& half : halves_) {
    if (half.prepared) half.read = done;
  }
}

CUdeviceptr SignalTable::find(uint32_t value) const {
  const Half& half = halves_[value / kHalf % 2];
  return half.filled && half.turn == value / kHalf ? at(value) : 0;
}

CUdeviceptr SignalTable::at(uint32_t value) const {
  return block_.address() + value % (2 * kHalf) * kValueBytes;
}

}  // namespace offcore::cuda
