#include "core/backend/cuda/request_engine.h"

#include <algorithm>
#include <utility>

#include "core/backend/cuda/facts.h"
#include "core/base/threads.h"

namespace offcore::cuda {
namespace {

// Submissions of a peer that are under way at most, so that no call finds the driver's queue full
// and waits in it. A stream of kernels that wait for each other needs fewer.
constexpr uint64_t kInFlightMax = 64;
constexpr uint64_t kTellEvery = 8;      // submissions; parked ones tell each time
constexpr size_t kCallCopiesMax = 128;  // of a call
constexpr uint64_t kLine = 64;
constexpr int64_t kOpenNs = 50'000'000;

}  // namespace

CudaRequestEngine::CudaRequestEngine(std::shared_ptr<CudaExecutor> executor,
                                     std::shared_ptr<LocalGpu> device)
    : executor_(std::move(executor)),
      device_(std::move(device)),
      told_(allocate_pinned(device_->gpu().context(), kLine * executor_->ranks())),
      streams_(executor_->ranks()),
      words_(device_->gpu().stream()) {
  const int ordinal = device_->ordinal();
  if (attribute(ordinal, Attribute::wide_stream_words) == 0 ||
      attribute(ordinal, Attribute::can_use_host_pointer) == 0) {
    fail(Code::unsupported, "requests: device ", ordinal, " writes no 64-bit words in streams, or ",
         "has addresses of its own for host memory");
  }
  for (const std::shared_ptr<LocalGpu>& other : executor_->devices()) {
    if (other != device_ && other->ordinal() == ordinal) {
      fail(Code::unsupported, "requests: ranks ", device_->rank(), " and ", other->rank(),
           " are on one GPU, where copies take its SMs; give each rank a GPU");
    }
  }
  for (Rank peer = 0; peer < executor_->ranks(); ++peer) {
    if (peer != device_->rank()) streams_[peer].stream = device_->gpu().stream();
  }
  dsts_.reserve(kCallCopiesMax);
  srcs_.reserve(kCallCopiesMax);
  sizes_.reserve(kCallCopiesMax);
}

CudaRequestEngine::~CudaRequestEngine() {
  const ContextGuard current = device_->current();
  bool ended = true;
  try {
    const Deadline deadline = Deadline::after_s(kGraceS);
    while (!(ended = quiet()) && !deadline.passed()) nap(0);
  } catch (const Error&) {
    ended = false;
  }
  if (ended) {
    if (armed_ > 0) executor_->give_armed(*device_, armed_);
    return;
  }
  // A GPU still holds them: kept for good.
  new auto(std::move(streams_));
  new auto(std::move(words_));
  new auto(std::move(twins_));
  new std::shared_ptr<void>(told_);
}

// The thread keeps the context, and what it calls disturbs no capture.
void CudaRequestEngine::enter() {
  if (std::exchange(entered_, true)) return;
  int mode = kCaptureRelaxed;
  check(Driver::get().cuThreadExchangeStreamCaptureMode(&mode),
        "cuThreadExchangeStreamCaptureMode");
  check(Driver::get().cuCtxPushCurrent(device_->gpu().context()->handle()), "cuCtxPushCurrent");
}

uint64_t CudaRequestEngine::ended(Rank peer) {
  const auto* word =
      reinterpret_cast<const uint64_t*>(static_cast<const std::byte*>(told_.get()) + kLine * peer);
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

bool CudaRequestEngine::room(Rank peer) {
  return streams_[peer].submitted - ended(peer) < kInFlightMax;
}

CUdeviceptr CudaRequestEngine::target(const std::byte* address) const {
  const auto plain = reinterpret_cast<CUdeviceptr>(address);
  if (twins_.empty()) return plain;
  const PeerMapping* mapping = executor_->mappings()->find(address);
  const auto twin = twins_.find(mapping);
  if (twin == twins_.end()) {
    fail(Code::invalid, "requests: a parked copy writes memory that was not prepared for it");
  }
  return plain - mapping->base() + twin->second->base();
}

void CudaRequestEngine::copy(CUstream stream, std::span<const RequestCopy> copies) {
  const Driver& driver = Driver::get();
  for (size_t at = 0; at < copies.size(); at += kCallCopiesMax) {
    const auto part = copies.subspan(at, std::min(kCallCopiesMax, copies.size() - at));
    dsts_.clear();
    srcs_.clear();
    sizes_.clear();
    for (const RequestCopy& one : part) {
      dsts_.push_back(target(one.dst));
      srcs_.push_back(reinterpret_cast<CUdeviceptr>(one.src));
      sizes_.push_back(one.bytes);
    }
    if (part.size() > 1 && driver.cuMemcpyBatchAsync != nullptr) {
      CUmemcpyAttributes attributes{.src_order = kSrcOrderStream};
      size_t first = 0;
      const CUresult result = driver.cuMemcpyBatchAsync(
          dsts_.data(), srcs_.data(), sizes_.data(), part.size(), &attributes, &first, 1, stream);
      if (!refused(result)) {
        check(result, "cuMemcpyBatchAsync of requests");
        continue;
      }
    }
    for (size_t i = 0; i < part.size(); ++i) {
      check(driver.cuMemcpyAsync(dsts_[i], srcs_[i], sizes_[i], stream),
            "cuMemcpyAsync of a request");
    }
  }
}

void CudaRequestEngine::operate(CUstream stream) {
  for (size_t at = 0; at < ops_.size(); at += kMemOpsMax) {
    const size_t count = std::min<size_t>(kMemOpsMax, ops_.size() - at);
    check(Driver::get().cuStreamBatchMemOp(stream, static_cast<unsigned>(count), &ops_[at], 0),
          "cuStreamBatchMemOp of requests");
  }
  ops_.clear();
}

void CudaRequestEngine::write(CUstream stream, std::span<const RequestWord> words,
                              const RequestWord* told) {
  for (const RequestWord& word : words) {
    ops_.push_back({.operation = kOpWrite64, .address = target(word.word), .value = word.value});
  }
  if (told != nullptr) {
    ops_.push_back({.operation = kOpWrite64,
                    .address = reinterpret_cast<CUdeviceptr>(told->word),
                    .value = told->value});
  }
  operate(stream);
}

void CudaRequestEngine::submit(Rank peer, std::span<const RequestCopy> copies,
                               std::span<const RequestWord> words) {
  enter();
  PeerStream& to = streams_[peer];
  copy(to.stream->handle(), copies);
  const RequestWord told{static_cast<std::byte*>(told_.get()) + kLine * peer, ++to.submitted};
  write(to.stream->handle(), words, to.submitted % kTellEvery == 0 ? &told : nullptr);
}

void CudaRequestEngine::store(std::span<const RequestWord> words) {
  enter();
  for (const RequestWord& word : words) {
    ops_.push_back({.operation = kOpWrite64,
                    .address = reinterpret_cast<CUdeviceptr>(word.word),
                    .value = word.value});
  }
  operate(words_->handle());
}

bool CudaRequestEngine::idle() {
  enter();
  return quiet();
}

bool CudaRequestEngine::quiet() {
  const auto done = [](const std::unique_ptr<CudaStream>& stream) {
    if (stream == nullptr) return true;
    const CUresult result = Driver::get().cuStreamQuery(stream->handle());
    if (result == kNotReady) return false;
    check(result, "a GPU failed: cuStreamQuery");
    return true;
  };
  const ContextGuard current = device_->current();
  return done(words_) && std::all_of(streams_.begin(), streams_.end(),
                                     [&](const PeerStream& to) { return done(to.stream); });
}

void CudaRequestEngine::prepare_parking(std::span<std::byte* const> windows) {
  const size_t streams = executor_->ranks() - size_t{1};
  executor_->take_armed(*device_, streams);
  armed_ = streams;
  const ContextGuard current = device_->current();
  for (std::byte* const address : windows) {
    const PeerMapping* mapping = executor_->mappings()->find(address);
    if (mapping == nullptr) {
      fail(Code::unsupported, "a schedule: what its copies write must lie in windows that the ",
           "communicator has made");
    }
    std::unique_ptr<PeerMapping>& twin = twins_[mapping];
    if (twin == nullptr) {
      twin = std::make_unique<PeerMapping>(mapping->parts(), executor_->devices());
    }
  }
}

void CudaRequestEngine::park(Rank peer, std::byte* gate, uint32_t value,
                             std::span<const RequestCopy> copies,
                             std::span<const RequestWord> words) {
  enter();
  PeerStream& to = streams_[peer];
  const CUstream stream = to.stream->handle();
  to.gate = gate;
  to.parked = value;
  ops_.push_back({.operation = kOpWait32,
                  .address = reinterpret_cast<CUdeviceptr>(gate),
                  .value = value,
                  .flags = kWaitGeq});
  operate(stream);
  copy(stream, copies);
  const RequestWord told{static_cast<std::byte*>(told_.get()) + kLine * peer, ++to.submitted};
  write(stream, words, &told);
}

void CudaRequestEngine::recall() {
  const ContextGuard current = device_->current();
  for (auto& [mapping, twin] : twins_) twin->blank(executor_->devices());
  const Deadline deadline = Deadline::after_s(kRunOutS);
  do {  // again, as a kernel's start that was under way may come behind
    if (deadline.passed()) fail(Code::driver, "parked requests on a GPU did not end");
    for (const PeerStream& to : streams_) {
      if (to.gate == nullptr) continue;
      ops_.push_back({.operation = kOpWrite32,
                      .address = reinterpret_cast<CUdeviceptr>(to.gate),
                      .value = to.parked});
    }
    operate(words_->handle());
    const Deadline again = Deadline::after_ns(kOpenNs);
    while (!idle() && !again.passed()) nap(0);
  } while (!idle());
}

}  // namespace offcore::cuda
