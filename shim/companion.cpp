#include "shim/companion.h"

#include <unistd.h>

#include <algorithm>
#include <random>
#include <tuple>
#include <utility>

#include "core/backend/cuda/cuda.h"
#include "core/backend/cuda/facts.h"
#include "core/backend/registry.h"
#include "core/base/digest.h"
#include "core/base/env.h"
#include "core/base/place.h"
#include "core/window/socket.h"
#include "shim/library.h"
#include "shim/machine_for.h"

namespace offcore::shim {
namespace {

constexpr uint32_t kProtocol = 3;    // of what ranks tell each other
constexpr size_t kMeetingMax = 512;  // bytes of it as they meet, of as many as a job has
constexpr size_t kAgreedMax = 256;   // operations and sizes; more go by NCCL

constexpr double kReleaseS = 10;  // until what has failed is off its stream

// Of what ranks do together just after an exchange. An exchange waits as long as NCCL does, for
// ranks that are late, and for one that fails alone it ends when the others have given up.
Deadline together() { return Deadline::after_s(std::stod(env("OFFCORE_TIMEOUT_S"))); }

// The same line once a process: programs have many communicators.
void tell_once(const std::string& text) {
  static std::mutex mutex;
  static auto* const told = new std::set<std::string>();
  const std::scoped_lock lock(mutex);
  if (told->insert(text).second) tell(text);
}

int asked(const char* what, NcclResult (*function)(Comm, int*), Comm comm) {
  int value = -1;
  const NcclResult result = function == nullptr ? kNcclInvalidUsage : function(comm, &value);
  if (result != kNcclSuccess || value < 0) fail(Code::invalid, "NCCL's ", what, " gives ", result);
  return value;
}

std::string version_text(int version) {
  return cat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

}  // namespace

uint64_t& driver_of_thread() {
  thread_local uint64_t number = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  return number;
}

std::shared_ptr<Communicator> Companion::communicator() const {
  const std::scoped_lock lock(state_mutex_);
  return communicator_;
}

void Companion::set_communicator(std::shared_ptr<Communicator> made) {
  const std::scoped_lock lock(state_mutex_);
  communicator_.swap(made);
}

std::shared_ptr<Pending> Companion::exchange_last(std::shared_ptr<Pending> next) {
  const std::scoped_lock lock(state_mutex_);
  last_.swap(next);
  return next;
}

void Companion::settle_last() {
  if (const auto last = exchange_last(nullptr)) last->wait(Deadline::never());
}

// The driver tells nobody that a stream waits in vain: whoever waits for it lets it go.
void Companion::release() {
  try {
    if (const auto last = exchange_last(nullptr)) last->wait(Deadline::after_s(kReleaseS));
  } catch (const Error&) {  // of all those failures this is no other one
  }
}

std::optional<NcclResult> Companion::run(const Call& call) {
  const std::scoped_lock lock(mutex_);
  try {
    learn();
    const cuda::ContextGuard here = home_->current();
    if (captured(call)) return std::nullopt;  // NCCL's kernels are faster in graphs
    meet();
    if (below(call)) return std::nullopt;
    settle();
    if (communicator() == nullptr) return std::nullopt;
    register_added();
    const Form form = in_window(call) ? Form::registered : Form::plain;
    const Rank ranks = exchange_->ranks();
    const uint64_t bytes = total_bytes(call, ranks);
    if (bytes < policy_.least(call.collective, form, gpu_, ranks)) return std::nullopt;
    const Key key = key_of(call);
    if (agreed_.count(key) > 0) {
      start(call, Deadline::never());
      return kNcclSuccess;
    }
    if (declined_.count(key) > 0 || agreed_.size() >= kAgreedMax) return std::nullopt;
    return start_first(call, key);
  } catch (const Error& error) {
    return failed_with(error, call);
  }
}

bool Companion::ready(const Call& call) {
  const std::scoped_lock lock(mutex_);
  if (standing_ == Standing::unmet) return false;
  if (below(call)) return true;
  const auto ours = communicator();
  if (ours == nullptr) return settled_;
  if (has_added()) return false;
  try {
    return agreed_.count(key_of(call)) > 0 &&
           ours->knows(request_of(call, exchange_->rank(), exchange_->ranks()));
  } catch (const Error&) {  // which run() tells
    return false;
  }
}

Stream Companion::aside() {
  const std::scoped_lock lock(mutex_);
  learn();
  const cuda::ContextGuard here = home_->current();
  if (aside_ == nullptr) aside_ = home_->stream();
  order(reinterpret_cast<cuda::CUstream>(kStreamOfThread), aside_->handle());
  return reinterpret_cast<Stream>(aside_->handle());
}

void Companion::join_aside() {
  const std::scoped_lock lock(mutex_);
  const cuda::ContextGuard here = home_->current();
  order(aside_->handle(), reinterpret_cast<cuda::CUstream>(kStreamOfThread));
}

// Makes a stream wait for another one.
void Companion::order(cuda::CUstream from, cuda::CUstream to) const {
  const cuda::CudaEvent passed = home_->event();
  passed.record(from);
  passed.enqueue_wait(to);
}

// Whether ranks that have met leave the call to NCCL.
bool Companion::below(const Call& call) const {
  return standing_ != Standing::met ||
         total_bytes(call, static_cast<Rank>(ranks_)) < policy_.floor(call.collective);
}

void Companion::learn() {
  if (home_ != nullptr) return;
  cuda::Driver::open();
  const Library& real = Library::of_process();
  ranks_ = asked("CommCount", real.CommCount, comm_);
  rank_ = asked("CommUserRank", real.CommUserRank, comm_);
  home_ = cuda::GpuContext::of(asked("CommCuDevice", real.CommCuDevice, comm_));
}

bool Companion::captured(const Call& call) const {
  int status = 0;
  cuda::check(
      cuda::Driver::get().cuStreamGetCaptureInfo(reinterpret_cast<cuda::CUstream>(call.stream),
                                                 &status, nullptr, nullptr, nullptr, nullptr),
      "cuStreamGetCaptureInfo");
  return status != cuda::kCaptureNone;
}

std::string Companion::facts() const {
  const Probe probe = probe_cuda();
  const int device = home_->device();
  const std::vector<cuda::GpuFacts> gpus = cuda::driver_facts().gpus;
  const std::vector<int>& peers = gpus[static_cast<size_t>(device)].peers;
  std::string strangers;  // visible GPUs that this one does not reach
  for (const cuda::GpuFacts& gpu : gpus) {
    const bool peer = std::count(peers.begin(), peers.end(), gpu.ordinal) > 0;
    if (gpu.ordinal != device && !peer) strangers += gpu.pci + " ";
  }
  return Packer()
      .number(driver_of_thread())
      .text(cuda::pci_address(device))
      .text(strangers)
      .text(probe.available ? "" : probe.reason)
      .bytes();
}

// Why ranks that told this as they met have nothing to settle; empty: they may. The same on all.
std::string Companion::difference(const std::vector<std::string>& told) const {
  uint64_t first_place = 0;
  uint64_t first_policy = 0;
  std::string first_gpu;
  for (size_t rank = 0; rank < told.size(); ++rank) {
    Unpacker unpacker(told[rank]);
    const auto protocol = unpacker.number<uint32_t>();
    const auto place = unpacker.number<uint64_t>();
    const auto policy = unpacker.number<uint64_t>();
    const std::string gpu(unpacker.text());
    if (!unpacker.ok() || protocol != kProtocol) {
      return cat("rank ", rank, " has another version of the shim");
    }
    if (rank == 0) std::tie(first_place, first_policy, first_gpu) = std::tie(place, policy, gpu);
    if (policy != first_policy) {
      return cat("OFFCORE_NCCL_MIN_BYTES of ranks 0 and ", rank, " differ");
    }
    if (place != first_place) return cat("ranks 0 and ", rank, " are on different hosts");
    if (gpu != first_gpu) return cat("ranks 0 and ", rank, " have different kinds of GPUs");
  }
  return "";
}

// Why ranks that told these facts cannot have a communicator; empty: they may. The same on all.
std::string Companion::obstacle(const std::vector<std::string>& told) const {
  struct Told {
    uint64_t driver;
    std::string pci, strangers, reason;
  };
  std::vector<Told> facts;
  for (const std::string& text : told) {
    Unpacker unpacker(text);
    Told one{};
    one.driver = unpacker.number<uint64_t>();
    for (std::string* part : {&one.pci, &one.strangers, &one.reason}) *part = unpacker.text();
    if (!unpacker.ok()) return cat("rank ", facts.size(), " has told too much to be sent");
    facts.push_back(std::move(one));
  }
  for (size_t rank = 0; rank < facts.size(); ++rank) {
    const Told& one = facts[rank];
    if (!one.reason.empty()) return cat("rank ", rank, ": ", one.reason);
    for (size_t peer = 0; peer < facts.size(); ++peer) {
      if (peer != rank && facts[peer].pci == one.pci) {
        return cat("ranks ", rank, " and ", peer, " share a GPU");
      }
      if (peer != rank && facts[peer].driver == one.driver) {
        return cat("one thread drives ranks ", rank, " and ", peer);
      }
      if (one.strangers.find(facts[peer].pci) != std::string::npos) {
        return cat("the GPU of rank ", rank, " has no peer access to that of rank ", peer);
      }
    }
  }
  return "";
}

// Which another thread may abort.
Exchange& Companion::exchange_in(std::unique_ptr<Exchange>& place, size_t text_max) {
  auto made = std::make_unique<Exchange>(comm_, static_cast<Rank>(rank_), static_cast<Rank>(ranks_),
                                         home_->device(), text_max);
  const std::scoped_lock lock(state_mutex_);
  if (aborted_) made->cancel();
  place = std::move(made);
  return *place;
}

void Companion::meet() {
  if (standing_ != Standing::unmet) return;
  standing_ = Standing::given_up;  // where this fails
  if (ranks_ < 2) return;
  const auto ranks = static_cast<Rank>(ranks_);
  gpu_ = cuda::device_name(home_->device());
  const std::string own =
      Packer().number(kProtocol).number(place_here()).number(policy_.digest()).text(gpu_).bytes();
  std::string why = difference(exchange_in(meeting_, kMeetingMax).all_gather(own));
  if (why.empty() && policy_.describe(gpu_, ranks).empty()) {
    why = cat("nothing is known to be faster on ", ranks, " x ", gpu_);
  }
  if (!why.empty()) return give_up(why);
  standing_ = Standing::met;
}

void Companion::settle() {
  if (std::exchange(settled_, true)) return;
  std::string why = obstacle(exchange_in(exchange_, Exchange::kTextMax).all_gather(facts()));
  if (why.empty()) why = open(home_->device(), together());
  if (!why.empty()) return give_up(why);
  const auto ranks = static_cast<Rank>(ranks_);
  if (rank_ == 0) {
    tell_once(cat(ranks, " ranks: ", policy_.describe(gpu_, ranks),
                  " by copy engines; all else by NCCL ",
                  version_text(Library::of_process().version())));
  }
}

// Makes the communicator on all ranks or on none: why not, the same on all.
std::string Companion::open(int device, const Deadline& deadline) {
  std::string why;
  std::vector<std::string> cards;  // by rank; empty: it has failed before it had one
  const Rank rank = exchange_->rank();
  const Rank ranks = exchange_->ranks();
  try {
    const Machine* const machine = machine_for(gpu_, ranks);
    if (machine == nullptr) fail(Code::unsupported, ranks, " ranks are too many");
    CudaOptions options{.devices = {device}};
    auto backend = open_backend("cuda", *machine, ranks, {rank}, {.cuda = options});
    const Bootstrap bootstrap("NCCL", rank, ranks, [&](const std::string& card, const Deadline&) {
      cards = exchange_->all_gather(card);
      if (std::count(cards.begin(), cards.end(), "") > 0) fail(Code::peer, "another rank failed");
      return cards;
    });
    auto rendezvous = Rendezvous::join(bootstrap, deadline);
    set_communicator(Communicator::create(std::move(backend), std::move(rendezvous), ranks,
                                          options.signals, deadline));
  } catch (const Error& error) {
    why = error.message();
  }
  if (cards.empty()) cards = exchange_->all_gather("");
  const auto outcomes = exchange_->all_gather(why);
  const auto first = [](const auto& found, const auto& texts) { return found - texts.begin(); };
  auto failed = first(std::find(cards.begin(), cards.end(), ""), cards);
  if (failed == ranks) {
    const auto told = [](const std::string& text) { return !text.empty(); };
    failed = first(std::find_if(outcomes.begin(), outcomes.end(), told), outcomes);
  }
  return failed == ranks ? "" : cat("rank ", failed, ": ", outcomes[static_cast<size_t>(failed)]);
}

// For good: the communicator's own ranks have all come to this.
void Companion::give_up(const std::string& why) {
  if (const auto ours = communicator()) {
    exchange_last(nullptr);
    windows_.clear();
    ours->close();
    set_communicator(nullptr);
  }
  standing_ = Standing::given_up;
  {
    const std::scoped_lock lock(state_mutex_);
    why_not_ = why;
  }
  if (rank_ == 0) tell_once(cat("everything goes by NCCL: ", why));
}

void Companion::start(const Call& call, const Deadline& deadline) {
  exchange_last(
      communicator()->start(request_of(call, exchange_->rank(), exchange_->ranks()), deadline));
  count(call, true);
}

// What has failed on all ranks has touched nothing, and NCCL can do it. Nothing is under way then.
std::optional<NcclResult> Companion::start_first(const Call& call, const Key& key) {
  settle_last();
  const std::string own = rooted_in_place(call, exchange_->rank(), exchange_->ranks()) ? "no" : "";
  const auto told = exchange_->all_gather(own);  // all have come
  if (std::count(told.begin(), told.end(), "") < std::ssize(told)) {
    if (declined_.size() < kAgreedMax) declined_.insert(key);
    return std::nullopt;
  }
  std::string why;
  std::optional<Error> failure;
  try {
    start(call, together());
  } catch (const Error& error) {
    failure = error;
    why = error.message();
  }
  const auto outcomes = exchange_->all_gather(why);
  const auto fine = std::count(outcomes.begin(), outcomes.end(), "");
  if (fine == std::ssize(outcomes)) {
    agreed_.insert(key);
    return kNcclSuccess;
  }
  const auto first = std::find_if(outcomes.begin(), outcomes.end(),
                                  [](const std::string& text) { return !text.empty(); });
  const std::string reason = cat("rank ", first - outcomes.begin(), ": ", *first);
  if (fine > 0) {  // the others have begun, and would wait for ever
    abort();
    throw Error(failure ? failure->code() : Code::peer, reason);
  }
  give_up(cat(to_string(call.collective), " of ", shown(std::get<1>(key)), ": ", reason));
  return std::nullopt;
}

NcclResult Companion::failed_with(const Error& error, const Call& call) {
  const std::string text = cat(to_string(call.collective), ": ", error.message());
  tell(text);
  const std::scoped_lock lock(state_mutex_);
  last_error_ = text;
  return result_of(error);
}

bool Companion::in_window(const Call& call) const {
  const bool all_have_one =
      call.collective == Collective::all_gather || call.collective == Collective::all_to_all ||
      call.collective == Collective::broadcast || call.collective == Collective::all_reduce;
  if (!all_have_one) return false;
  const Rank ranks = exchange_->ranks();
  const auto* const out = static_cast<const std::byte*>(call.out);
  return std::any_of(windows_.begin(), windows_.end(), [&](const Region& region) {
    return out >= region.data && out + total_bytes(call, ranks) <= region.data + region.bytes;
  });
}

void Companion::add_window(NcclWindow window, void* data, uint64_t bytes) {
  if (!policy_.any_registered()) return;
  const std::scoped_lock lock(mutex_);
  windows_.push_back({window, static_cast<std::byte*>(data), bytes});
}

bool Companion::has_added() const {
  return std::any_of(windows_.begin(), windows_.end(), [](const auto& one) { return !one.number; });
}

void Companion::register_added() {
  if (!has_added()) return;
  exchange_->all_gather("");  // all have come
  for (Region& one : windows_) {
    if (one.number) continue;
    try {
      one.number = communicator()->register_memory({{.data = one.data, .bytes = one.bytes}},
                                                   nullptr, together());
    } catch (const Error& error) {  // on all ranks alike: then it is plain memory
      if (rank_ == 0) tell(cat("a window stays NCCL's: ", error.message()));
    }
  }
  std::erase_if(windows_, [](const auto& one) { return !one.number; });
}

void Companion::deregister_window(NcclWindow window) {
  const std::scoped_lock lock(mutex_);
  const auto found = std::find_if(windows_.begin(), windows_.end(),
                                  [&](const Region& one) { return one.window == window; });
  if (found == windows_.end()) return;
  const auto ours = communicator();
  if (ours != nullptr && found->number) ours->deregister(*found->number);
  windows_.erase(found);
}

bool Companion::failed() {
  const auto ours = communicator();
  if (ours == nullptr || ours->poisoned() == 0) return false;
  release();
  return true;
}

std::string Companion::last_error() const {
  const std::scoped_lock lock(state_mutex_);
  return last_error_;
}

void Companion::finish() {
  const std::scoped_lock lock(mutex_);
  const auto ours = communicator();
  if (ours == nullptr) return;
  try {
    settle_last();
    ours->close();
  } catch (const Error& error) {
    tell(cat("the last operation of a communicator: ", error.message()));
    ours->abort();
  }
}

void Companion::abort() {
  {
    const std::scoped_lock lock(state_mutex_);
    aborted_ = true;
    for (Exchange* const one : {meeting_.get(), exchange_.get()}) {
      if (one != nullptr) one->cancel();
    }
  }
  const auto ours = communicator();
  if (ours == nullptr) return;
  ours->abort();
  release();
}

void Companion::count(const Call& call, bool taken) {
  const std::scoped_lock lock(state_mutex_);
  Count& count = counts_[static_cast<size_t>(call.collective)];
  ++(taken ? count.taken : count.forwarded);
}

std::string Companion::report() const {
  const std::scoped_lock lock(state_mutex_);
  std::string text;
  for (size_t i = 0; i < counts_.size(); ++i) {
    const auto [taken, forwarded] = counts_[i];
    if (taken + forwarded == 0) continue;
    text += cat(text.empty() ? "" : "; ", to_string(static_cast<Collective>(i)), " ", taken,
                " taken, ", forwarded, " forwarded");
  }
  if (text.empty()) text = "no collective";
  return why_not_.empty() ? text : cat(text, "; all by NCCL: ", why_not_);
}

}  // namespace offcore::shim
