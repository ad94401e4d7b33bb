#include "core/mcast/udp/multicast.h"

#include <linux/filter.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/udp.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>

#include "core/base/error.h"

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif
#ifndef IPV6_MULTICAST_ALL
#define IPV6_MULTICAST_ALL 29
#endif

namespace offcore::mcast {
namespace {

constexpr size_t kSegmentsMax = 64;      // datagrams that GSO takes as one
constexpr size_t kRunBytesMax = 65'000;  // below the largest IP packet with all headers
constexpr size_t kRunsMax = 8;           // a system call
constexpr size_t kDatagramsMax = 64;     // a system call
constexpr size_t kSlotsMax = 256;

void set(int fd, int level, int name, int value, std::string_view what) {
  if (setsockopt(fd, level, name, &value, sizeof(value)) != 0) {
    fail_errno(Code::driver, cat("cannot set a multicast socket's ", what));
  }
}

// The kernel takes what its limit allows, and doubles it for its own book-keeping. Asking beyond
// the limit needs root.
uint32_t grow_buffer(int fd, int name, int name_force, uint32_t bytes) {
  const int wanted = static_cast<int>(std::min<uint32_t>(bytes, INT_MAX / 2));
  int given = 0;
  socklen_t size = sizeof(given);
  if (setsockopt(fd, SOL_SOCKET, name_force, &wanted, sizeof(wanted)) != 0) {
    set(fd, SOL_SOCKET, name, wanted, "buffer size");
  }
  if (getsockopt(fd, SOL_SOCKET, name, &given, &size) != 0) {
    fail_errno(Code::driver, "cannot query a socket's buffer size");
  }
  return static_cast<uint32_t>(given) / 2;
}

Descriptor open_udp(const Interface& interface, const Address& group) {
  if (!group.multicast()) {
    fail(Code::invalid, group.host(), " is not a multicast group; 239.0.0.0/8 and ff15::/16 are");
  }
  if (interface.address.family() != group.family()) {
    fail(Code::invalid, "group ", group.host(), " and interface ", interface.name,
         " are of different IP versions");
  }
  Descriptor opened(socket(group.family(), SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!opened) fail_errno(Code::driver, "cannot open a UDP socket");
  return opened;
}

bool no_room(int error) { return error == EAGAIN || error == EINTR || error == ENOBUFS; }

// Bytes of each datagram of a run.
uint32_t segment_of(msghdr& message, size_t run_bytes) {
  for (cmsghdr* at = CMSG_FIRSTHDR(&message); at != nullptr; at = CMSG_NXTHDR(&message, at)) {
    int merged = 0;
    if (at->cmsg_level != IPPROTO_UDP || at->cmsg_type != UDP_GRO) continue;
    std::memcpy(&merged, CMSG_DATA(at), sizeof(merged));
    if (merged > 0) return static_cast<uint32_t>(merged);
  }
  return static_cast<uint32_t>(run_bytes);
}

// What the kernel answers where a device or a route cannot do GSO.
bool no_gso(int error) { return error == EIO || error == EINVAL || error == EOPNOTSUPP; }

}  // namespace

SendSocket::SendSocket(const Interface& interface, const Address& group, const SendOptions& options)
    : socket_(open_udp(interface, group)), gso_(options.gso) {
  const int fd = socket_.get();
  if (group.family() == AF_INET6) {
    set(fd, IPPROTO_IPV6, IPV6_MULTICAST_IF, static_cast<int>(interface.index), "interface");
    set(fd, IPPROTO_IPV6, IPV6_MULTICAST_HOPS, options.hops, "hops");
    set(fd, IPPROTO_IPV6, IPV6_MULTICAST_LOOP, options.loop, "loop");
    set(fd, IPPROTO_IPV6, IPV6_MTU_DISCOVER, IPV6_PMTUDISC_DO, "refusal to fragment");
  } else {
    ip_mreqn from{};
    from.imr_ifindex = static_cast<int>(interface.index);
    if (setsockopt(fd, IPPROTO_IP, IP_MULTICAST_IF, &from, sizeof(from)) != 0) {
      fail_errno(Code::driver, cat("cannot send multicast from ", interface.name));
    }
    set(fd, IPPROTO_IP, IP_MULTICAST_TTL, options.hops, "hops");
    set(fd, IPPROTO_IP, IP_MULTICAST_LOOP, options.loop, "loop");
    set(fd, IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO, "refusal to fragment");
  }
  buffer_bytes_ = grow_buffer(fd, SO_SNDBUF, SO_SNDBUFFORCE, options.buffer_bytes);
  if (bind(fd, interface.address.raw(), interface.address.bytes) != 0) {
    fail_errno(Code::driver, cat("cannot send from ", interface.address.host()));
  }
  const Address to = group.scoped_to(interface);
  if (connect(fd, to.raw(), to.bytes) != 0) {
    fail_errno(Code::driver, cat("no route from ", interface.name, " to group ", group.host()));
  }
  source_ = Address::bound_to(fd);
}

struct SendSocket::SendBatch {
  union Control {
    cmsghdr align;
    char bytes[CMSG_SPACE(sizeof(uint16_t))];
  };
  std::array<iovec, 2 * kSegmentsMax * kRunsMax> parts;
  std::array<mmsghdr, kDatagramsMax> messages;
  std::array<Control, kRunsMax> controls;
  std::array<size_t, kDatagramsMax> datagrams;  // of a message
};

// Runs of datagrams of one size, of which only the last may be shorter. How many messages.
size_t SendSocket::pack(std::span<const Datagram> datagrams, SendBatch& batch) const {
  const bool merge = gso_;
  size_t part = 0;
  size_t run = 0;
  for (size_t i = 0; i < datagrams.size() && run < (merge ? kRunsMax : kDatagramsMax); ++run) {
    const size_t begin = part;
    const size_t segment = datagrams[i].bytes();
    const size_t count_max =
        merge ? std::clamp<size_t>(kRunBytesMax / std::max<size_t>(segment, 1), 1, kSegmentsMax)
              : 1;
    size_t count = 0;
    size_t last = segment;
    while (count < count_max && i < datagrams.size() && last == segment) {
      last = datagrams[i].bytes();
      if (last > segment) break;
      for (const auto& bytes : {datagrams[i].header, datagrams[i].payload}) {
        if (!bytes.empty()) {
          batch.parts[part++] = {const_cast<std::byte*>(bytes.data()), bytes.size()};
        }
      }
      ++count;
      ++i;
    }
    msghdr& message = batch.messages[run].msg_hdr;
    message = {};
    message.msg_iov = &batch.parts[begin];
    message.msg_iovlen = part - begin;
    batch.datagrams[run] = count;
    if (count > 1) {
      message.msg_control = batch.controls[run].bytes;
      message.msg_controllen = sizeof(batch.controls[run].bytes);
      cmsghdr* control = CMSG_FIRSTHDR(&message);
      control->cmsg_level = IPPROTO_UDP;
      control->cmsg_type = UDP_SEGMENT;
      control->cmsg_len = CMSG_LEN(sizeof(uint16_t));
      const auto size = static_cast<uint16_t>(segment);
      std::memcpy(CMSG_DATA(control), &size, sizeof(size));
    }
  }
  return run;
}

size_t SendSocket::send(std::span<const Datagram> datagrams) {
  SendBatch batch;
  size_t sent = 0;
  while (sent < datagrams.size()) {
    const size_t runs = pack(datagrams.subspan(sent), batch);
    const int done = sendmmsg(socket_.get(), batch.messages.data(), static_cast<unsigned>(runs),
                              MSG_DONTWAIT | MSG_NOSIGNAL);
    counters_.calls.add(1);
    for (int i = 0; i < done; ++i) {
      const auto at = static_cast<size_t>(i);
      for (size_t k = 0; k < batch.datagrams[at]; ++k) {
        counters_.bytes.add(datagrams[sent++].bytes());
      }
      counters_.datagrams.add(batch.datagrams[at]);
    }
    if (done >= 0) continue;
    if (no_room(errno)) break;
    if (gso_ && batch.datagrams[0] > 1 && no_gso(errno)) {
      gso_ = false;
    } else if (errno == EPERM || errno == ECONNREFUSED) {  // a firewall, or what came back earlier
      counters_.refused.add(batch.datagrams[0]);
      sent += batch.datagrams[0];
    } else if (errno == EMSGSIZE) {
      fail(Code::invalid, "datagrams of ", datagrams[sent].bytes(),
           " bytes do not fit into the path's packets: request a lower MTU");
    } else {
      fail_errno(Code::driver, "cannot send multicast");
    }
  }
  return sent;
}

ReceiveSocket::ReceiveSocket(const Interface& interface, const Address& group,
                             const ReceiveOptions& options)
    : socket_(open_udp(interface, group)) {
  const int fd = socket_.get();
  set(fd, SOL_SOCKET, SO_REUSEADDR, 1, "sharing of its port");
  const Address at = group.scoped_to(interface);
  if (bind(fd, at.raw(), at.bytes) != 0) {
    fail_errno(Code::driver, cat("cannot receive at ", group.text()));
  }
  // Only this socket's own groups on its own interface, not what others of the host joined.
  if (group.family() == AF_INET6) {
    set(fd, IPPROTO_IPV6, IPV6_MULTICAST_ALL, 0, "own groups");
  } else {
    set(fd, IPPROTO_IP, IP_MULTICAST_ALL, 0, "own groups");
  }
  group_req join{};
  join.gr_interface = interface.index;
  std::memcpy(&join.gr_group, &at.storage, at.bytes);
  if (setsockopt(fd, group.family() == AF_INET6 ? IPPROTO_IPV6 : IPPROTO_IP, MCAST_JOIN_GROUP,
                 &join, sizeof(join)) != 0) {
    fail_errno(Code::driver, cat("cannot join group ", group.host(), " on ", interface.name));
  }
  const int on = 1;
  gro_ = options.gro && setsockopt(fd, IPPROTO_UDP, UDP_GRO, &on, sizeof(on)) == 0;
  buffer_bytes_ = grow_buffer(fd, SO_RCVBUF, SO_RCVBUFFORCE, options.buffer_bytes);

  if (!gro_) make_ring(options);
}

// One byte more than expected tells a longer datagram; 64 is for the copies' sake.
void ReceiveSocket::make_ring(const ReceiveOptions& options) {
  slot_bytes_ = (options.datagram_bytes + 1 + 63) / 64 * 64;
  const size_t slots = std::clamp<size_t>(options.ring_bytes / slot_bytes_, 1, kSlotsMax);
  ring_.resize(slots * slot_bytes_);
  taken_.resize(slots);
  messages_.resize(slots);
  for (size_t i = 0; i < slots; ++i) parts_.push_back({&ring_[i * slot_bytes_], slot_bytes_});
  for (size_t i = 0; i < slots; ++i) {
    messages_[i].msg_hdr.msg_iov = &parts_[i];
    messages_[i].msg_hdr.msg_iovlen = 1;
  }
}

// Classic BPF sees a UDP packet from its UDP header on, and the IP header at SKF_NET_OFF.
void ReceiveSocket::ignore(const Address& source) {
  std::vector<sock_filter> code;
  std::vector<uint32_t> words;  // the source address
  uint32_t offset = 0;
  if (source.family() == AF_INET6) {
    const auto& raw = reinterpret_cast<const sockaddr_in6&>(source.storage).sin6_addr;
    words.resize(4);
    std::memcpy(words.data(), &raw, sizeof(raw));
    offset = 8;
  } else {
    words.push_back(reinterpret_cast<const sockaddr_in&>(source.storage).sin_addr.s_addr);
    offset = 12;
  }
  const auto step = [&](uint16_t op, uint32_t k, size_t otherwise = 0) {
    code.push_back({op, 0, static_cast<uint8_t>(otherwise), k});
  };
  step(BPF_LD | BPF_H | BPF_ABS, 0);
  step(BPF_JMP | BPF_JEQ | BPF_K, source.port(), 2 * words.size() + 1);
  for (size_t i = 0; i < words.size(); ++i) {
    step(BPF_LD | BPF_W | BPF_ABS, static_cast<uint32_t>(SKF_NET_OFF) + offset + 4 * i);
    step(BPF_JMP | BPF_JEQ | BPF_K, ntohl(words[i]), 2 * (words.size() - i) - 1);
  }
  step(BPF_RET | BPF_K, 0);
  step(BPF_RET | BPF_K, UINT32_MAX);
  const sock_fprog program{static_cast<uint16_t>(code.size()), code.data()};
  if (setsockopt(fd(), SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program)) != 0) {
    fail_errno(Code::driver, "cannot filter a rank's own datagrams");
  }
}

ReceiveSocket::DatagramRun ReceiveSocket::receive_run(std::span<iovec> parts) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t got = recvmsg(fd(), &message, MSG_DONTWAIT);
  counters_.calls.add(1);
  if (got < 0) {
    if (no_room(errno)) return {};
    if (errno == ECONNREFUSED) return {.more = true};
    fail_errno(Code::driver, "cannot receive multicast");
  }
  if ((message.msg_flags & MSG_TRUNC) != 0) counters_.cut.add(1);
  if (got == 0 || (message.msg_flags & MSG_TRUNC) != 0) return {.more = true};
  const DatagramRun run{.bytes = static_cast<size_t>(got),
                        .segment_bytes = segment_of(message, static_cast<size_t>(got)),
                        .more = true};
  count(run.bytes, run.segment_bytes);
  return run;
}

void ReceiveSocket::count(size_t bytes, uint32_t segment_bytes) {
  counters_.runs.add(1);
  counters_.bytes.add(bytes);
  counters_.datagrams.add((bytes + segment_bytes - 1) / segment_bytes);
}

size_t ReceiveSocket::take() {
  const int got = recvmmsg(fd(), messages_.data(), static_cast<unsigned>(messages_.size()),
                           MSG_DONTWAIT, nullptr);
  counters_.calls.add(1);
  if (got < 0) {
    if (no_room(errno) || errno == ECONNREFUSED) return 0;
    fail_errno(Code::driver, "cannot receive multicast");
  }
  size_t taken = 0;
  for (size_t i = 0; i < static_cast<size_t>(got); ++i) {
    const size_t bytes = messages_[i].msg_len;
    if ((messages_[i].msg_hdr.msg_flags & MSG_TRUNC) != 0 || bytes == slot_bytes_) {
      counters_.cut.add(1);
    } else if (bytes > 0) {
      taken_[taken++] = {ring_.data() + i * slot_bytes_, bytes};
      count(bytes, static_cast<uint32_t>(bytes));
    }
  }
  return taken;
}

uint64_t ReceiveSocket::dropped() const {
  std::array<uint32_t, 9> memory{};  // SK_MEMINFO_VARS
  constexpr size_t kDrops = 8;
  socklen_t bytes = sizeof(memory);
  if (getsockopt(fd(), SOL_SOCKET, SO_MEMINFO, memory.data(), &bytes) != 0) return 0;
  return memory[kDrops];
}

Descriptor open_datagrams(const Address& at) {
  Descriptor opened(socket(at.family(), SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!opened || bind(opened.get(), at.raw(), at.bytes) != 0) {
    fail_errno(Code::driver, cat("cannot open a UDP socket at ", at.host()));
  }
  return opened;
}

uint32_t receive_buffer_bytes(int family, uint32_t asked_bytes) {
  const Descriptor trial(socket(family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!trial) fail_errno(Code::driver, "cannot open a UDP socket");
  return grow_buffer(trial.get(), SO_RCVBUF, SO_RCVBUFFORCE, asked_bytes);
}

}  // namespace offcore::mcast
