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

const char* name_of(Phase phase) {
  constexpr const char* kNames[] = {"queued",    "barrier",  "multicast", "recovery",
                                    "handshake", "exchange", "ended"};
  return kNames[static_cast<size_t>(phase)];
}

int64_t plus(int64_t time_ns, int64_t more_ns) {
  return more_ns > kNever - time_ns ? kNever : time_ns + more_ns;
}

}  // namespace

void Endpoint::progress(int64_t now_ns) {
  for (SequenceState& state : states_) {
    try {
      advance(state, now_ns);
    } catch (const std::bad_alloc&) {  // bitmaps and places grow with the buffer
      fail_with(Code::memory, cat("out of memory in operation ", state.op), group_.rank,
                state.sequence);
    }
  }
}

void Endpoint::advance(SequenceState& state, int64_t now_ns) {
  while (!closed_) {
    if (!state.running) begin_next(state, now_ns);
    if (!state.running) return;
    const uint64_t op = state.op;
    if (state.running->phase == Phase::barrier && !run_barrier(state, now_ns)) break;
    if (closed_) return;
    if (state.sequence == Sequence::gathers) {
      run_gather(now_ns);
    } else {
      run_exchange(now_ns);
    }
    if (state.op == op) break;  // it goes on
  }
  if (!closed_) check_times(state, now_ns);
}

void Endpoint::begin_next(SequenceState& state, int64_t now_ns) {
  std::shared_ptr<Operation> operation;
  {
    const std::lock_guard lock(mutex_);
    if (state.queue.empty()) return;
    operation = state.queue.front();
    state.queue.pop_front();
  }
  Running& run = state.running.emplace();
  run.operation = std::move(operation);  // first: it is told if there is no memory for more
  run.layout = run.operation->layout();
  run.out = run.operation->request().out;
  run.began_ns = run.phase_ns = now_ns;
  run.report.bytes = run.layout->bytes();
  if (state.sequence == Sequence::gathers) {
    begin_gather();
  } else {
    exchange_.begin(run.layout, run.operation->request());
  }
}

void Endpoint::begin_gather() {
  Running& run = *gathers_.running;
  const OperationRequest& request = run.operation->request();
  if (const uint64_t own = request.counts[group_.rank]; request.in != nullptr && own > 0) {
    std::memmove(run.out + run.layout->offset(group_.rank, 0), request.in, own);
  }
  run.sent = group_.ranks == 1 || !group_.multicast || !run.layout->sends(group_.rank);
  run.turn = run.layout->begins(group_.rank);
  ring_.begin(run.layout, run.out);
  if (run.sent) ring_.offer_own();
  uint64_t state_bytes = 0;
  for (const auto& receiver : receivers_) {
    receiver->arm(run.layout, gathers_.op, run.out);
    state_bytes += receiver->state_bytes();
  }
  const std::lock_guard lock(mutex_);
  counters_.state_bytes = std::max(counters_.state_bytes, state_bytes);
}

// Whether all ranks have entered.
bool Endpoint::run_barrier(SequenceState& state, int64_t now_ns) {
  Running& run = *state.running;
  const AnnouncedCall& call = run.operation->call();
  for (; run.step < state.barrier.steps().size(); ++run.step, run.step_sent = false) {
    const Barrier::Step& step = state.barrier.steps()[run.step];
    if (step.sends && !run.step_sent) {
      Message message = announcement(call, step.round);
      message.op = state.op;
      message.sequence = state.sequence;
      send(step.partner, message);
      run.step_sent = true;
    }
    if (!step.waits) continue;
    const std::optional<AnnouncedCall>& heard = state.barrier.heard(state.op, run.step);
    if (!heard) return false;
    if (heard->digest != call.digest) {
      fail_with(Code::mismatch,
                cat("operation ", state.op, " of rank ", step.partner, " is a ", text_of(*heard),
                    ", and of rank ", group_.rank, " a ", text_of(call),
                    ": all ranks must make the same calls, with the same counts, and open ",
                    "their communicators alike"),
                step.partner, state.sequence);
      return false;
    }
  }
  state.barrier.forget(state.op);
  if (state.sequence == Sequence::gathers) {
    begin_multicast(now_ns);
  } else {
    enter(state, Phase::exchange, now_ns);
  }
  return true;
}

void Endpoint::run_exchange(int64_t now_ns) {
  const auto head = [this](MessageKind kind, uint32_t psn) {
    return Message{
        .kind = kind, .op = reductions_.op, .psn = psn, .sequence = Sequence::reductions};
  };
  exchange_.give([&](GroupRank to, uint32_t piece, std::span<const std::byte> bytes) {
    Message share = head(MessageKind::share, piece);
    share.payload_bytes = bytes.size();
    transport_.send(to, share, bytes);
  });
  exchange_.reduce(
      [&](GroupRank to, uint32_t pieces) { send(to, head(MessageKind::taken, pieces)); });
  if (!exchange_.awaited()) finish(reductions_, now_ns);
}

void Endpoint::begin_multicast(int64_t now_ns) {
  Running& run = *gathers_.running;
  enter(gathers_, Phase::multicast, now_ns);
  // N/B_link; then alpha more, in which something must come.
  const double whole_ns = static_cast<double>(run.layout->bytes()) / group_.link_bytes_s * 1e9;
  run.cutoff_ns = plus(now_ns, static_cast<int64_t>(std::min(whole_ns, 1e18)));
}

void Endpoint::run_gather(int64_t now_ns) {
  Running& run = *gathers_.running;
  if (run.phase == Phase::multicast) run_multicast(now_ns);
  if (run.phase == Phase::recovery) run_recovery(now_ns);
  ring_.answer([this](const ChunkRun& asked, std::span<const std::byte> bytes) {
    transport_.send(right(),
                    {.kind = MessageKind::reply,
                     .op = gathers_.op,
                     .source = asked.source,
                     .psn = asked.psn,
                     .chunks = asked.chunks,
                     .payload_bytes = bytes.size()},
                    bytes);
  });
  if (run.phase == Phase::handshake) run_handshake(now_ns);
}

void Endpoint::send_block() {
  Running& run = *gathers_.running;
  if (run.sent || !run.turn || run.parts_sending > 0 || run.phase == Phase::barrier) return;
  std::vector<BlockPart> parts;
  for (uint32_t subgroup = 0; subgroup < group_.subgroups; ++subgroup) {
    const ChunkRun chunks = run.layout->part(group_.rank, subgroup);
    if (chunks.chunks == 0) continue;
    parts.push_back({.op = gathers_.op,
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
  const double came =
      static_cast<double>(taken - gathers_.running->looked_taken) * group_.chunk_bytes;
  const auto since_ns = static_cast<double>(now_ns - gathers_.running->looked_ns);
  return came > 0 && came * 256 >= group_.link_bytes_s * since_ns / 1e9;
}

void Endpoint::run_multicast(int64_t now_ns) {
  Running& run = *gathers_.running;
  send_block();
  const Receiver::ReceiverState state = received();
  if (state.missing == 0) return enter(gathers_, Phase::handshake, now_ns);
  if (!group_.multicast) return enter(gathers_, Phase::recovery, now_ns);
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
  enter(gathers_, Phase::recovery, now_ns);
}

void Endpoint::run_recovery(int64_t now_ns) {
  send_block();
  ring_.ask([this](const ChunkRun& run) {
    send(left(), {.kind = MessageKind::fetch,
                  .op = gathers_.op,
                  .source = run.source,
                  .psn = run.psn,
                  .chunks = run.chunks});
  });
  const Receiver::ReceiverState state = received();
  if (state.missing == 0) return enter(gathers_, Phase::handshake, now_ns);
  // A late datagram may be what the right neighbour waits for, while this rank waits itself.
  if (std::exchange(gathers_.running->looked_taken, state.taken) != state.taken) ring_.look_again();
}

void Endpoint::run_handshake(int64_t now_ns) {
  send_block();
  if (!gathers_.running->sent) return;
  // Who is gone will fetch nothing; whether it had everything is for those who wait for it.
  if (gathers_.running->final_heard || group_.ranks == 1 || gone(right())) finish(gathers_, now_ns);
}

void Endpoint::enter(SequenceState& state, Phase phase, int64_t now_ns) {
  Running& run = *state.running;
  OperationReport& report = run.report;
  int64_t* const spent[] = {nullptr,
                            &report.barrier_ns,
                            &report.multicast_ns,
                            &report.recovery_ns,
                            &report.handshake_ns,
                            &report.exchange_ns};
  *spent[static_cast<size_t>(run.phase)] += now_ns - run.phase_ns;
  run.phase = phase;
  run.phase_ns = now_ns;
  if (state.sequence == Sequence::reductions) return;
  ring_.look_again();
  if (phase == Phase::recovery) {
    for (const auto& receiver : receivers_) receiver->report_all();
  }
  if (phase == Phase::handshake && group_.ranks > 1) {
    send(left(), {.kind = MessageKind::final, .op = state.op});
  }
}

void Endpoint::finish(SequenceState& state, int64_t now_ns) {
  enter(state, Phase::ended, now_ns);
  OperationReport report = state.running->report;
  const bool gathered = state.sequence == Sequence::gathers;
  if (gathered) {
    report.datagrams = received().taken;
    report.fetches = ring_.fetches();
    report.fetched_chunks = ring_.fetched_chunks();
    for (const auto& receiver : receivers_) receiver->disarm();
  } else {
    report.shares = exchange_.shares();
  }
  const std::shared_ptr<Operation> operation = std::move(state.running->operation);
  state.running.reset();
  ++state.op;
  {
    const std::lock_guard lock(mutex_);
    counters_.sum.add(report);
    if (gathered) counters_.served_chunks += ring_.served_chunks();
    ++counters_.operations;
  }
  operation->end({}, report);
}

std::optional<GroupRank> Endpoint::awaited(const SequenceState& state) const {
  if (!state.running) return {};
  const Running& run = *state.running;
  if (run.phase == Phase::barrier) return state.barrier.steps()[run.step].partner;
  if (run.phase == Phase::exchange) return exchange_.awaited();
  if (run.phase == Phase::recovery) return left();
  if (!run.sent && !run.turn) return run.layout->previous(group_.rank);
  if (run.phase == Phase::handshake && !run.final_heard) return right();
  return {};
}

// Asks who is waited for whether it lives, and fails where it does not. Soon at first: a message
// that TCP has lost, with nothing behind it, is sent again after 200 ms, but at once where the
// receiver acknowledges a later one, and the answer is one.
void Endpoint::watch(SequenceState& state, int64_t now_ns) {
  const std::optional<GroupRank> rank = awaited(state);
  if (rank != state.watched) {
    state.watched = rank;
    state.watched_ns = now_ns;
    state.probe_wait_ns =
        std::min(std::max(group_.alpha_ns, kAlphaMinNs), group_.silence_ns) / 4 + 1;
    state.probe_ns = rank ? plus(now_ns, state.probe_wait_ns) : kNever;
  }
  // Where this rank itself was not run for long (a machine that was stopped), nobody was asked.
  const int64_t idle_ns = now_ns - std::exchange(state.looked_round_ns, now_ns);
  if (idle_ns > group_.silence_ns / 2) state.watched_ns = now_ns;
  if (!rank) return;
  if (const auto why = gone(*rank)) {
    return fail_with(Code::peer, cat("rank ", *rank, " is lost (", *why, "): ", state_text(state)),
                     *rank, state.sequence);
  }
  const int64_t silent_ns = now_ns - std::max(state.watched_ns, heard_ns_[*rank]);
  if (silent_ns >= group_.silence_ns) {
    return fail_with(
        Code::peer,
        cat("rank ", *rank, " has been silent for ", shown_s(silent_ns), " s: ", state_text(state)),
        *rank, state.sequence);
  }
  if (now_ns < state.probe_ns) return;
  state.probe_wait_ns = std::min(2 * state.probe_wait_ns, group_.silence_ns / 4 + 1);
  state.probe_ns = plus(now_ns, state.probe_wait_ns);
  send(*rank, {.kind = MessageKind::probe});
}

void Endpoint::check_times(SequenceState& state, int64_t now_ns) {
  watch(state, now_ns);
  if (closed_ || !state.running || now_ns < plus(state.running->began_ns, group_.timeout_ns))
    return;
  fail_with(Code::timeout,
            cat("not done within ", shown_s(group_.timeout_ns), " s: ", state_text(state)),
            state.watched.value_or(group_.rank), state.sequence);
}

std::string Endpoint::state_text(const SequenceState& state) const {
  const Running& run = *state.running;
  const std::string who = state.watched ? cat(", waiting for rank ", *state.watched) : "";
  const std::string missing = state.sequence == Sequence::gathers
                                  ? cat(", ", received().missing, " chunks missing")
                                  : cat(", ", exchange_.shares(), " shares have come");
  return cat("operation ", state.op, ", a ", text_of(run.operation->call()), ", phase ",
             name_of(run.phase), who, missing);
}

int64_t Endpoint::next_time() const {
  if (closed_) return kNever;
  int64_t next = kNever;
  for (const SequenceState& state : states_) {
    if (!state.running) continue;
    next = std::min(next, plus(state.running->began_ns, group_.timeout_ns));
    if (state.running->phase == Phase::multicast) next = std::min(next, state.running->cutoff_ns);
    if (state.watched) next = std::min(next, state.probe_ns);
  }
  return next;
}

}  // namespace offcore::mcast
