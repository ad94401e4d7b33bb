#include "core/mcast/endpoint.h"

#include <algorithm>

namespace offcore::mcast {
namespace {

std::vector<GroupRank> partners_of(const Group& group, const Barrier& barrier) {
  std::vector<GroupRank> partners;
  if (group.ranks == 1) return partners;
  for (const Barrier::Step& step : barrier.steps()) partners.push_back(step.partner);
  partners.push_back((group.rank + 1) % group.ranks);
  partners.push_back((group.rank + group.ranks - 1) % group.ranks);
  std::ranges::sort(partners);
  partners.erase(std::ranges::unique(partners).begin(), partners.end());
  return partners;
}

ChunkRun run_of(const Message& message) {
  return {.source = message.source, .psn = message.psn, .chunks = message.chunks};
}

}  // namespace

Endpoint::SequenceState::SequenceState(Sequence of, const Group& group)
    : sequence(of), barrier(group.rank, std::max(1U, group.ranks)), op(group.first_op) {}

Endpoint::Endpoint(const Group& group, Transport& transport)
    : group_(group),
      transport_(transport),
      states_{SequenceState(Sequence::gathers, group), SequenceState(Sequence::reductions, group)},
      ring_(group_, receivers_),
      exchange_(group_) {
  check(group_);
  for (uint32_t subgroup = 0; subgroup < group_.subgroups; ++subgroup) {
    receivers_.push_back(
        std::make_unique<Receiver>(group_, subgroup, [this] { transport_.wake(); }));
  }
  partners_ = partners_of(group_, gathers_.barrier);
  gone_.resize(group_.ranks);
  heard_ns_.resize(group_.ranks, 0);
}

Endpoint::~Endpoint() { fail_with(Code::cancelled, "the communicator was closed", group_.rank); }

std::shared_ptr<Operation> Endpoint::submit(OperationRequest request) {
  if (request.counts.size() != group_.ranks || request.root >= group_.ranks) {
    fail(Code::invalid, "counts for ", request.counts.size(), " ranks and root ", request.root,
         ", but there are ", group_.ranks, " ranks");
  }
  const bool reduces = request.kind == OperationKind::reduce_scatter;
  if (reduces != request.reduction.has_value()) {
    fail(Code::invalid, "a reduction belongs to reduce_scatter, and to nothing else");
  }
  auto layout =
      std::make_shared<const BlockLayout>(group_, request.kind, request.root, request.counts);
  auto operation = std::make_shared<Operation>(std::move(request), std::move(layout));
  {
    const std::lock_guard lock(mutex_);
    if (error_) throw Error(*error_);
    if (closing_) fail(Code::cancelled, "the communicator was closed");
    of(operation->request().sequence()).queue.push_back(operation);
  }
  transport_.wake();
  return operation;
}

void Endpoint::close() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  transport_.wake();
}

EndpointCounters Endpoint::counters() const {
  EndpointCounters counters;
  {
    const std::lock_guard lock(mutex_);
    counters = counters_;
  }
  for (const auto& receiver : receivers_) counters.received.add(receiver->counters());
  return counters;
}

void Endpoint::send(GroupRank to, const Message& message) {
  {
    const std::lock_guard lock(mutex_);
    ++counters_.messages;
  }
  transport_.send(to, message);
}

// Tells the ranks this one talks to, and hands nothing to the network any more.
void Endpoint::leave(MessageKind kind, uint32_t detail, GroupRank blamed, Sequence sequence) {
  for (const GroupRank partner : partners_) {
    send(partner, {.kind = kind,
                   .detail = detail,
                   .op = of(sequence).op,
                   .source = blamed,
                   .sequence = sequence});
  }
  for (const auto& receiver : receivers_) receiver->disarm();
  transport_.stop();
  closed_ = true;
}

void Endpoint::fail_with(Code code, const std::string& text, GroupRank blamed, Sequence sequence) {
  if (closed_) return;
  leave(MessageKind::abort, static_cast<uint32_t>(code), blamed, sequence);
  const Error error(code, text);
  std::vector<std::shared_ptr<Operation>> failed;
  {
    const std::lock_guard lock(mutex_);
    error_ = error;
    for (SequenceState& state : states_) {
      if (state.running) failed.push_back(state.running->operation);
      failed.insert(failed.end(), state.queue.begin(), state.queue.end());
      state.queue.clear();
      state.running.reset();
    }
    counters_.failed += failed.size();
  }
  for (const auto& operation : failed) operation->end(error, {});
}

std::optional<std::string> Endpoint::gone(GroupRank rank) const {
  return gone_[rank].empty() ? std::nullopt : std::optional(gone_[rank]);
}

void Endpoint::on_peer_lost(GroupRank rank, const std::string& reason, int64_t now_ns) {
  if (closed_ || rank >= group_.ranks || rank == group_.rank || gone(rank)) return;
  gone_[rank] = reason.empty() ? "its connection ended" : reason;
  progress(now_ns);
}

void Endpoint::on_message(GroupRank from, const Message& message, int64_t now_ns) {
  if (closed_ || from >= group_.ranks || from == group_.rank) return;
  heard_ns_[from] = std::max(heard_ns_[from], now_ns);
  bool fits = true;
  switch (message.kind) {
    case MessageKind::probe:
      send(from, {.kind = MessageKind::alive});
      break;
    case MessageKind::alive:
    case MessageKind::hello:
      break;
    case MessageKind::goodbye:
      if (!gone(from)) gone_[from] = "it has closed its communicator";
      break;
    case MessageKind::abort:
      on_abort(from, message);
      return;
    case MessageKind::barrier:
      fits = (message.op == of(message.sequence).op || message.op == of(message.sequence).op + 1) &&
             of(message.sequence).barrier.hear(from, message);
      break;
    default:
      fits = message.sequence == Sequence::gathers ? on_gather(from, message)
                                                   : on_reduction(from, message);
  }
  if (!fits) {
    const std::lock_guard lock(mutex_);
    ++counters_.refused_messages;
  }
  progress(now_ns);
}

// A message that belongs to the running gather, or to none.
bool Endpoint::on_gather(GroupRank from, const Message& message) {
  std::optional<Running>& running = gathers_.running;
  if (!running || message.op != gathers_.op) return false;
  const BlockLayout& layout = *running->layout;
  switch (message.kind) {
    case MessageKind::activate:
      if (!layout.sends(group_.rank) || from != layout.previous(group_.rank)) return false;
      running->turn = true;
      return true;
    case MessageKind::fetch:
      return from == right() && !running->final_heard && ring_.asked(run_of(message));
    case MessageKind::reply:
      return from == left() && ring_.arrived(run_of(message), message.payload_bytes);
    case MessageKind::final:
      // Who has everything has read all replies: their data may go.
      if (from != right() || ring_.owes() || transport_.holds_data(from, Sequence::gathers)) {
        return false;
      }
      running->final_heard = true;
      return true;
    default:
      return false;
  }
}

bool Endpoint::on_reduction(GroupRank from, const Message& message) {
  if (!reductions_.running || message.op != reductions_.op) return false;
  switch (message.kind) {
    case MessageKind::share:
      return exchange_.arrived(from, message.psn, message.payload_bytes);
    case MessageKind::taken:
      return exchange_.taken(from, message.psn, transport_.holds_data(from, Sequence::reductions));
    default:
      return false;
  }
}

void Endpoint::on_abort(GroupRank from, const Message& message) {
  const GroupRank blamed = message.source < group_.ranks ? message.source : from;
  const auto code = message.detail <= static_cast<uint32_t>(Code::peer)
                        ? static_cast<Code>(message.detail)
                        : Code::peer;
  // This rank has cancelled or got nothing wrong itself: to it, a peer is what failed.
  const Code here = code == Code::timeout || code == Code::mismatch ? code : Code::peer;
  fail_with(here,
            cat("rank ", from, " gave up ",
                message.sequence == Sequence::gathers ? "operation " : "reduction ", message.op,
                " (", to_string(code), "), because of rank ", blamed),
            blamed, message.sequence);
}

std::span<std::byte> Endpoint::place_of(GroupRank from, const Message& reply) {
  if (closed_ || from >= group_.ranks || from == group_.rank) return {};
  const SequenceState& state = of(reply.sequence);
  if (!state.running || reply.op != state.op) return {};
  if (reply.sequence == Sequence::reductions) {
    if (reply.kind != MessageKind::share) return {};
    return exchange_.place_of(from, reply.psn, reply.payload_bytes);
  }
  if (reply.kind != MessageKind::reply || from != left()) return {};
  return ring_.place_of(run_of(reply), reply.payload_bytes);
}

void Endpoint::on_sent(const BlockPart& part, int64_t now_ns) {
  std::optional<Running>& running = gathers_.running;
  if (closed_ || !running || part.op != gathers_.op || running->parts_sending == 0) return;
  {
    const std::lock_guard lock(mutex_);
    counters_.sent_datagrams += part.chunks;
    counters_.sent_bytes += part.bytes;
  }
  if (--running->parts_sending == 0) {
    running->sent = true;
    ring_.offer_own();
    const GroupRank next = running->layout->next(group_.rank);
    if (next != group_.rank) send(next, {.kind = MessageKind::activate, .op = gathers_.op});
  }
  progress(now_ns);
}

void Endpoint::on_time(int64_t now_ns) {
  if (closed_) return;
  bool closing = false, idle = true;
  {
    const std::lock_guard lock(mutex_);
    closing = closing_;
    for (const SequenceState& state : states_) {
      idle = idle && state.queue.empty() && !state.running;
    }
  }
  if (closing && !idle) {
    fail_with(Code::cancelled, "the communicator was closed", group_.rank);
  } else if (closing) {
    leave(MessageKind::goodbye, 0, group_.rank, Sequence::gathers);
  }
  progress(now_ns);
}

}  // namespace offcore::mcast
