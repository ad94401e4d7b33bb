#include "core/backend/cuda/spare_engines.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>

namespace offcore::cuda {
namespace {

constexpr int kMajor = 9;  // of the compute capability whose engines were measured

constexpr uint64_t kOwnMin = uint64_t{16} << 20;  // fewer are hardly worth two streams more

// Bytes a nanosecond: to other GPUs, by a peer's base, by the spare engines beside both.
constexpr double kPush = 390;
constexpr double kPeerBase = 545;
constexpr double kSpare = 140;

constexpr EngineAlias::Side kSides[] = {EngineAlias::Side::dst, EngineAlias::Side::src};
constexpr uint64_t kTriedBytes = 4096;                                   // by each of them
constexpr uint64_t kTrialBytes = (1 + std::size(kSides)) * kTriedBytes;  // and what they copy
constexpr double kTrialS = 0.5;  // of a few us, unless others' copies come first

}  // namespace

SpareEngines::SpareEngines(const GpuContext& gpu)
    : context_(gpu.context()),
      pinned_(allocate_pinned(context_, kTrialBytes)),
      stream_(gpu.stream()) {
  const std::shared_ptr<const Allocation> host = Allocation::create_host(gpu, kRowMax);
  for (const auto side : kSides) aliases_.emplace_back(gpu, host, side, kRowMax);
  const auto memory = Allocation::create(gpu, kTrialBytes, false);
  tried_.emplace(context_, memory->bytes());
  tried_->map(0, memory);
  const int ordinal = gpu.device();
  tried_->open({&ordinal, 1});
}

std::shared_ptr<SpareEngines> SpareEngines::find(const GpuContext& gpu) {
  if (attribute(gpu.device(), Attribute::compute_major) != kMajor) return nullptr;
  std::shared_ptr<SpareEngines> found;
  try {
    found.reset(new SpareEngines(gpu));
  } catch (const Error&) {  // a driver that has no such memory, or none is left
    return nullptr;
  }
  try {
    found->begin_trial(gpu);
  } catch (const Error&) {  // what was not enqueued does not come
  }
  return found;
}

// Each copies what lies first to a place of its own behind it, where other bytes lie.
void SpareEngines::begin_trial(const GpuContext& gpu) {
  auto* const sent = static_cast<std::byte*>(pinned_.get());
  for (size_t i = 0; i < kTrialBytes; ++i) {
    const auto value = static_cast<std::byte>(1 + i % kTriedBytes * 7 + i % kTriedBytes / 251);
    sent[i] = i < kTriedBytes ? value : ~value;
  }
  const auto host = reinterpret_cast<CUdeviceptr>(sent);
  const CUdeviceptr src = tried_->base();
  const Driver& driver = Driver::get();
  const ContextGuard current = gpu.current();
  check(driver.cuMemcpyAsync(src, host, kTrialBytes, stream_->handle()), "cuMemcpyAsync");
  for (size_t i = 0; i < aliases_.size(); ++i) {
    const CUdeviceptr dst = src + (i + 1) * kTriedBytes;
    for (uint64_t done = 0; done < kTriedBytes;) {
      const CUmemcpy2D piece = aliases_[i].first(dst + done, src + done, kTriedBytes - done);
      check(driver.cuMemcpy2DAsync(&piece, stream_->handle()), "cuMemcpy2DAsync");
      done += piece.width;
    }
  }
  check(driver.cuMemcpyAsync(host + kTriedBytes, src + kTriedBytes, kTrialBytes - kTriedBytes,
                             stream_->handle()),
        "cuMemcpyAsync");
}

bool SpareEngines::under_trial() const {
  if (stream_ == nullptr) return false;
  const ContextGuard current(context_->handle());
  return Driver::get().cuStreamQuery(stream_->handle()) == kNotReady;
}

bool SpareEngines::work(const GpuContext& gpu) {
  if (stream_ != nullptr) {
    if (!gpu.idle_by(Deadline::after_s(kTrialS), stream_->handle())) return false;
    stream_.reset();
    tried_.reset();
    const auto* const sent = static_cast<const std::byte*>(pinned_.get());
    for (size_t at = kTriedBytes; at < kTrialBytes; at += kTriedBytes) {
      if (std::memcmp(sent + at, sent, kTriedBytes) != 0) aliases_.clear();
    }
  }
  return !aliases_.empty();
}

uint64_t SpareEngines::share(uint64_t own, uint64_t pushed, uint64_t moved) {
  if (own < kOwnMin) return 0;
  const double alone = static_cast<double>(pushed) / kPush +
                       static_cast<double>(own + moved) / kPeerBase;  // without spare engines
  return std::min(own, static_cast<uint64_t>(alone / (1 / kSpare + 1 / kPeerBase)));
}

}  // namespace offcore::cuda
