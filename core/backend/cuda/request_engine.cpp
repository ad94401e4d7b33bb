#include "core/backend/cuda/request_engine.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/backend/cuda/facts.h"
#include "core/base/threads.h"

namespace offcore::cuda {
namespace {

constexpr uint64_t kTellEvery = 8;  // submissions
constexpr uint64_t kLine = 64;
constexpr uint32_t kExchangeThreads = 512;  // as kernels/exchange.cu has it

constexpr struct {
  const char* name;
  const char* ptx;
} kExchangePtx[] = {
#include "core/backend/cuda/kernels/exchange_ptx.inc"
};

CUstreamMemOp write64(CUdeviceptr word, uint64_t value) {
  return {.operation = kOpWrite64, .address = word, .value = value};
}

}  // namespace

CudaRequestEngine::CudaRequestEngine(std::shared_ptr<CudaExecutor> executor,
                                     std::shared_ptr<LocalGpu> device)
    : executor_(std::move(executor)),
      device_(std::move(device)),
      told_(allocate_pinned(device_->gpu().context(), kLine * executor_->ranks())),
      streams_(executor_->ranks()),
      words_(device_->gpu().stream()) {
  executor_->check_channels(
      "requests: a launch behind a waiting kernel could hold up the copy that it waits for");
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
    const auto launched = [&] { return !launched_ || launched_->passed(); };
    while (!(ended = quiet() && launched()) && !deadline.passed()) nap(0);
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
  new auto(std::move(launches_));
  new auto(std::move(twins_));
  new auto(std::move(exchange_));
  new auto(std::move(reached_));
  new std::shared_ptr<void>(told_);
}

// Whether the stream has nothing to do.
bool CudaRequestEngine::done(const std::unique_ptr<CudaStream>& stream) {
  if (stream == nullptr) return true;
  const CUresult result = Driver::get().cuStreamQuery(stream->handle());
  if (result == kNotReady) return false;
  check(result, "a GPU failed: cuStreamQuery");
  return true;
}

// The thread keeps the context, and what it calls disturbs no capture.
void CudaRequestEngine::enter() {
  if (std::exchange(entered_, true)) return;
  int mode = kCaptureRelaxed;
  check(Driver::get().cuThreadExchangeStreamCaptureMode(&mode),
        "cuThreadExchangeStreamCaptureMode");
  check(Driver::get().cuCtxPushCurrent(device_->gpu().context()->handle()), "cuCtxPushCurrent");
}

uint64_t CudaRequestEngine::ended(Rank peer) const {
  const auto* word =
      reinterpret_cast<const uint64_t*>(static_cast<const std::byte*>(told_.get()) + kLine * peer);
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

uint64_t CudaRequestEngine::room(Rank peer) {
  return kInFlightMax - (streams_[peer].submitted - ended(peer));
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

// Counts a submission, and now and then says so behind it.
void CudaRequestEngine::tell(Rank peer) {
  PeerStream& to = streams_[peer];
  if (++to.submitted % kTellEvery != 0) return;
  const auto* word = static_cast<const std::byte*>(told_.get()) + kLine * peer;
  ops_.push_back(write64(reinterpret_cast<CUdeviceptr>(word), to.submitted));
}

void CudaRequestEngine::submit(Rank peer, std::span<const RequestCopy> copies,
                               std::span<const RequestWord> words) {
  enter();
  const CUstream stream = streams_[peer].stream->handle();
  copy(stream, copies);
  for (const RequestWord& word : words) ops_.push_back(write64(target(word.word), word.value));
  tell(peer);
  operate(stream);
}

void CudaRequestEngine::store(std::span<const RequestWord> words) {
  enter();
  for (const RequestWord& word : words) {
    ops_.push_back(write64(reinterpret_cast<CUdeviceptr>(word.word), word.value));
  }
  operate(words_->handle());
}

void CudaRequestEngine::prepare_launches(std::shared_ptr<void> reached) {
  const CaptureGuard relaxed;
  exchange_ = std::make_unique<PtxKernel>(
      device_->gpu().context(), kExchangePtx[0].ptx, kExchangePtx[0].name,
      "exchanges need a GPU of compute capability 8.0 or more, and the driver's own "
      "compiler of PTX, libnvidia-ptxjitcompiler");
  std::array<std::byte, 1024> nothing{};
  exchange_->warm_up(kExchangeThreads, nothing.data());
  launches_ = device_->gpu().stream();
  launched_.emplace(device_->gpu().event());
  reached_ = std::move(reached);
}

void CudaRequestEngine::launch(uintptr_t given, void* arguments) {
  if (given != 0 && executor_->capture_of({&given, 1}) != 0) {
    fail(Code::unsupported,
         "all_to_all_v with counts on the device: its launches are numbered, so ",
         "that no graph can have them; call it outside of the capture");
  }
  const ContextGuard current = device_->current();
  void* pointers[] = {arguments};
  const CUstream stream = given != 0 ? reinterpret_cast<CUstream>(given) : launches_->handle();
  check(Driver::get().cuLaunchKernel(exchange_->function(), 1 + executor_->options().sms, 1, 1,
                                     kExchangeThreads, 1, 1, 0, stream, pointers, nullptr),
        "cuLaunchKernel of an exchange");
  launched_->record(stream);
}

bool CudaRequestEngine::idle() {
  enter();
  return quiet();
}

bool CudaRequestEngine::quiet() {
  const ContextGuard current = device_->current();
  return done(words_) && std::all_of(streams_.begin(), streams_.end(),
                                     [&](const PeerStream& to) { return done(to.stream); });
}

void CudaRequestEngine::prepare_parking(std::span<std::byte* const> windows) {
  const size_t streams = executor_->ranks() - size_t{1};
  executor_->take_armed(*device_, streams);
  armed_ = streams;
  for (PeerStream& to : streams_) {
    if (to.stream != nullptr) {
      to.word = std::make_unique<SignalWord>(device_, executor_->signal_words());
    }
  }
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

void CudaRequestEngine::park(Rank peer, const ParkedRequest& request) {
  enter();
  PeerStream& to = streams_[peer];
  const CUstream stream = to.stream->handle();
  const bool copied = request.signal && executor_->options().signals == SignalForm::copy_order;
  to.gate = request.gate.word;
  if (copied) ops_.push_back(write64(to.word->address(), request.signal->value));
  ops_.push_back({.operation = kOpWait64,
                  .address = reinterpret_cast<CUdeviceptr>(to.gate),
                  .value = request.gate.value,
                  .flags = kWaitGeq});
  operate(stream);
  if (request.copy.bytes > 0) copy(stream, {&request.copy, 1});
  if (copied) {
    check(Driver::get().cuMemcpyAsync(target(request.signal->word), to.word->address(),
                                      sizeof(uint64_t), stream),
          "cuMemcpyAsync of a signal");
  } else if (request.signal) {
    ops_.push_back(write64(target(request.signal->word), request.signal->value));
  }
  ops_.push_back(write64(target(request.sent.word), request.sent.value));
  tell(peer);
  operate(stream);
}

void CudaRequestEngine::write_gates(uint64_t value) {
  for (const PeerStream& to : streams_) {
    if (to.gate == nullptr) continue;
    ops_.push_back(write64(reinterpret_cast<CUdeviceptr>(to.gate), value));
  }
  operate(words_->handle());
}

// A copy that is under way would meet no memory while a twin is blanked, and the GPU would fail.
void CudaRequestEngine::recall(uint64_t held, uint64_t closed,
                               const std::function<bool()>& is_under_way) {
  const ContextGuard current = device_->current();
  const Deadline deadline = Deadline::after_s(kRunOutS);
  const auto until = [&](const auto& holds) {
    while (!holds()) {
      if (deadline.passed()) fail(Code::driver, "parked requests on a GPU did not end");
      nap(0);
    }
  };
  write_gates(held);
  until([&] { return done(words_); });
  until([&] { return !is_under_way(); });
  for (auto& [mapping, twin] : twins_) twin->blank(executor_->devices());
  write_gates(closed);
  until([&] { return quiet(); });
}

}  // namespace offcore::cuda
