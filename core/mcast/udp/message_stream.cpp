#include "core/mcast/udp/message_stream.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/base/error.h"

#ifndef TCP_RTO_MIN_US
#define TCP_RTO_MIN_US 45
#endif

namespace offcore::mcast {
namespace {

constexpr int kResendUs = 10'000;
constexpr int kUnsentBytes = 256 << 10;  // in the kernel, where nothing overtakes them

constexpr size_t kInputBytes = 8 << 10;  // payloads go past it
constexpr size_t kPartsMax = 64;
constexpr int kReadsMax = 64;  // a turn
constexpr int kBacklog = 4096;

bool again(int error) { return error == EAGAIN || error == EINTR; }

}  // namespace

MessageStream::MessageStream(Descriptor socket) : socket_(std::move(socket)), input_(kInputBytes) {
  const int on = 1;
  setsockopt(fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  // A lone lost segment is sent again after 200 ms otherwise, as it still is by older kernels.
  setsockopt(fd(), IPPROTO_TCP, TCP_RTO_MIN_US, &kResendUs, sizeof(kResendUs));
  setsockopt(fd(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsentBytes, sizeof(kUnsentBytes));
}

void MessageStream::push(const Message& message, std::span<const std::byte> data) {
  Queued queued;
  encode(message, queued.message.data());
  queued.data = data;
  queued.sequence = message.sequence;
  auto place = queue_.end();
  if (data.empty()) {
    const auto first = queue_.begin() + (sent_ > 0 ? 1 : 0);  // what is under way ends first
    place = std::find_if(first, queue_.end(), [](const Queued& one) { return !one.data.empty(); });
  }
  queue_.insert(place, std::move(queued));
}

MessageStream::StreamState MessageStream::broken(std::string reason) {
  reason_ = std::move(reason);
  return StreamState::broken;
}

MessageStream::StreamState MessageStream::flush() {
  while (!queue_.empty()) {
    std::array<iovec, kPartsMax> parts;
    size_t count = 0;
    size_t skip = sent_;
    for (size_t i = 0; i < queue_.size() && count + 2 <= kPartsMax; ++i) {
      for (std::span<const std::byte> part :
           {std::span<const std::byte>(queue_[i].message), queue_[i].data}) {
        const size_t skipped = std::min(skip, part.size());
        skip -= skipped;
        part = part.subspan(skipped);
        if (!part.empty()) parts[count++] = {const_cast<std::byte*>(part.data()), part.size()};
      }
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t done = sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (done < 0) {
      if (again(errno) || errno == ENOTCONN) return StreamState::open;
      return broken(cat("sending failed: ", std::strerror(errno)));
    }
    sent_ += static_cast<size_t>(done);
    while (!queue_.empty() && sent_ >= queue_.front().bytes()) {
      sent_ -= queue_.front().bytes();
      queue_.pop_front();
    }
  }
  return StreamState::open;
}

bool MessageStream::holds_data(Sequence sequence) const {
  return std::ranges::any_of(queue_, [&](const Queued& one) {
    return one.sequence == sequence && !one.data.empty() && one.copy.empty();
  });
}

void MessageStream::let_go() {
  const Queued* const under_way = sent_ > 0 ? &queue_.front() : nullptr;
  std::erase_if(queue_, [&](const Queued& one) { return !one.data.empty() && &one != under_way; });
  if (sent_ > 0 && queue_.front().copy.empty()) {
    Queued& first = queue_.front();
    first.copy.assign(first.data.begin(), first.data.end());
    first.data = first.copy;
  }
  if (in_payload_) dropped_ = true;
  place_ = {};
}

void MessageStream::finish() { shutdown(fd(), SHUT_WR); }

MessageStream::StreamState MessageStream::receive(MessageReader& reader) {
  for (int turn = 0; turn < kReadsMax; ++turn) {
    if (begin_ == end_) begin_ = end_ = 0;
    if (end_ == input_.size()) {  // a message lies across the end
      std::memmove(input_.data(), input_.data() + begin_, end_ - begin_);
      end_ -= std::exchange(begin_, 0);
    }
    // A payload goes straight to its place, and what follows it into the input.
    std::array<iovec, 2> parts{
        {{place_.data(), place_.size()}, {input_.data() + end_, input_.size() - end_}}};
    const size_t direct = begin_ == end_ && in_payload_ ? place_.size() : 0;
    const ssize_t got = direct > 0 ? readv(fd(), parts.data(), 2)
                                   : recv(fd(), parts[1].iov_base, parts[1].iov_len, 0);
    if (got == 0) return StreamState::closed;
    if (got < 0) {
      if (again(errno) || errno == ENOTCONN) return StreamState::open;
      return broken(std::strerror(errno));
    }
    const size_t placed = std::min(direct, static_cast<size_t>(got));
    place_ = place_.subspan(placed);
    payload_left_ -= placed;
    end_ += static_cast<size_t>(got) - placed;
    if (const StreamState state = parse(reader); state != StreamState::open) return state;
    if (static_cast<size_t>(got) < direct + parts[1].iov_len) break;  // there was no more
  }
  return StreamState::open;
}

MessageStream::StreamState MessageStream::parse(MessageReader& reader) {
  while (true) {
    if (in_payload_) {
      const size_t taken = std::min<uint64_t>(payload_left_, end_ - begin_);
      const size_t copied = std::min(taken, place_.size());
      if (copied > 0) std::memcpy(place_.data(), input_.data() + begin_, copied);
      place_ = place_.subspan(copied);
      begin_ += taken;
      payload_left_ -= taken;
      if (payload_left_ > 0) return StreamState::open;
      in_payload_ = false;
      if (dropped_) reply_.payload_bytes = 0;
      if (!reader.read(reply_)) return StreamState::closed;
    }
    if (end_ - begin_ < kMessageBytes) return StreamState::open;
    const std::optional<Message> message = decode(input_.data() + begin_);
    if (!message) return broken("it sent bytes that are not a message");
    begin_ += kMessageBytes;
    if (message->payload_bytes == 0) {
      if (!reader.read(*message)) return StreamState::closed;
      continue;
    }
    reply_ = *message;
    place_ = reader.place_of(reply_);
    payload_left_ = reply_.payload_bytes;
    dropped_ = place_.size() != payload_left_;
    if (dropped_) place_ = {};
    in_payload_ = true;
  }
}

Descriptor listen_tcp(const Address& address) {
  Descriptor listener(
      socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP));
  if (!listener || bind(listener.get(), address.raw(), address.bytes) != 0 ||
      listen(listener.get(), kBacklog) != 0) {
    fail_errno(Code::driver, cat("cannot listen at ", address.text()));
  }
  return listener;
}

Descriptor connect_tcp(const Address& from, const Address& to) {
  Descriptor opened(socket(to.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP));
  if (!opened) fail_errno(Code::driver, "cannot open a TCP socket");
  const int on = 1;  // the port is chosen by connect(), for that destination
  setsockopt(opened.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof(on));
  if (bind(opened.get(), from.raw(), from.bytes) != 0) {
    fail_errno(Code::driver, cat("cannot connect from ", from.host()));
  }
  if (connect(opened.get(), to.raw(), to.bytes) != 0 && errno != EINPROGRESS) {
    fail_errno(Code::driver, cat("cannot connect to ", to.text()));
  }
  return opened;
}

int connect_error(int fd) {
  int error = 0;
  socklen_t bytes = sizeof(error);
  return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 ? error : errno;
}

}  // namespace offcore::mcast
