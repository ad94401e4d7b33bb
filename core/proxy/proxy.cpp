#include "core/proxy/proxy.h"

#include <algorithm>
#include <bit>
#include <tuple>
#include <utility>

#include "core/base/threads.h"
#include "core/proxy/control.h"
#include "core/proxy/decode.h"
#include "core/proxy/endings.h"
#include "core/proxy/host_calls.h"

namespace offcore::proxy {
namespace {

constexpr uint64_t kChunkMin = 16;
constexpr uint32_t kSlotsMin = 2 * kGroupWordsMax;
constexpr uint32_t kSlotsMax = 1 << 20;
constexpr size_t kCopiesMax = 128;  // of a submission
constexpr int64_t kLookNs = 2'000'000;
constexpr int64_t kSeenNs = 1'000'000'000;

// The thread shares two cores with those that it serves, or has one of many.
int64_t spin_ns_of(double spin_s) {
  if (spin_s >= 0) return static_cast<int64_t>(spin_s * 1e9);
  return usable_cores() >= 8 ? 100'000'000 : 0;
}

}  // namespace

ProxyOptions settled(ProxyOptions options, const std::vector<BufferPlace>& buffers, Rank ranks) {
  if (ranks > kRanksMax) {
    fail(Code::invalid, "requests: ", ranks, " ranks, a request names ", kRanksMax, " at most");
  }
  if (buffers.empty() || buffers.size() > kBuffersMax) {
    fail(Code::invalid, "requests: ", buffers.size(), " buffers, 1 to ", kBuffersMax,
         " can be registered");
  }
  if (!std::has_single_bit(options.slots) || options.slots < kSlotsMin ||
      options.slots > kSlotsMax) {
    fail(Code::invalid, "requests: a ring of ", options.slots, " slots; it must be a power of two ",
         "from ", kSlotsMin, " to ", kSlotsMax);
  }
  if (!(options.spin_s <= 1e6)) {
    fail(Code::invalid, "requests: spin is ", options.spin_s, " s; it must be at most 1e6 s");
  }
  if (!(options.limit_s > 0 && options.limit_s <= 1e6)) {
    fail(Code::invalid, "requests: a limit of ", options.limit_s, " s; it must be above 0 s");
  }
  uint64_t most = 0;
  uint64_t all = 0;  // every place and size is a multiple of its lowest bit
  for (const BufferPlace& buffer : buffers) {
    most = std::max(most, buffer.bytes);
    all |= buffer.bytes;
  }
  if (most > kOffsetMax + 1) {
    fail(Code::invalid, "requests: a buffer of ", most, " bytes; a request reaches ",
         kOffsetMax + 1);
  }
  const bool chosen = options.chunk_bytes != 0;
  if (!chosen) {
    options.chunk_bytes = kChunkMin;
    while (most / options.chunk_bytes > kChunksMax) options.chunk_bytes *= 2;
  }
  if (!std::has_single_bit(options.chunk_bytes) || options.chunk_bytes < kChunkMin) {
    fail(Code::invalid, "requests: chunks of ", options.chunk_bytes,
         " bytes; it must be a power of two from ", kChunkMin);
  }
  if (most / options.chunk_bytes > kChunksMax) {
    fail(Code::invalid, "requests: a buffer of ", most, " bytes has more than ", kChunksMax,
         " chunks of ", options.chunk_bytes, " bytes: choose larger chunks");
  }
  if (all % options.chunk_bytes != 0) {
    fail(Code::invalid, "requests: every buffer must be whole chunks of ", options.chunk_bytes,
         " bytes");
  }
  check_schedule(options, buffers, ranks);
  return options;
}

RequestProxy::RequestProxy(Backend& backend, Rank rank, std::shared_ptr<Window> control,
                           std::vector<BufferPlace> buffers, const ProxyOptions& options,
                           Poisoned poisoned, std::shared_ptr<void> keep)
    : OfProcess("the engine for requests"),
      rank_(rank),
      options_(options),
      buffers_(std::move(buffers)),
      control_(std::move(control)),
      poisoned_(std::move(poisoned)),
      keep_(std::move(keep)),
      host_(backend.allocate_host(kSlots + 8 * uint64_t{options.slots})),
      reader_(reinterpret_cast<const Word*>(host_.data + kSlots),
              static_cast<unsigned>(std::countr_zero(options.slots))),
      queues_(control_->ranks()) {
  RequestEngines* engines = backend.capabilities().request_engines;
  if (engines == nullptr) {
    fail(Code::unsupported, "this backend has no engine that answers requests of kernels");
  }
  engine_ = engines->open_requests(rank);
  if (options_.exchanges) {
    using Reached = std::tuple<std::shared_ptr<Window>, std::vector<BufferPlace>, Share>;
    engine_->prepare_launches(std::make_shared<Reached>(control_, buffers_, host_));
  }
  lay_port();
  lay_schedule();
  const SignalsBlocked blocked;
  thread_ = std::thread([this] { run(); });
}

RequestProxy::~RequestProxy() {
  try {
    stop(Deadline::after_s(kDrainS));
  } catch (const Error&) {
  }
  if (thread_.joinable()) thread_.join();
  if (exchanger_.joinable()) exchanger_.join();  // it has been told
}

std::byte* RequestProxy::control(Rank rank, uint64_t offset) const {
  return control_->base(rank) + offset;
}

std::byte* RequestProxy::port_address() const { return control(rank_, kPort); }

void RequestProxy::lay_port() {
  const auto words = [&](uint64_t offset) {
    return reinterpret_cast<Word*>(control(rank_, offset));
  };
  const auto shared = [&](uint64_t offset) { return reinterpret_cast<Word*>(host_.data + offset); };
  port_ = {.slots = shared(kSlots),
           .tail = words(kTail),
           .head = words(kHead),
           .taken = shared(kTaken),
           .sent = words(kSent),
           .received = words(kReceived),
           .fault = words(kFault),
           .fault_here = shared(kFaultHere),
           .complaints = reinterpret_cast<unsigned*>(shared(kComplaints)),
           .start = nullptr,
           .schedule = nullptr,
           .limit_ns = static_cast<Word>(options_.limit_s * 1e9),
           .slots_log2 = static_cast<unsigned>(std::countr_zero(options_.slots)),
           .rank = rank_,
           .ranks = control_->ranks(),
           .buffers = static_cast<unsigned>(buffers_.size()),
           .first = {},
           .period = {}};
}

void RequestProxy::run() {
  const int64_t spin_ns = spin_ns_of(options_.spin_s);
  int64_t idle_since_ns = now_ns();
  int64_t looked_ns = idle_since_ns;
  int64_t stop_ns = idle_since_ns;  // when it was to go on for the last time
  uint32_t turns = 0;
  bool worked = false;  // since it was idle
  while (!ended_) {
    try {
      const bool busy = turn();
      if (ended_) break;
      worked |= busy;
      if (busy && ++turns % 256 != 0) continue;
      const int64_t now = now_ns();
      if (std::exchange(worked, false)) idle_since_ns = now;
      if (now - looked_ns > kLookNs) {
        look_around();
        looked_ns = now;
        if (!stopping_.load(std::memory_order_acquire)) stop_ns = now;
      }
      if (!ended_ && now - stop_ns > static_cast<int64_t>(kDrainS * 1e9)) give_up_stop();
      if (!busy && !ended_) rest(now - idle_since_ns, spin_ns);
    } catch (const Error& error) {
      end(error.code() == Code::invalid ? kInvalid : kBroken, error);
    }
  }
  over_.store(true, std::memory_order_release);
}

void RequestProxy::rest(int64_t idle_ns, int64_t spin_ns) {
  const bool stopping = stopping_.load(std::memory_order_acquire);
  if (stopping || asked_.load(std::memory_order_acquire)) {
    const bool done = all_done();
    if (done) settled_ = reader_.position();
    if (stopping && done) return end(kStopped, std::nullopt);
  }
  if (idle_ns < spin_ns) {
    pause_briefly();
  } else {
    nap(idle_ns - spin_ns);
  }
}

void RequestProxy::give_up_stop() {
  end(kBroken, Error(Code::driver, cat("rank ", rank_, ": requests did not end within ", kDrainS,
                                       " s after stop")));
}

// Takes what has come and submits it. Whether there was anything.
bool RequestProxy::turn() {
  if (port_.start != nullptr) return park();
  Word words[2] = {};
  const Word before = reader_.position();
  while (waiting_ < options_.slots && reader_.take(words) != 0) {
    accept(words);
  }
  const Word position = reader_.position();
  if (position != before) {
    HostWords::store(reinterpret_cast<Word*>(host_.data + kTaken), position);
  }
  bool submitted = false;
  for (Rank peer = 0; waiting_ > 0 && peer < queues_.size(); ++peer) {
    if (queues_[peer].waiting == 0 || engine_->room(peer) == 0) continue;
    submit(peer, queues_[peer]);
    submitted = true;
  }
  if (position - refreshed_ >= options_.slots / 4) {
    const RequestWord head{control(rank_, kHead), position};
    engine_->store({&head, 1});
    refreshed_ = position;
  }
  return submitted || position != before;
}

void RequestProxy::accept(const Word (&words)[2]) {
  const DecodedRequest request =
      decode(words, rank_, control_->ranks(), options_.chunk_bytes, buffers_);
  PeerQueue& queue = queues_[request.peer];
  ++queue.waiting;
  queue.position = reader_.position();
  ++waiting_;
  counts_[0].fetch_add(1, std::memory_order_relaxed);
  if (request.copy.bytes > 0) add_copy(queue, request.peer, request.copy);
  if (request.signals()) {
    ++queue.signals[request.dst];
    queue.signalled |= uint64_t{1} << request.dst;
    counts_[1].fetch_add(1, std::memory_order_relaxed);
  }
}

void RequestProxy::add_copy(PeerQueue& queue, Rank peer, const RequestCopy& copy) {
  counts_[4].fetch_add(copy.bytes, std::memory_order_relaxed);
  if (!queue.copies.empty() && extend(queue.copies.back(), copy)) return;
  if (queue.copies.size() == kCopiesMax && engine_->room(peer) > 0) {
    engine_->submit(peer, queue.copies, {});
    counts_[2].fetch_add(queue.copies.size(), std::memory_order_relaxed);
    counts_[3].fetch_add(1, std::memory_order_relaxed);
    queue.copies.clear();
  }
  queue.copies.push_back(copy);
}

void RequestProxy::submit(Rank peer, PeerQueue& queue) {
  std::array<RequestWord, kBuffersMax + 1> words;
  size_t count = 0;
  for (uint64_t left = queue.signalled; left != 0; left &= left - 1) {
    const auto buffer = static_cast<unsigned>(std::countr_zero(left));
    words[count++] = {control(peer, received_from(rank_) + 8 * uint64_t{buffer}),
                      queue.signals[buffer]};
  }
  words[count++] = {control(rank_, kSent + 8 * uint64_t{peer}), queue.position};
  engine_->submit(peer, queue.copies, {words.data(), count});
  counts_[2].fetch_add(queue.copies.size(), std::memory_order_relaxed);
  counts_[3].fetch_add(1, std::memory_order_relaxed);
  queue.copies.clear();
  queue.signalled = 0;
  waiting_ -= std::exchange(queue.waiting, 0);
}

// What comes seldom: a rank has died, or a producer complains.
void RequestProxy::look_around() {
  if (const uint32_t lost = poisoned_(); lost != 0) {
    end(kPeerLost, peer_lost(static_cast<Rank>(lost - 1)));
    return;
  }
  engine_->idle();  // a device that has failed says so
  if (complained(kInvalid)) {
    end(kInvalid, not_registered(rank_));
  } else if (complained(kFull)) {
    end(kFull, no_room(rank_, options_.limit_s));
  } else if (complained(kTimeout)) {
    {
      const std::scoped_lock lock(mutex_);
      late_ = true;
    }
    HostWords::store(&port_.complaints[kTimeout], 0u);
  }
}

bool RequestProxy::complained(PortFault fault) const {
  return HostWords::load(&port_.complaints[fault]) != 0;
}

bool RequestProxy::all_done() {
  if (port_.start != nullptr) return all_started_ended();
  return waiting_ == 0 && engine_->idle();
}

void RequestProxy::end(PortFault fault, std::optional<Error> error) {
  ended_ = true;
  {
    const std::scoped_lock lock(mutex_);
    if (error && !error_) error_ = std::move(error);
  }
  HostWords::store(reinterpret_cast<Word*>(host_.data + kFaultHere), Word{fault});
  HostWords::store(reinterpret_cast<Word*>(host_.data + kTaken), kClosed);
  std::vector<RequestWord> words;
  for (Rank rank = 0; rank < queues_.size(); ++rank) {
    words.push_back({control(rank, kFault + 8 * uint64_t{rank_}), fault});
  }
  words.push_back({control(rank_, kHead), kClosed});
  try {
    engine_->store(words);
    if (port_.start != nullptr) {
      recall();  // kernels that wait have been told
    }
  } catch (const Error& failure) {  // of a device that has failed: whoever waits there looks here
    const std::scoped_lock lock(mutex_);
    if (!error_) error_ = failure;
  }
}

void RequestProxy::drain(const Deadline& deadline) {
  Word tail = 0;
  control_->read(&tail, rank_, kTail, sizeof tail);
  const bool armed = port_.start != nullptr;
  while (armed ? !all_started_ended() : settled_ < tail) {
    check();
    asked_ = !armed;  // also where another drain has just ended
    if (deadline.passed()) {
      fail(Code::timeout, "rank ", rank_, ": requests had not ended within ",
           shown_s(deadline.wait_ns()), " s");
    }
    deadline.listen();
    nap(0);
  }
  asked_ = false;
  check_engine();
}

void RequestProxy::stop(const Deadline& deadline) {
  stopping_ = true;
  while (!over_.load(std::memory_order_acquire)) {
    if (deadline.passed()) {
      fail(Code::timeout, "rank ", rank_, ": requests had not ended within ",
           shown_s(deadline.wait_ns()), " s");
    }
    deadline.listen();
    nap(1'000'000);
  }
}

void RequestProxy::check() {
  // A kernel's complaint becomes an error once the thread has seen it.
  const Deadline seen = Deadline::after_ns(kSeenNs);
  const auto unseen = [&] {
    return complained(kInvalid) || complained(kFull) || complained(kTimeout);
  };
  while (unseen() && !over_ && !seen.passed()) nap(0);
  check_engine();
  const std::scoped_lock lock(mutex_);
  if (std::exchange(late_, false)) fail_late(rank_);
  if (over_) fail_stopped();
}

void RequestProxy::check_engine() {
  const std::scoped_lock lock(mutex_);
  if (error_) throw Error(*error_);
}

ProxyStats RequestProxy::stats() const {
  if (port_.start != nullptr) return parked_stats();
  return {.requests = counts_[0],
          .signals = counts_[1],
          .copies = counts_[2],
          .batches = counts_[3],
          .bytes = counts_[4]};
}

}  // namespace offcore::proxy
