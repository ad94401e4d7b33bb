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

Endpoint::Endpoint(const Group& group, Transport& transport)
    : group_(group),
      transport_(transport),
      barrier_(group.rank, std::max(1U, group.ranks)),
      ring_(group_, receivers_),
      op_(group.first_op) {
  check(group_);
  for (uint32_t subgroup = 0; subgroup < group_.subgroups; ++subgroup) {
    receivers_.push_back(
        std::make_unique<Receiver>(group_, subgroup, [this] { transport_.wake(); }));
  }
  partners_ = partners_of(group_, barrier_);
  gone_.resize(group_.ranks);
  heard_ns_.resize(group_.ranks, 0);
}

Endpoint::~Endpoint() { fail_with(Code::cancelled, "the communicator was closed", group_.rank); }

std::shared_ptr<Operation> Endpoint::submit(OperationRequest request) {
  if (request.counts.size() != group_.ranks || request.root >= group_.ranks) {
    fail(Code::invalid, "counts for ", request.counts.size(), " ranks and root ", request.root,
         ", but there are ", group_.ranks, " ranks");
  }
  auto layout =
      std::make_shared<const BlockLayout>(group_, request.kind, request.root, request.counts);
  auto operation = std::make_shared<Operation>(std::move(request), std::move(layout));
  {
    const std::lock_guard lock(mutex_);
    if (error_) throw Error(*error_);
    if (closing_) fail(Code::cancelled, "the communicator was closed");
    queue_.push_back(operation);
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
void Endpoint::leave(MessageKind kind, uint32_t detail, GroupRank blamed) {
  for (const GroupRank partner : partners_) {
    send(partner, {.kind = kind, .detail = detail, .op = op_, .source = blamed});
  }
  for (const auto& receiver : receivers_) receiver->disarm();
  transport_.stop();
  closed_ = true;
}

void Endpoint::fail_with(Code code, const std::string& text, GroupRank blamed) {
  if (closed_) return;
  leave(MessageKind::abort, static_cast<uint32_t>(code), blamed);
  const Error error(code, text);
  std::deque<std::shared_ptr<Operation>> failed;
  {
    const std::lock_guard lock(mutex_);
    error_ = error;
    failed.swap(queue_);
    if (running_) failed.push_front(running_->operation);
    counters_.failed += failed.size();
  }
  const OperationReport report = running_ ? running_->report : OperationReport{};
  running_.reset();
  for (const auto& operation : failed) operation->end(error, report);
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
      send(from, {.kind = MessageKind::alive, .op = op_});
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
      fits = (message.op == op_ || message.op == op_ + 1) &&
             barrier_.hear(message.op, from, message.detail, message.value);
      break;
    default:
      fits = on_running(from, message);
  }
  if (!fits) {
    const std::lock_guard lock(mutex_);
    ++counters_.refused_messages;
  }
  progress(now_ns);
}

// A message that belongs to the running operation, or to none.
bool Endpoint::on_running(GroupRank from, const Message& message) {
  if (!running_ || message.op != op_) return false;
  const BlockLayout& layout = *running_->layout;
  switch (message.kind) {
    case MessageKind::activate:
      if (!layout.sends(group_.rank) || from != layout.previous(group_.rank)) return false;
      running_->turn = true;
      return true;
    case MessageKind::fetch:
      return from == right() && !running_->final_heard && ring_.asked(run_of(message));
    case MessageKind::reply:
      return from == left() && ring_.arrived(run_of(message), message.payload_bytes);
    case MessageKind::final:
      // Who has everything has read all replies: their data may go.
      if (from != right() || ring_.owes() || transport_.holds_data(from)) return false;
      running_->final_heard = true;
      return true;
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
            cat("rank ", from, " gave up operation ", message.op, " (", to_string(code),
                "), because of rank ", blamed),
            blamed);
}

std::span<std::byte> Endpoint::place_of(GroupRank from, const Message& reply) {
  if (closed_ || !running_ || reply.op != op_ || from != left()) return {};
  return ring_.place_of(run_of(reply), reply.payload_bytes);
}

void Endpoint::on_sent(const BlockPart& part, int64_t now_ns) {
  if (closed_ || !running_ || part.op != op_ || running_->parts_sending == 0) return;
  {
    const std::lock_guard lock(mutex_);
    counters_.sent_datagrams += part.chunks;
    counters_.sent_bytes += part.bytes;
  }
  if (--running_->parts_sending == 0) {
    running_->sent = true;
    ring_.offer_own();
    const GroupRank next = running_->layout->next(group_.rank);
    if (next != group_.rank) send(next, {.kind = MessageKind::activate, .op = op_});
  }
  progress(now_ns);
}

void Endpoint::on_time(int64_t now_ns) {
  if (closed_) return;
  bool closing = false, idle = false;
  {
    const std::lock_guard lock(mutex_);
    closing = closing_;
    idle = queue_.empty();
  }
  if (closing && (running_ || !idle)) {
    fail_with(Code::cancelled, "the communicator was closed", group_.rank);
  } else if (closing) {
    leave(MessageKind::goodbye, 0, group_.rank);
  }
  progress(now_ns);
}

}  // namespace offcore::mcast
