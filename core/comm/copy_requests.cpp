#include "core/comm/copy_requests.h"

#include <unistd.h>

#include <algorithm>
#include <system_error>

#include "core/base/error.h"
#include "core/base/threads.h"

namespace offcore {
namespace {

// Of a line: more are launched by its thread. A stream of the driver takes 1024.
constexpr uint64_t kDirectCommands = 16;
constexpr uint64_t kAheadCommands = 512;
constexpr double kLaunchS = 30;

bool names(const CopyRequest& request, const RegisteredMemory& memory) {
  return std::any_of(request.memories.begin(), request.memories.end(),
                     [&](const auto& one) { return one.get() == &memory; });
}

// A run that has failed has ended too: whoever asks for its request is told.
bool ended(const BatchRun* run) {
  try {
    return run != nullptr && run->run->done();
  } catch (const Error&) {
    return true;
  }
}

// Throws timeout.
void wait_for_end(const BatchRun& run, const Deadline& deadline) {
  try {
    run.run->wait(deadline);
  } catch (const Error& error) {
    if (error.code() == Code::timeout) throw;
  }
}

// Whether the driver has all of this host memory in one registration.
bool pinned(uint64_t address, uint64_t bytes, int gpu) {
  int home = 0;
  try {
    home = open_pointers(gpu)->home(address, bytes, "memory", 0);
  } catch (const Error& error) {
    if (error.code() != Code::invalid) throw;
    return false;
  }
  if (home != kHostMemory) {
    fail(Code::invalid, "memory registered as the host's is on GPU ", home);
  }
  return true;
}

const char* kind_of(bool to_gpu, bool from_gpu) {
  if (to_gpu) return from_gpu ? "d2d" : "h2d";
  return "d2h";
}

}  // namespace

CopyRequests::CopyRequests(Opener open, int gpu)
    : OfProcess("the transfers"), open_(std::move(open)), gpu_(gpu) {}

CopyRequests::~CopyRequests() {
  {
    const std::scoped_lock lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  for (const auto& [key, line] : lines_) {
    if (line->thread.joinable()) line->thread.join();
  }
  for (const std::shared_ptr<CopyRequest>& request : active_) {
    if (request->run == nullptr) continue;
    try {
      request->run->run->wait(Deadline::after_s(kLaunchS));
    } catch (const Error&) {  // nobody is left to be told
    }
  }
}

std::shared_ptr<CopyRequests::Line> CopyRequests::line_of(int gpu, LineUse use) {
  const std::scoped_lock lock(opening_);
  const auto found = lines_.find({gpu, use});
  if (found != lines_.end()) return found->second;
  auto line = std::make_shared<Line>();
  line->executor = open_(gpu);
  if (use != LineUse::pinning) {  // what a first launch makes takes an idle engine
    const PlannedBatch nothing = line->executor->plan({});
    const Deadline deadline = Deadline::after_s(kLaunchS);
    line->executor->launch(nothing, {}, deadline)->run->wait(deadline);
  }
  return lines_.emplace(std::pair(gpu, use), std::move(line)).first->second;
}

// Null: others have pinned all of it, in one piece.
std::shared_ptr<void> CopyRequests::pin(uint64_t address, uint64_t bytes) {
  int gpu = 0;
  {
    const std::scoped_lock lock(opening_);
    gpu = std::max(gpu_, 0);
  }
  const std::shared_ptr<BatchExecutor> executor = line_of(gpu, LineUse::pinning)->executor;
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t first = address / page * page;
  const uint64_t last = (address + bytes + page - 1) / page * page;
  const std::scoped_lock lock(opening_);
  for (PinnedPages& pages : pins_) {
    if (pages.pin.expired()) pages.pin.reset();  // which holds what its deleter does
  }
  std::erase_if(pins_, [](const PinnedPages& pages) { return pages.registration.expired(); });
  for (const PinnedPages& pages : pins_) {
    if (pages.first >= last || first >= pages.last) continue;
    auto held = pages.pin.lock();
    if (held == nullptr) {
      fail(Code::driver,
           "the driver has not unpinned all of this memory since it was deregistered");
    }
    if (pages.first <= first && last <= pages.last) return held;
  }
  if (pinned(address, bytes, gpu)) return nullptr;
  const auto registration = std::make_shared<char>();
  auto made =
      executor->register_host(reinterpret_cast<std::byte*>(address), bytes, registration).owner;
  pins_.push_back({first, last, made, registration});
  return made;
}

std::shared_ptr<RegisteredMemory> CopyRequests::add(uint64_t address, uint64_t bytes, int home) {
  check_here();
  if (address == 0 || bytes == 0 || bytes > UINT64_MAX - address) {
    fail(Code::invalid, bytes, " bytes at address ", address, " are no memory to register");
  }
  auto memory = owned_by_process(std::make_unique<RegisteredMemory>());
  memory->home = home;
  if (home == kHostMemory) {
    memory->pin = pin(address, bytes);
    return memory;
  }
  {
    const std::scoped_lock lock(opening_);
    if (gpu_ < 0) gpu_ = home;
  }
  if (const int found = open_pointers(home)->home(address, bytes, "memory", 0); found != home) {
    fail(Code::invalid, "memory registered as GPU ", home, "'s is ",
         found == kHostMemory ? std::string("the host's") : cat("on GPU ", found));
  }
  return memory;
}

std::shared_ptr<CopyRequest> CopyRequests::find_use(const RegisteredMemory& memory) const {
  const auto uses = [&](const std::shared_ptr<CopyRequest>& request) {
    return request->state != CopyRequest::State::failed && !ended(request->run.get()) &&
           names(*request, memory);
  };
  const auto found = std::find_if(active_.begin(), active_.end(), uses);
  return found == active_.end() ? nullptr : *found;
}

void CopyRequests::remove(RegisteredMemory& memory, const Deadline& deadline) {
  check_here();
  std::unique_lock lock(mutex_);
  memory.removed = true;
  while (const std::shared_ptr<const CopyRequest> request = find_use(memory)) {
    if (deadline.passed()) fail(Code::timeout, "requests that use the memory are still under way");
    const std::shared_ptr<BatchRun> run = request->run;
    if (run == nullptr) {
      sleep(changed_, lock, deadline);
      continue;
    }
    lock.unlock();
    wait_for_end(*run, deadline);
    lock.lock();
  }
  lock.unlock();
  std::weak_ptr<void> registration;
  {
    const std::scoped_lock pins(opening_);
    const auto pages = std::find_if(pins_.begin(), pins_.end(), [&](const PinnedPages& one) {
      return memory.pin != nullptr && one.pin.lock() == memory.pin;
    });
    if (pages == pins_.end()) return;
    memory.pin.reset();
    if (!pages->pin.expired()) return;  // other registrations need it
    pages->pin.reset();                 // as above
    registration = pages->registration;
  }
  // The driver takes it back by a thread, once the device is idle.
  for (const int64_t began_ns = now_ns(); !registration.expired(); nap(now_ns() - began_ns)) {
    if (!deadline.passed()) continue;
    fail(Code::timeout, "the driver has not unpinned the memory within ",
         shown_s(deadline.wait_ns()), " s: its GPU is not idle");
  }
}

std::shared_ptr<CopyRequest> CopyRequests::prepare(RequestedCopies copies) {
  check_here();
  const bool to_gpu = copies.dst_home != kHostMemory;
  const bool from_gpu = copies.src_home != kHostMemory;
  const int gpu = to_gpu ? copies.dst_home : copies.src_home;
  if (!to_gpu && !from_gpu) {
    fail(Code::unsupported, "both sides are host memory, between which no GPU's engines copy");
  }
  if (to_gpu && from_gpu && copies.dst_home != copies.src_home) {
    fail(Code::unsupported, "copies from GPU ", copies.src_home, " to GPU ", copies.dst_home,
         ": a request stays within one GPU, or between it and the host");
  }
  BatchCall call{.entries = {.dsts = std::move(copies.dsts),
                             .srcs = std::move(copies.srcs),
                             .sizes = std::move(copies.sizes)},
                 .policy = {.bcst = false, .timed = false}};
  BatchEntries& entries = call.entries;
  if (entries.dsts.size() != entries.sizes.size() || entries.srcs.size() != entries.sizes.size()) {
    fail(Code::invalid, "a request of ", entries.dsts.size(), " destinations, ",
         entries.srcs.size(), " sources and ", entries.sizes.size(), " sizes");
  }
  locate_on_gpus(entries, gpu);
  check_kind(entries, kind_of(to_gpu, from_gpu));
  if (entries.gpus != std::vector{gpu}) {
    fail(Code::invalid, "a request of GPU ", gpu, " names memory of GPU ", entries.gpus.back());
  }
  auto request = owned_by_process(std::make_unique<CopyRequest>());
  request->line = line_of(gpu, !to_gpu    ? LineUse::store
                               : from_gpu ? LineUse::within
                                          : LineUse::load);
  request->planned = request->line->executor->plan(call);
  request->memories = std::move(copies.memories);
  return request;
}

// Launches it with the lock released meanwhile; the line is the caller's.
void CopyRequests::launch(CopyRequest& request, std::unique_lock<std::mutex>& lock) {
  Line& line = *request.line;
  line.busy = true;
  request.state = CopyRequest::State::launching;
  lock.unlock();
  std::shared_ptr<BatchRun> run;
  std::optional<Error> error;
  try {
    run = line.executor->launch(request.planned, {}, Deadline::after_s(kLaunchS));
  } catch (const Error& refusal) {
    error = refusal;
  } catch (const std::exception& refusal) {  // an exception that leaves a thread ends the process
    error.emplace(Code::memory, refusal.what());
  }
  lock.lock();
  line.busy = false;
  request.state = error ? CopyRequest::State::failed : CopyRequest::State::launched;
  request.run = std::move(run);
  request.error = std::move(error);
  if (!request.error) line.commands += request.planned.commands;
  changed_.notify_all();
}

// The thread of a line.
void CopyRequests::serve(Line& line) {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closing_ || (!line.queue.empty() && !line.busy); });
    if (closing_) return;
    CopyRequest& request = *line.queue.front();
    line.queue.pop_front();
    launch(request, lock);
  }
}

void CopyRequests::post(CopyRequest& request) {
  check_here();
  std::unique_lock lock(mutex_);
  if (request.state != CopyRequest::State::idle) {
    fail(Code::invalid, "the request is under way: post it again once it is done");
  }
  for (const auto& memory : request.memories) {
    if (memory->removed) fail(Code::invalid, "memory of the request has been deregistered");
  }
  Line& line = *request.line;
  active_.insert(request.shared_from_this());
  const bool direct = !line.busy && line.queue.empty() &&
                      request.planned.commands <= kDirectCommands &&
                      line.commands <= kAheadCommands;
  if (direct) {
    launch(request, lock);
    if (!request.error) return;
    const Error error = *request.error;
    end(request);
    throw Error(error);
  }
  try {
    if (!line.thread.joinable()) {
      const SignalsBlocked blocked;
      line.thread = std::thread([this, &line] { serve(line); });
    }
  } catch (const std::system_error& error) {
    end(request);
    fail(Code::driver, "cannot start the thread that launches requests: ", error.what());
  }
  request.state = CopyRequest::State::queued;
  line.queue.push_back(&request);
  lock.unlock();  // so that the thread does not wake for the lock
  changed_.notify_all();
}

// It is no longer under way. With the mutex held.
void CopyRequests::end(CopyRequest& request) {
  if (request.state == CopyRequest::State::launched)
    request.line->commands -= request.planned.commands;
  request.state = CopyRequest::State::idle;
  request.run.reset();
  request.error.reset();
  std::erase_if(active_, [&](const auto& one) { return one.get() == &request; });
}

bool CopyRequests::done(CopyRequest& request) {
  check_here();
  std::unique_lock lock(mutex_);
  if (request.state == CopyRequest::State::idle) return true;
  if (request.state == CopyRequest::State::failed) {
    const Error error = *request.error;
    end(request);
    throw Error(error);
  }
  if (request.run == nullptr) return false;
  try {  // asking the run itself would wait for who launches on its line
    if (!request.run->run->done()) return false;
  } catch (const Error&) {
    end(request);
    throw;
  }
  end(request);
  return true;
}

void CopyRequests::cancel(CopyRequest& request, const Deadline& deadline) {
  check_here();
  std::unique_lock lock(mutex_);
  if (request.state == CopyRequest::State::queued) {
    std::erase(request.line->queue, &request);
    end(request);
    changed_.notify_all();
  }
  if (!sleep_until(changed_, lock, deadline,
                   [&] { return request.state != CopyRequest::State::launching; })) {
    fail(Code::timeout, "the request is still being launched");
  }
  const std::shared_ptr<BatchRun> run = request.run;
  if (run != nullptr) {
    lock.unlock();
    wait_for_end(*run, deadline);
    lock.lock();
  }
  if (request.state != CopyRequest::State::idle) end(request);
}

}  // namespace offcore
