#include "core/proxy/virtual.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

#include "core/base/error.h"
#include "core/proxy/endings.h"

namespace offcore::proxy {
namespace {

constexpr size_t kLanesMax = 32;

bool phantom_in(const std::vector<BufferPlace>& buffers) {
  return std::any_of(buffers.begin(), buffers.end(),
                     [](const BufferPlace& buffer) { return buffer.window->phantom(); });
}

VirtualTime& time_of(Backend& backend) {
  VirtualTime* const time = backend.capabilities().virtual_time;
  if (time == nullptr) fail(Code::unsupported, "requests: this backend's time is not virtual");
  if (time->plants_faults()) {
    fail(Code::unsupported, "requests: planted faults are not simulated in them");
  }
  return *time;
}

}  // namespace

VirtualEngine virtual_engine(std::string_view name, bool scheduled) {
  if (name == "auto") return scheduled ? VirtualEngine::armed : VirtualEngine::proxy;
  if (name != "stores" && name != "device") {
    fail(Code::invalid, "requests: engine ", name, ": it must be auto, stores or device");
  }
  if (scheduled) fail(Code::invalid, "requests: engine ", name, " has no schedule");
  return name == "stores" ? VirtualEngine::stores : VirtualEngine::device;
}

VirtualRequests::VirtualRequests(Backend& backend, Rank ranks, std::vector<BufferPlace> buffers,
                                 const ProxyOptions& options, VirtualEngine engine,
                                 RequestProxy::Poisoned poisoned, std::shared_ptr<void> keep)
    : machine_(backend.machine()),
      cost_(machine_.requests),
      time_(time_of(backend)),
      ranks_(ranks),
      buffers_(std::move(buffers)),
      options_(options),
      engine_(engine),
      poisoned_(std::move(poisoned)),
      keep_(std::move(keep)),
      phantom_(phantom_in(buffers_)),
      events_(machine_, ranks, uint32_t{ranks} * ranks, [this] { return time_.draw(); }) {
  if (cost_.push_ns < 0) {
    fail(Code::unsupported, "requests: machine ", machine_.name,
         " does not say what they cost: ", "its file has no section `requests`");
  }
  if (options_.exchanges) {
    fail(Code::unsupported,
         "counts on the device: no engine for them is simulated; host and cuda have one");
  }
  if (engine_ == VirtualEngine::armed && ranks_ > RequestEngine::kArmedStreamsMax + 1) {
    fail(Code::unsupported, "schedule: ", ranks_ - 1, " peers, ", RequestEngine::kArmedStreamsMax,
         " are the most that an armed engine has");
  }
  for (Rank rank = 0; rank < ranks_; ++rank) {
    ends_.push_back(std::make_unique<VirtualEnd>());
    lay(rank);
  }
}

void VirtualRequests::lay(Rank rank) {
  VirtualEnd& end = *ends_[rank];
  end.slots.resize(options_.slots);
  end.received.resize(size_t{kRanksMax} * kSignalStride);
  end.queues.resize(ranks_);
  const auto log2 = static_cast<unsigned>(std::countr_zero(options_.slots));
  end.reader.emplace(end.slots.data(), log2);
  end.port.slots = end.slots.data();
  end.port.tail = &end.tail;
  end.port.head = &end.head;
  end.port.taken = &end.taken;
  end.port.sent = end.sent.data();
  end.port.received = end.received.data();
  end.port.fault = end.fault.data();
  end.port.fault_here = &end.fault_here;
  end.port.complaints = end.complaints.data();
  end.port.limit_ns = static_cast<Word>(options_.limit_s * 1e9);
  end.port.slots_log2 = log2;
  end.port.rank = rank;
  end.port.ranks = ranks_;
  end.port.buffers = static_cast<unsigned>(buffers_.size());
  if (engine_ != VirtualEngine::armed) return;
  end.schedule = lay_table(end.port, options_, buffers_, [&](const DecodedRequest& one) {
    end.queues[one.peer].planned.push_back(one);
  });
  end.port.start = end.start.data();
  end.port.schedule = end.schedule.data();
}

double VirtualRequests::run(std::vector<VirtualThread> threads) {
  if (std::exchange(running_, true)) fail(Code::invalid, "requests: a run is under way already");
  const std::shared_ptr<void> over(nullptr, [this](void*) {
    running_ = false;
    threads_.clear();
  });
  if (const uint32_t lost = poisoned_(); lost != 0) {
    end_all(kPeerLost, peer_lost(static_cast<Rank>(lost - 1)));
  }
  began_ns_ = ended_ns_ = events_.now_ns();
  threads_.clear();
  for (VirtualThread& thread : threads) threads_.push_back({.next = std::move(thread)});
  try {
    for (uint32_t i = 0; i < threads_.size(); ++i) resume(i, 0, {});
    events_.run();
  } catch (...) {  // of a thread: what it would have done is unknown
    events_.clear();
    for (const auto& end : ends_) end->waiters.clear(), end->full.clear();
    end_all(kStopped, Error(Code::invalid, "requests: a simulated thread failed"));
    time_.pass(events_.now_ns() - began_ns_);
    throw;
  }
  time_.pass(events_.now_ns() - began_ns_);
  return ended_ns_ - began_ns_;
}

void VirtualRequests::resume(uint32_t thread, double ns, VirtualReply reply) {
  threads_[thread].waits = 0;
  events_.after(ns, [this, thread, reply = std::move(reply)]() mutable {
    reply.now_ns = events_.now_ns() - began_ns_;
    step(thread, reply);
  });
}

void VirtualRequests::step(uint32_t thread, const VirtualReply& reply) {
  std::vector<VirtualCall> calls = threads_[thread].next(reply);
  ended_ns_ = std::max(ended_ns_, events_.now_ns());
  if (calls.empty()) return;
  const VirtualCall& first = calls[0];
  if (std::any_of(calls.begin(), calls.end(),
                  [&](const VirtualCall& call) { return call.of.get() != this; })) {
    fail(Code::invalid, "requests: a simulated thread yielded a call of another Requests' port; ",
         "pass calls of host_port() of those that run it");
  }
  const bool pushes = std::all_of(calls.begin(), calls.end(), [&](const VirtualCall& call) {
    return call.kind == VirtualCallKind::push && call.rank == first.rank;
  });
  if (calls.size() > kLanesMax || (calls.size() > 1 && !pushes)) {
    fail(Code::invalid, "requests: ", calls.size(), " calls at once: up to ", kLanesMax,
         " pushes of one rank can be, as lanes of a warp");
  }
  switch (first.kind) {
    case VirtualCallKind::push:
      return push(thread, std::move(calls));
    case VirtualCallKind::work:
      return resume(thread, first.work_ns, {});
    case VirtualCallKind::wait:
    case VirtualCallKind::wait_sent:
    case VirtualCallKind::flush:
      return wait(thread, first);
  }
}

// Whether the ring takes them, as far as the rank sees. Of one that has ended ring.h says why not.
bool VirtualRequests::fits(const VirtualEnd& end, const std::vector<VirtualCall>& calls) const {
  if (engine_ == VirtualEngine::armed || end.ended) return true;
  const Word words =
      std::accumulate(calls.begin(), calls.end(), Word{0},
                      [](Word sum, const VirtualCall& one) { return sum + one.words; });
  return end.tail + words - end.head <= options_.slots;
}

void VirtualRequests::push(uint32_t thread, std::vector<VirtualCall> calls) {
  const Rank rank = calls[0].rank;
  VirtualEnd& end = *ends_[rank];
  if (end.full.empty() && fits(end, calls)) return pushed(thread, calls);
  const uint64_t number = threads_[thread].waits = ++waits_;
  end.full.push_back({thread, std::move(calls), number});
  events_.unless([this, thread, number] { return threads_[thread].waits != number; },
                 static_cast<double>(end.port.limit_ns),
                 [this, thread, rank, number] { give_up(thread, rank, number); });
}

// Found no room for the limit.
void VirtualRequests::give_up(uint32_t thread, Rank rank, uint64_t number) {
  VirtualEnd& here = *ends_[rank];
  const auto full = std::find_if(here.full.begin(), here.full.end(),
                                 [&](const VirtualPush& one) { return one.number == number; });
  VirtualReply reply;
  for (const VirtualCall& call : full->calls) reply.tickets.push_back({0, call.peer, kFull});
  reply.fault = kFull;
  here.full.erase(full);
  resume(thread, 0, std::move(reply));
  end(rank, kFull, no_room(rank, options_.limit_s));
}

void VirtualRequests::pushed(uint32_t thread, const std::vector<VirtualCall>& calls) {
  const Rank rank = calls[0].rank;
  VirtualEnd& end = *ends_[rank];
  const Word before = end.tail;
  threads_[thread].waits = 0;
  VirtualReply reply;
  for (const VirtualCall& call : calls) reply.tickets.push_back(call.push(end.port));
  const Word words = end.tail - before;
  if (engine_ == VirtualEngine::armed) {
    for (const PutTicket& ticket : reply.tickets) {
      if (ticket.fault != kNone) continue;
      events_.after(cost_.push_ns,
                    [this, rank, ticket] { gate(rank, ticket.peer, ticket.position); });
    }
  } else if (words > 0 && !end.ended) {
    events_.after(cost_.push_ns + reach_ns(), [this, rank, words] { arrived(rank, words); });
  }
  complain(rank);
  if (calls[0].kind == VirtualCallKind::push)
    return resume(thread, cost_.push_ns, std::move(reply));
  const PutTicket ticket = reply.tickets[0];
  if (ticket.fault != kNone) {
    return resume(thread, cost_.push_ns, {.tickets = {}, .fault = ticket.fault});
  }
  events_.after(cost_.push_ns, [this, thread, rank, ticket, limit_ns = calls[0].limit_ns] {
    await(thread, rank, {thread, &ends_[rank]->sent[ticket.peer], ticket.position, rank, 0},
          limit_ns);
  });
}

void VirtualRequests::wait(uint32_t thread, const VirtualCall& call) {
  VirtualEnd& end = *ends_[call.rank];
  const RequestPort& port = end.port;
  const bool registered = call.peer < ranks_ && call.buffer < buffers_.size();
  if (call.kind == VirtualCallKind::wait) {
    if (registered) {
      const Word* const word = &port.received[call.peer * kSignalStride + call.buffer];
      return await(thread, call.rank, {thread, word, call.count, static_cast<Rank>(call.peer), 0},
                   call.limit_ns);
    }
  } else if (call.kind == VirtualCallKind::wait_sent) {
    const PutTicket& ticket = call.ticket;
    if (ticket.fault != kNone) return resume(thread, 0, {.tickets = {}, .fault = ticket.fault});
    if (ticket.peer < ranks_) {
      return await(thread, call.rank,
                   {thread, &port.sent[ticket.peer], ticket.position, call.rank, 0}, call.limit_ns);
    }
  } else if (registered && call.peer != call.rank) {
    if (port.start != nullptr) {
      return await(thread, call.rank,
                   {thread, &port.sent[call.peer], port.start[call.peer], call.rank, 0},
                   call.limit_ns);
    }
    VirtualCall nothing = call;
    nothing.words = 1;
    nothing.push = [peer = call.peer](const RequestPort& at) {
      return HostCalls::put(at, peer, 0, 0, 0, 0);
    };
    return push(thread, {nothing});
  }
  const unsigned fault = HostCalls::flush(port, port.ranks);  // refuses, and complains
  complain(call.rank);
  resume(thread, 0, {.tickets = {}, .fault = fault});
}

void VirtualRequests::await(uint32_t thread, Rank rank, const VirtualWaiter& waiter,
                            Word limit_ns) {
  VirtualEnd& end = *ends_[rank];
  if (*waiter.word >= waiter.count) return resume(thread, cost_.see_ns, {});
  if (const unsigned fault = fault_of(end, waiter.peer); fault != kNone) {
    return resume(thread, cost_.see_ns, {.tickets = {}, .fault = fault});
  }
  const uint64_t number = threads_[thread].waits = ++waits_;
  end.waiters.push_back(waiter);
  end.waiters.back().number = number;
  events_.unless([this, thread, number] { return threads_[thread].waits != number; },
                 static_cast<double>(limit_ns == 0 ? end.port.limit_ns : limit_ns),
                 [this, thread, rank, number] {
                   VirtualEnd& here = *ends_[rank];
                   std::erase_if(here.waiters,
                                 [&](const VirtualWaiter& one) { return one.number == number; });
                   here.late = true;
                   resume(thread, 0, {.tickets = {}, .fault = kTimeout});
                 });
}

unsigned VirtualRequests::fault_of(const VirtualEnd& end, Rank peer) const {
  const Word own = end.fault[end.port.rank];
  return static_cast<unsigned>(own != kNone ? own : end.fault[peer]);
}

// Words of the rank have changed: who waits for them goes on.
void VirtualRequests::look(Rank rank) {
  VirtualEnd& end = *ends_[rank];
  for (size_t i = 0; i < end.waiters.size();) {
    const VirtualWaiter waiter = end.waiters[i];
    const bool ready = *waiter.word >= waiter.count;
    const unsigned fault = ready ? unsigned{kNone} : fault_of(end, waiter.peer);
    if (!ready && fault == kNone) {
      ++i;
      continue;
    }
    end.waiters.erase(end.waiters.begin() + static_cast<ptrdiff_t>(i));
    resume(waiter.thread, cost_.see_ns, {.tickets = {}, .fault = fault});
  }
  while (!end.full.empty() && fits(end, end.full.front().calls)) {
    const VirtualPush one = std::move(end.full.front());
    end.full.pop_front();
    pushed(one.thread, one.calls);
  }
}

// What ring.h has found wrong with a thread's call ends the engine.
void VirtualRequests::complain(Rank rank) {
  if (ends_[rank]->complaints[kInvalid] == 0) return;
  end(rank, kInvalid, not_registered(rank));
}

void VirtualRequests::end(Rank rank, PortFault fault, std::optional<Error> error) {
  VirtualEnd& own = *ends_[rank];
  if (std::exchange(own.ended, true)) return;
  own.error = std::move(error);
  own.fault_here = fault;
  own.head = own.taken = kClosed;
  if (own.port.start != nullptr) own.start.fill(kClosed);
  for (const auto& end : ends_) end->fault[rank] = fault;
  for (Rank other = 0; other < ranks_; ++other) look(other);
}

void VirtualRequests::end_all(PortFault fault, const std::optional<Error>& error) {
  for (Rank rank = 0; rank < ranks_; ++rank) end(rank, fault, error);
}

void VirtualRequests::stop(Rank rank) {
  if (running_) fail(Code::invalid, "requests: a run is under way");
  end(rank, kStopped, std::nullopt);  // what was pushed has been answered by the run
}

void VirtualRequests::check(Rank rank) {
  check_engine(rank);
  VirtualEnd& end = *ends_[rank];
  if (std::exchange(end.late, false)) fail_late(rank);
  if (end.ended) fail_stopped();
}

void VirtualRequests::check_engine(Rank rank) const {
  if (ends_[rank]->error) throw Error(*ends_[rank]->error);
}

}  // namespace offcore::proxy
