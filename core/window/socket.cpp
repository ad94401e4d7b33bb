#include "core/window/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <memory>
#include <thread>

#include "core/base/error.h"

namespace offcore {
namespace {

constexpr uint32_t kMagic = 0x3243464f;  // "OFC2"

struct Header {
  uint32_t magic = kMagic;
  FrameKind kind = FrameKind::knock;
  uint16_t has_fd = 0;
  uint64_t bytes = 0;
};
static_assert(sizeof(Header) == 16);

using ResolvedAddresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

ResolvedAddresses resolve(const std::string& address) {
  const std::string port = std::to_string(port_of(address));
  std::string host = address.substr(0, address.rfind(':'));
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int status = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); status != 0) {
    fail(Code::invalid, "cannot find the host of '", address, "': ", gai_strerror(status));
  }
  return ResolvedAddresses(found, &freeaddrinfo);
}

Descriptor open_socket(int family) {
  return Descriptor(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

// A retry loop on a free port can meet itself: TCP's simultaneous open.
bool connected_to_itself(int fd) {
  sockaddr_storage here{};
  sockaddr_storage there{};
  socklen_t here_bytes = sizeof(here);
  socklen_t there_bytes = sizeof(there);
  return getsockname(fd, reinterpret_cast<sockaddr*>(&here), &here_bytes) == 0 &&
         getpeername(fd, reinterpret_cast<sockaddr*>(&there), &there_bytes) == 0 &&
         here_bytes == there_bytes && std::memcmp(&here, &there, here_bytes) == 0;
}

int connect_error(int fd, const addrinfo& address, const Deadline& deadline) {
  if (connect(fd, address.ai_addr, address.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  if (!wait_ready(fd, POLLOUT, deadline)) return ETIMEDOUT;
  int error = 0;
  socklen_t bytes = sizeof(error);
  return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 ? error : errno;
}

// An abstract name starts with a zero byte and may hold any bytes.
socklen_t unix_address(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  const size_t bytes = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), bytes);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + bytes);
}

bool again(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

uint16_t port_of(const std::string& address) {
  const size_t colon = address.rfind(':');
  uint16_t port = 0;
  if (colon != std::string::npos && colon > 0) {
    const char* const last = address.data() + address.size();
    const auto [end, error] = std::from_chars(address.data() + colon + 1, last, port);
    if (error == std::errc() && end == last && port > 0) return port;
  }
  fail(Code::invalid, "'", address,
       "' is not an address: write host:port, with a port in 1..65535");
}

bool wait_ready(int fd, short events, const Deadline& deadline) {
  while (true) {
    pollfd entry{.fd = fd, .events = events, .revents = 0};
    const int count = poll(&entry, 1, static_cast<int>(deadline.nap_ns() / 1'000'000 + 1));
    if (count > 0 || (count < 0 && errno != EINTR)) return true;  // the next call reports errors
    deadline.listen();
    if (deadline.passed()) return false;
  }
}

Connection::Status Connection::send(FrameKind kind, std::string_view payload, int fd,
                                    const Deadline& deadline) {
  const Header header{.magic = kMagic, .kind = kind, .has_fd = fd >= 0, .bytes = payload.size()};
  uint64_t sent = 0;
  while (sent < sizeof(header) + payload.size()) {
    const uint64_t into_header = std::min<uint64_t>(sent, sizeof(header));
    const uint64_t into_payload = sent - into_header;
    iovec parts[2] = {
        {const_cast<char*>(reinterpret_cast<const char*>(&header)) + into_header,
         sizeof(header) - into_header},
        {const_cast<char*>(payload.data()) + into_payload, payload.size() - into_payload}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (fd >= 0 && sent == 0) {  // a descriptor travels with the frame's first byte
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      cmsghdr* rights = CMSG_FIRSTHDR(&message);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(rights), &fd, sizeof(int));
    }
    const ssize_t count = sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
    if (count > 0) {
      sent += static_cast<uint64_t>(count);
    } else if (count < 0 && !again(errno)) {
      return Status::closed;
    } else if (!wait_ready(socket_.get(), POLLOUT, deadline)) {
      return Status::late;
    }
  }
  return Status::ok;
}

Connection::Status Connection::receive() {
  constexpr uint64_t kReadBytesMax = 256 << 10;
  // Who may say little is not given much memory to say it in.
  const size_t read_bytes = std::min(kReadBytesMax, payload_bytes_max_ + sizeof(Header));
  received_.erase(0, used_);
  used_ = 0;
  const size_t before = received_.size();
  received_.resize(before + read_bytes);
  iovec part{received_.data() + before, read_bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t count = recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
  received_.resize(before + static_cast<size_t>(std::max<ssize_t>(count, 0)));
  if (count < 0) return again(errno) ? Status::ok : Status::closed;
  for (cmsghdr* rights = CMSG_FIRSTHDR(&message); rights != nullptr;
       rights = CMSG_NXTHDR(&message, rights)) {
    if (rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS) continue;
    const size_t fds = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < fds; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(rights) + i * sizeof(int), sizeof(int));
      fds_.emplace_back(fd);
    }
  }
  if (fds_.size() > fds_max_ || (message.msg_flags & MSG_CTRUNC) != 0) return Status::garbage;
  return count == 0 ? Status::closed : Status::ok;
}

std::optional<Frame> Connection::next(Status& status) {
  Header header;
  const size_t left = received_.size() - used_;
  // The magic is checked as far as it has come: a stranger's few bytes are garbage at once.
  if (std::memcmp(&header, received_.data() + used_, std::min(left, sizeof(kMagic))) != 0) {
    status = Status::garbage;
    return std::nullopt;
  }
  if (left < sizeof(header)) return std::nullopt;
  std::memcpy(&header, received_.data() + used_, sizeof(header));
  if (header.bytes > payload_bytes_max_ || header.kind > FrameKind::goodbye) {
    status = Status::garbage;
    return std::nullopt;
  }
  if (left - sizeof(header) < header.bytes) return std::nullopt;
  if (header.has_fd != 0 && fds_.empty()) {
    status = Status::garbage;
    return std::nullopt;
  }
  Frame frame{.kind = header.kind,
              .payload = received_.substr(used_ + sizeof(header), header.bytes),
              .fd = {}};
  used_ += sizeof(header) + header.bytes;
  if (header.has_fd != 0) {
    frame.fd = std::move(fds_.front());
    fds_.pop_front();
  }
  return frame;
}

Connection::Status Connection::wait_frame(Frame& frame, const Deadline& deadline) {
  Status status = Status::ok;
  while (true) {
    Status frames = Status::ok;
    if (std::optional<Frame> found = next(frames)) {
      frame = std::move(*found);
      return Status::ok;
    }
    if (frames != Status::ok) return frames;
    if (status != Status::ok) return status;
    if (!wait_ready(socket_.get(), POLLIN, deadline)) return Status::late;
    status = receive();
  }
}

Descriptor listen_at(const std::string& address) {
  const ResolvedAddresses addresses = resolve(address);
  int error = 0;
  for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
    Descriptor listener = open_socket(at->ai_family);
    const int on = 1;
    if (listener && setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
        bind(listener.get(), at->ai_addr, at->ai_addrlen) == 0 &&
        listen(listener.get(), SOMAXCONN) == 0) {
      return listener;
    }
    error = errno;
  }
  fail(Code::driver, "rank 0 cannot listen at ", address, ": ", std::strerror(error),
       error == EADDRINUSE ? "; another job or another rank 0 uses this port: choose a free one"
                           : "; the address must be one of rank 0's host");
}

Descriptor connect_to(const std::string& address, const Deadline& deadline, std::string& reason) {
  const ResolvedAddresses addresses = resolve(address);
  for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
    Descriptor connection = open_socket(at->ai_family);
    if (!connection) fail_errno(Code::driver, "cannot open a socket");
    const int error = connect_error(connection.get(), *at, deadline);
    if (error == 0 && !connected_to_itself(connection.get())) {
      const int on = 1;
      setsockopt(connection.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      return connection;
    }
    reason = std::strerror(error == 0 ? ECONNREFUSED : error);
  }
  return {};
}

Descriptor listen_unix(std::string& name) {
  Descriptor listener = open_socket(AF_UNIX);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // Binding to no name at all makes the kernel pick a free one.
  if (!listener ||
      bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(sa_family_t)) != 0 ||
      listen(listener.get(), SOMAXCONN) != 0) {
    fail_errno(Code::driver, "cannot open a Unix socket");
  }
  socklen_t bytes = sizeof(address);
  if (getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &bytes) != 0) {
    fail_errno(Code::driver, "cannot name a Unix socket");
  }
  name.assign(address.sun_path + 1, bytes - offsetof(sockaddr_un, sun_path) - 1);
  return listener;
}

Descriptor connect_unix(const std::string& name, const Deadline& deadline) {
  Descriptor connection = open_socket(AF_UNIX);
  sockaddr_un address{};
  const socklen_t bytes = unix_address(name, address);
  if (!connection) return {};
  while (connect(connection.get(), reinterpret_cast<sockaddr*>(&address), bytes) != 0) {
    if (!again(errno) || deadline.passed()) return {};
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // its queue is full
    deadline.listen();
  }
  return connection;
}

Descriptor accept_from(int listener) {
  Descriptor accepted(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  // A client that gave up meanwhile is no error.
  const bool harmless = again(errno) || errno == ECONNABORTED || errno == EMFILE || errno == ENFILE;
  if (!accepted && !harmless) fail_errno(Code::driver, "cannot accept");
  return accepted;
}

uid_t peer_uid(int unix_fd) {
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(unix_fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) {
    fail_errno(Code::driver, "cannot query the owner of a Unix socket");
  }
  return peer.uid;
}

}  // namespace offcore
