// How an operation goes from phase to phase. Each function may be called at any time: it looks at
// what has been noted and does what follows from it.
#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "core/mcast/endpoint.h"

namespace offcore::mcast {
namespace {

constexpr int64_t kAlphaMinNs = 1'000'000;  // as far as questions go that are asked too soon

const char* name_of(OperationKind kind) {
  return kind == OperationKind::broadcast ? "broadcast" : "all-gather";
}

const char* name_of(Phase phase) {
  constexpr const char* kNames[] = {"queued",   "barrier",   "multicast",
                                    "recovery", "handshake", "ended"};
  return kNames[static_cast<size_t>(phase)];
}

int64_t plus(int64_t time_ns, int64_t more_ns) {
  return more_ns > kNever - time_ns ? kNever : time_ns + more_ns;
}

void add(OperationReport& sum, const OperationReport& report) {
  sum.bytes += report.bytes;
  sum.datagrams += report.datagrams;
  sum.lost_chunks += report.lost_chunks;
  sum.fetched_chunks += report.fetched_chunks;
  sum.fetches += report.fetches;
  sum.cutoffs += report.cutoffs;
  sum.barrier_ns += report.barrier_ns;
  sum.multicast_ns += report.multicast_ns;
  sum.recovery_ns += report.recovery_ns;
  sum.handshake_ns += report.handshake_ns;
}

}  // namespace

void Endpoint::progress(int64_t now_ns) {
  try {
    advance(now_ns);
  } catch (const std::bad_alloc&) {  // bitmaps grow with the buffer
    fail_with(Code::memory, cat("out of memory in operation ", op_), group_.rank);
  }
}

void Endpoint::advance(int64_t now_ns) {
  while (!closed_) {
    if (!running_) begin_next(now_ns);
    if (!running_) return;
    const uint64_t op = op_;
    if (running_->phase == Phase::barrier && !run_barrier(now_ns)) break;
    if (closed_) return;
    if (running_->phase == Phase::multicast) run_multicast(now_ns);
    if (running_->phase == Phase::recovery) run_recovery(now_ns);
    ring_.answer([this](const ChunkRun& run, std::span<const std::byte> bytes) {
      transport_.send(right(),
                      {.kind = MessageKind::reply,
                       .op = op_,
                       .source = run.source,
                       .psn = run.psn,
                       .chunks = run.chunks,
                       .payload_bytes = bytes.size()},
                      bytes);
    });
    if (running_->phase == Phase::handshake) run_handshake(now_ns);
    if (op_ == op) break;  // it goes on
  }
  if (!closed_) check_times(now_ns);
}

void Endpoint::begin_next(int64_t now_ns) {
  std::shared_ptr<Operation> operation;
  {
    const std::lock_guard lock(mutex_);
    if (queue_.empty()) return;
    operation = queue_.front();
    queue_.pop_front();
  }
  const OperationRequest& request = operation->request();
  running_.emplace();
  running_->operation = std::move(operation);  // first: it is told if there is no memory for more
  running_->layout = running_->operation->layout();
  running_->out = request.out;
  if (const uint64_t own = request.counts[group_.rank]; request.in != nullptr && own > 0) {
    std::memmove(running_->out + running_->layout->offset(group_.rank, 0), request.in, own);
  }
  running_->sent = group_.ranks == 1 || !group_.multicast || !running_->layout->sends(group_.rank);
  running_->turn = running_->layout->begins(group_.rank);
  running_->began_ns = running_->phase_ns = now_ns;
  running_->report.bytes = running_->layout->bytes();
  ring_.begin(running_->layout, running_->out);
  if (running_->sent) ring_.offer_own();
  uint64_t state_bytes = 0;
  for (const auto& receiver : receivers_) {
    receiver->arm(running_->layout, op_, running_->out);
    state_bytes += receiver->state_bytes();
  }
  const std::lock_guard lock(mutex_);
  counters_.state_bytes = std::max(counters_.state_bytes, state_bytes);
}

// Whether all ranks have entered.
bool Endpoint::run_barrier(int64_t now_ns) {
  Running& run = *running_;
  const uint64_t digest = run.layout->digest();
  for (; run.step < barrier_.steps().size(); ++run.step, run.step_sent = false) {
    const Barrier::Step& step = barrier_.steps()[run.step];
    if (step.sends && !run.step_sent) {
      send(step.partner,
           {.kind = MessageKind::barrier, .detail = step.round, .op = op_, .value = digest});
      run.step_sent = true;
    }
    if (!step.waits) continue;
    const std::optional<uint64_t> heard = barrier_.heard(op_, run.step);
    if (!heard) return false;
    if (*heard != digest) {
      fail_with(Code::mismatch,
                cat("rank ", step.partner, " does something else in operation ", op_, " than this ",
                    name_of(run.operation->request().kind), " of ", run.layout->bytes(),
                    " bytes: all ranks must make the same calls, with the same counts, and open ",
                    "their communicators alike"),
                step.partner);
      return false;
    }
  }
  barrier_.forget(op_);
  enter(Phase::multicast, now_ns);
  // N/B_link; then alpha more, in which something must come.
  const double whole_ns = static_cast<double>(run.layout->bytes()) / group_.link_bytes_s * 1e9;
  run.cutoff_ns = plus(now_ns, static_cast<int64_t>(std::min(whole_ns, 1e18)));
  return true;
}

void Endpoint::send_block() {
  Running& run = *running_;
  if (run.sent || !run.turn || run.parts_sending > 0 || run.phase == Phase::barrier) return;
  std::vector<BlockPart> parts;
  for (uint32_t subgroup = 0; subgroup < group_.subgroups; ++subgroup) {
    const ChunkRun chunks = run.layout->part(group_.rank, subgroup);
    if (chunks.chunks == 0) continue;
    parts.push_back({.op = op_,
                     .source = group_.rank,
                     .roots = run.layout->chains(),
                     .subgroup = subgroup,
                     .psn = chunks.psn,
                     .chunks = chunks.chunks,
                     .data = run.out + run.layout->offset(group_.rank, chunks.psn),
                     .bytes = run.layout->bytes_of(chunks)});
  }
  run.parts_sending = static_cast<uint32_t>(parts.size());
  for (const BlockPart& part : parts) transport_.multicast(part);
}

Receiver::ReceiverState Endpoint::received() const {
  Receiver::ReceiverState all{.ended = true};
  for (const auto& receiver : receivers_) {
    const Receiver::ReceiverState one = receiver->state();
    all.missing += one.missing;
    all.taken += one.taken;
    all.ended = all.ended && one.ended;
  }
  return all;
}

// Slower than thought, but not over: since the last look, at least a 256th of B_link came.
bool Endpoint::still_comes(uint64_t taken, int64_t now_ns) const {
  const double came = static_cast<double>(taken - running_->looked_taken) * group_.chunk_bytes;
  const auto since_ns = static_cast<double>(now_ns - running_->looked_ns);
  return came > 0 && came * 256 >= group_.link_bytes_s * since_ns / 1e9;
}

void Endpoint::run_multicast(int64_t now_ns) {
  Running& run = *running_;
  send_block();
  const Receiver::ReceiverState state = received();
  if (state.missing == 0) return enter(Phase::handshake, now_ns);
  if (!group_.multicast) return enter(Phase::recovery, now_ns);
  if (state.ended && !run.settling) {
    run.settling = true;
    run.looked_ns = now_ns;
    run.looked_taken = state.taken;
    run.cutoff_ns = plus(now_ns, group_.settle_ns);
  }
  if (now_ns < run.cutoff_ns) return;
  const bool first = run.looked_ns == kNever;
  if (!first) ++run.report.cutoffs;
  if (first || still_comes(state.taken, now_ns)) {
    run.looked_ns = now_ns;
    run.looked_taken = state.taken;
    const int64_t more_ns = run.settling ? group_.settle_ns : group_.alpha_ns;
    run.cutoff_ns = plus(now_ns, std::max<int64_t>(more_ns, 1));
    return;
  }
  run.report.lost_chunks = state.missing;
  enter(Phase::recovery, now_ns);
}

void Endpoint::run_recovery(int64_t now_ns) {
  send_block();
  ring_.ask([this](const ChunkRun& run) {
    send(left(), {.kind = MessageKind::fetch,
                  .op = op_,
                  .source = run.source,
                  .psn = run.psn,
                  .chunks = run.chunks});
  });
  const Receiver::ReceiverState state = received();
  if (state.missing == 0) return enter(Phase::handshake, now_ns);
  // A late datagram may be what the right neighbour waits for, while this rank waits itself.
  if (std::exchange(running_->looked_taken, state.taken) != state.taken) ring_.look_again();
}

void Endpoint::run_handshake(int64_t now_ns) {
  send_block();
  if (!running_->sent) return;
  // Who is gone will fetch nothing; whether it had everything is for those who wait for it.
  if (running_->final_heard || group_.ranks == 1 || gone(right())) finish(now_ns);
}

void Endpoint::enter(Phase phase, int64_t now_ns) {
  Running& run = *running_;
  OperationReport& report = run.report;
  int64_t* const spent[] = {nullptr, &report.barrier_ns, &report.multicast_ns, &report.recovery_ns,
                            &report.handshake_ns};
  *spent[static_cast<size_t>(run.phase)] += now_ns - run.phase_ns;
  run.phase = phase;
  run.phase_ns = now_ns;
  ring_.look_again();
  if (phase == Phase::recovery) {
    for (const auto& receiver : receivers_) receiver->report_all();
  }
  if (phase == Phase::handshake && group_.ranks > 1) {
    send(left(), {.kind = MessageKind::final, .op = op_});
  }
}

void Endpoint::finish(int64_t now_ns) {
  enter(Phase::ended, now_ns);
  running_->report.datagrams = received().taken;
  running_->report.fetches = ring_.fetches();
  running_->report.fetched_chunks = ring_.fetched_chunks();
  for (const auto& receiver : receivers_) receiver->disarm();
  const std::shared_ptr<Operation> operation = std::move(running_->operation);
  const OperationReport report = running_->report;
  running_.reset();
  ++op_;
  {
    const std::lock_guard lock(mutex_);
    add(counters_.sum, report);
    counters_.served_chunks += ring_.served_chunks();
    ++counters_.operations;
  }
  operation->end({}, report);
}

std::optional<GroupRank> Endpoint::awaited() const {
  if (!running_) return {};
  const Running& run = *running_;
  if (run.phase == Phase::barrier) return barrier_.steps()[run.step].partner;
  if (run.phase == Phase::recovery) return left();
  if (!run.sent && !run.turn) return run.layout->previous(group_.rank);
  if (run.phase == Phase::handshake && !run.final_heard) return right();
  return {};
}

// Asks who is waited for whether it lives, and fails where it does not. Soon at first: a message
// that TCP has lost, with nothing behind it, is sent again after 200 ms, but at once where the
// receiver acknowledges a later one, and the answer is one.
void Endpoint::watch(int64_t now_ns) {
  const std::optional<GroupRank> rank = awaited();
  if (rank != watched_) {
    watched_ = rank;
    watched_ns_ = now_ns;
    probe_wait_ns_ = std::min(std::max(group_.alpha_ns, kAlphaMinNs), group_.silence_ns) / 4 + 1;
    probe_ns_ = rank ? plus(now_ns, probe_wait_ns_) : kNever;
  }
  // Where this rank itself was not run for long (a machine that was stopped), nobody was asked.
  const int64_t idle_ns = now_ns - std::exchange(looked_round_ns_, now_ns);
  if (idle_ns > group_.silence_ns / 2) watched_ns_ = now_ns;
  if (!rank) return;
  if (const auto why = gone(*rank)) {
    return fail_with(Code::peer, cat("rank ", *rank, " is lost (", *why, "): ", state_text()),
                     *rank);
  }
  const int64_t silent_ns = now_ns - std::max(watched_ns_, heard_ns_[*rank]);
  if (silent_ns >= group_.silence_ns) {
    return fail_with(
        Code::peer,
        cat("rank ", *rank, " has been silent for ", shown_s(silent_ns), " s: ", state_text()),
        *rank);
  }
  if (now_ns < probe_ns_) return;
  probe_wait_ns_ = std::min(2 * probe_wait_ns_, group_.silence_ns / 4 + 1);
  probe_ns_ = plus(now_ns, probe_wait_ns_);
  send(*rank, {.kind = MessageKind::probe, .op = op_});
}

void Endpoint::check_times(int64_t now_ns) {
  watch(now_ns);
  if (closed_ || !running_ || now_ns < plus(running_->began_ns, group_.timeout_ns)) return;
  fail_with(Code::timeout,
            cat("not done within ", shown_s(group_.timeout_ns), " s: ", state_text()),
            watched_.value_or(group_.rank));
}

std::string Endpoint::state_text() const {
  const Running& run = *running_;
  const Receiver::ReceiverState state = received();
  const std::string who = watched_ ? cat(", waiting for rank ", *watched_) : std::string();
  return cat(name_of(run.operation->request().kind), " ", op_, " of ", run.layout->bytes(),
             " bytes, phase ", name_of(run.phase), who, ", ", state.missing, " chunks missing");
}

int64_t Endpoint::next_time() const {
  if (closed_ || !running_) return kNever;
  int64_t next = plus(running_->began_ns, group_.timeout_ns);
  if (running_->phase == Phase::multicast) next = std::min(next, running_->cutoff_ns);
  if (watched_) next = std::min(next, probe_ns_);
  return next;
}

}  // namespace offcore::mcast
