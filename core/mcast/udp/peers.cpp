#include "core/mcast/udp/peers.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/base/clock.h"
#include "core/base/error.h"

namespace offcore::mcast {
namespace {

constexpr int64_t kStrangerNs = 5'000'000'000;  // to say hello
constexpr int64_t kPatrolNs = 1'000'000'000;
constexpr size_t kStrangersMax = 256;
constexpr int kAcceptsMax = 64;                  // a turn
constexpr int64_t kLastWordsNs = 1'500'000'000;  // to get out: a lost SYN is sent again after 1 s

}  // namespace

struct Peers::PeerLink final : MessageReader {
  PeerLink(Peers& owner, Descriptor socket) : peers(owner), stream(std::move(socket)) {}
  std::span<std::byte> place_of(const Message& reply) override {
    return greeted ? peers.events_.place_of(*rank, reply) : std::span<std::byte>();
  }
  bool read(const Message& message) override { return peers.on_message(*this, message); }

  Peers& peers;
  MessageStream stream;
  std::optional<GroupRank> rank;  // who is there, or has to be
  bool greeted = false;           // and has proved it
  bool connecting = false;
  bool finished = false;  // nothing more will be sent
  bool ended = false;
  int64_t since_ns = now_ns();
};

Peers::Peers(Loop& loop, const Address& at, int namespace_fd, PeerListener& listener)
    : loop_(loop), namespace_fd_(namespace_fd), events_(listener) {
  in_namespace(namespace_fd, [&] { listener_ = listen_tcp(at); });
  address_ = Address::bound_to(listener_.get());
}

Peers::~Peers() = default;

void Peers::start(const Group& group, std::vector<Address> addresses) {
  group_ = group;
  addresses_ = std::move(addresses);
  outgoing_.resize(group.ranks);
  lost_.resize(group.ranks);
  loop_.watch(listener_.get(), EPOLLIN, [this] { accept(); });
}

Peers::PeerLink& Peers::adopt(Descriptor socket) {
  auto link = std::make_unique<PeerLink>(*this, std::move(socket));
  PeerLink& adopted = *link;
  loop_.watch(adopted.stream.fd(), EPOLLIN, [this, &adopted] { on_ready(adopted); });
  links_[adopted.stream.fd()] = std::move(link);
  counters_.connections.add(1);
  return adopted;
}

void Peers::accept() {
  for (int i = 0; i < kAcceptsMax; ++i) {
    Descriptor socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE) {  // the listener stays ready: look again later
        loop_.rewatch(listener_.get(), 0);
        loop_.set_timer(&listener_, now_ns() + kPatrolNs,
                        [this] { loop_.rewatch(listener_.get(), EPOLLIN); });
      }
      return;
    }
    try {
      adopt(std::move(socket));
    } catch (const Error&) {  // no room to watch it
      counters_.strangers.add(1);
    }
  }
  hang_up_on_strangers();
}

// Those that have said nothing for long, and of the others the oldest where there are too many.
void Peers::hang_up_on_strangers() {
  std::vector<PeerLink*> strangers;
  for (const auto& [fd, link] : links_) {
    if (!link->rank) strangers.push_back(link.get());
  }
  std::sort(strangers.begin(), strangers.end(),
            [](const PeerLink* a, const PeerLink* b) { return a->since_ns > b->since_ns; });
  const int64_t now = now_ns();
  for (size_t i = 0; i < strangers.size(); ++i) {
    if (i >= kStrangersMax || now - strangers[i]->since_ns > kStrangerNs) end(*strangers[i], "");
  }
  if (!strangers.empty())
    loop_.set_timer(this, now + kPatrolNs, [this] { hang_up_on_strangers(); });
}

Peers::PeerLink& Peers::open(GroupRank to) {
  Descriptor socket;
  in_namespace(namespace_fd_, [&] { socket = connect_tcp(address_.with_port(0), addresses_[to]); });
  PeerLink& link = adopt(std::move(socket));
  link.rank = to;
  link.connecting = true;
  link.stream.push(hello_to(*group_, group_->rank, to));
  outgoing_[to] = &link;
  return link;
}

void Peers::send(GroupRank to, const Message& message, std::span<const std::byte> data) {
  if (stopped_ || lost_[to]) return;
  try {
    PeerLink& link = outgoing_[to] != nullptr ? *outgoing_[to] : open(to);
    link.stream.push(message, data);
    settle(link);
  } catch (const Error& error) {
    // The listener are told later, not from inside.
    loop_.post([this, to, reason = error.message()] { lose(to, reason); });
  }
}

// Sends what goes, and waits for room for the rest. A failure shows at the next look.
void Peers::settle(PeerLink& link) {
  if (!link.connecting && link.stream.pending() &&
      link.stream.flush() != MessageStream::StreamState::open) {
    loop_.rewatch(link.stream.fd(), EPOLLIN | EPOLLOUT);
    return;
  }
  const bool waits = link.connecting || link.stream.pending();
  if (stopped_ && !waits && link.rank && outgoing_[*link.rank] == &link && !link.finished) {
    link.finished = true;
    link.stream.finish();
  }
  loop_.rewatch(link.stream.fd(), waits ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

void Peers::on_ready(PeerLink& link) {
  if (link.connecting) {
    if (const int error = connect_error(link.stream.fd()); error != 0) {
      return end(link, cat("cannot be reached at ", addresses_[*link.rank].text(), ": ",
                           std::strerror(error)));
    }
    link.connecting = false;
  }
  MessageStream::StreamState state = link.stream.receive(link);
  if (state == MessageStream::StreamState::open && !link.ended) {
    state = link.stream.flush();
    if (state == MessageStream::StreamState::open) return settle(link);
  }
  if (link.ended) return;
  end(link,
      state == MessageStream::StreamState::closed ? "closed its connection" : link.stream.reason());
}

bool Peers::on_hello(PeerLink& link, const Message& message) {
  const std::optional<GroupRank> rank = check_hello(*group_, message);
  if (!rank || (link.rank ? *link.rank != *rank : lost_[*rank])) return false;
  link.greeted = true;
  if (link.rank) return true;  // the answer of whom this rank called
  link.rank = rank;
  link.stream.push(hello_to(*group_, group_->rank, *rank));
  if (outgoing_[*rank] == nullptr) outgoing_[*rank] = &link;
  return true;
}

// False: the link is of no use any more.
bool Peers::on_message(PeerLink& link, const Message& message) {
  if (stopped_) return true;  // for nobody
  if (!link.greeted) return message.kind == MessageKind::hello && on_hello(link, message);
  if (message.kind == MessageKind::hello) return false;
  const GroupRank from = *link.rank;
  if (message.kind == MessageKind::goodbye) let_go(from);  // its closing is no news then
  events_.on_message(from, message);
  return true;
}

// Nothing is sent to it any more.
void Peers::let_go(GroupRank rank) {
  lost_[rank] = true;
  for (const auto& [fd, link] : links_) {
    if (link->rank == rank) link->stream.let_go();
  }
}

// With all links of its rank: a peer that lives ends the one that it sends on, having sent all.
void Peers::end(PeerLink& link, const std::string& reason) {
  const std::optional<GroupRank> rank = link.rank;
  if (!rank) {
    if (!stopped_) counters_.strangers.add(1);
    return remove(link);
  }
  std::vector<PeerLink*> theirs;
  for (const auto& [fd, one] : links_) {
    if (one->rank == rank) theirs.push_back(one.get());
  }
  for (PeerLink* const one : theirs) remove(*one);
  outgoing_[*rank] = nullptr;
  if (stopped_) {
    loop_.post([this] { look_whether_stopped(false); });
  } else {
    lose(*rank, reason);
  }
}

// It may be in the middle of a call: it goes when that is over.
void Peers::remove(PeerLink& link) {
  link.ended = true;
  loop_.unwatch(link.stream.fd());
  const auto found = links_.find(link.stream.fd());
  loop_.post([gone = std::shared_ptr<PeerLink>(std::move(found->second))] {});
  links_.erase(found);
}

void Peers::lose(GroupRank rank, const std::string& reason) {
  if (stopped_ || lost_[rank]) return;
  lost_[rank] = true;
  events_.on_lost(rank, reason);
}

bool Peers::holds_data(GroupRank to, Sequence sequence) const {
  return outgoing_[to] != nullptr && outgoing_[to]->stream.holds_data(sequence);
}

// Peers are still accepted: they may be about to say that they stop too.
void Peers::stop() {
  if (std::exchange(stopped_, true)) return;
  for (const auto& [fd, link] : links_) {
    link->stream.let_go();
    settle(*link);
  }
  loop_.set_timer(&links_, now_ns() + kLastWordsNs, [this] { look_whether_stopped(true); });
  loop_.post([this] { look_whether_stopped(false); });
}

void Peers::look_whether_stopped(bool late) {
  const bool talks =
      std::ranges::any_of(links_, [](const auto& entry) { return entry.second->rank.has_value(); });
  if (talks && !late) return;
  loop_.unwatch(listener_.get());
  for (const void* who : std::array<const void*, 3>{this, &listener_, &links_}) {
    loop_.set_timer(who, INT64_MAX, nullptr);
  }
  for (const auto& [fd, link] : links_) loop_.unwatch(fd);
  links_.clear();
  listener_ = Descriptor();
  const std::scoped_lock lock(mutex_);
  silent_ = true;
  changed_.notify_all();
}

void Peers::wait_stopped() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return silent_; });
}

}  // namespace offcore::mcast
