#include "core/mcast/udp/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/ioctl.h>

#include <cstring>
#include <exception>
#include <memory>
#include <thread>

#include "core/base/descriptor.h"
#include "core/base/error.h"
#include "core/base/threads.h"

namespace offcore::mcast {
namespace {

constexpr uint32_t kUdpHeaderBytes = 8;
constexpr uint32_t kIpv4HeaderBytes = 20;
constexpr uint32_t kIpv6HeaderBytes = 40;
constexpr uint32_t kUdpBytesMax = 65535;

using Interfaces = std::unique_ptr<ifaddrs, decltype(&freeifaddrs)>;

sockaddr_in& v4(sockaddr_storage& storage) { return reinterpret_cast<sockaddr_in&>(storage); }
sockaddr_in6& v6(sockaddr_storage& storage) { return reinterpret_cast<sockaddr_in6&>(storage); }
const sockaddr_in& v4(const sockaddr_storage& storage) {
  return reinterpret_cast<const sockaddr_in&>(storage);
}
const sockaddr_in6& v6(const sockaddr_storage& storage) {
  return reinterpret_cast<const sockaddr_in6&>(storage);
}

uint32_t mtu_of(const std::string& name, int family) {
  const Descriptor asker(socket(family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq request{};
  name.copy(request.ifr_name, IFNAMSIZ - 1);
  if (!asker || ioctl(asker.get(), SIOCGIFMTU, &request) != 0) {
    fail_errno(Code::driver, cat("cannot query the MTU of ", name));
  }
  return static_cast<uint32_t>(request.ifr_mtu);
}

Address address_of(const sockaddr* raw) {
  Address address;
  address.bytes = raw->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  std::memcpy(&address.storage, raw, address.bytes);
  return address;
}

}  // namespace

Address Address::of(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) {
    fail(Code::invalid, "'", host, "' is not an IPv4 or IPv6 address; pass a number like 10.0.0.1");
  }
  const Address address = address_of(found->ai_addr);
  freeaddrinfo(found);
  return address.with_port(port);
}

Address Address::bound_to(int fd) {
  Address address;
  address.bytes = sizeof(address.storage);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.bytes) != 0) {
    fail_errno(Code::driver, "cannot query a socket's address");
  }
  return address;
}

uint16_t Address::port() const {
  return ntohs(family() == AF_INET6 ? v6(storage).sin6_port : v4(storage).sin_port);
}

std::string Address::host() const {
  char text[NI_MAXHOST] = "";
  getnameinfo(raw(), bytes, text, sizeof(text), nullptr, 0, NI_NUMERICHOST);
  const std::string host = text;
  return host.substr(0, host.find('%'));
}

bool Address::multicast() const {
  if (family() == AF_INET6) return IN6_IS_ADDR_MULTICAST(&v6(storage).sin6_addr);
  return family() == AF_INET && IN_MULTICAST(ntohl(v4(storage).sin_addr.s_addr));
}

bool Address::link_local() const {
  return family() == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&v6(storage).sin6_addr);
}

Address Address::scoped_to(const Interface& interface) const {
  Address address = *this;
  if (link_local() || (family() == AF_INET6 && multicast())) {
    v6(address.storage).sin6_scope_id = interface.index;
  }
  return address;
}

Address Address::with_port(uint16_t port) const {
  Address address = *this;
  if (family() == AF_INET6) {
    v6(address.storage).sin6_port = htons(port);
  } else {
    v4(address.storage).sin_port = htons(port);
  }
  return address;
}

Address Address::next_group(uint32_t n) const {
  Address address = *this;
  unsigned char* last = family() == AF_INET6
                            ? v6(address.storage).sin6_addr.s6_addr + 12
                            : reinterpret_cast<unsigned char*>(&v4(address.storage).sin_addr);
  uint32_t word = 0;
  std::memcpy(&word, last, sizeof(word));
  word = htonl(ntohl(word) + n);
  std::memcpy(last, &word, sizeof(word));
  if (!address.multicast()) {
    fail(Code::invalid, "fewer than ", n + 1, " multicast groups follow ", host());
  }
  return address;
}

std::string Address::text() const {
  return family() == AF_INET6 ? cat("[", host(), "]:", port()) : cat(host(), ":", port());
}

uint32_t Interface::datagram_bytes() const {
  const uint32_t headers =
      kUdpHeaderBytes + (address.family() == AF_INET6 ? kIpv6HeaderBytes : kIpv4HeaderBytes);
  return std::min(mtu, kUdpBytesMax) - std::min(headers, mtu);
}

Interface find_interface(const std::string& name_or_address, int family) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) fail_errno(Code::driver, "cannot list the network interfaces");
  const Interfaces interfaces(list, &freeifaddrs);
  Interface found;
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr || at->ifa_addr->sa_family != family) continue;
    const Address address = address_of(at->ifa_addr);
    const bool loopback = (at->ifa_flags & IFF_LOOPBACK) != 0;
    const bool able = (at->ifa_flags & IFF_UP) != 0 && (loopback || at->ifa_flags & IFF_MULTICAST);
    const bool named = name_or_address == at->ifa_name || name_or_address == address.host();
    if (named && !able) {
      fail(Code::invalid, "interface ", at->ifa_name, " is down or takes no multicast");
    }
    if (!named && !(name_or_address.empty() && able)) continue;
    // No loopback unless it is named, and of one interface an address that is not of its link only.
    const bool better = found.name.empty() || (found.loopback && !loopback && !named) ||
                        (found.name == at->ifa_name && found.address.link_local());
    if (!better) continue;
    found = {.name = at->ifa_name, .loopback = loopback, .address = address.with_port(0)};
  }
  if (found.name.empty()) {
    fail(Code::invalid, "no interface ", name_or_address.empty() ? "" : cat(name_or_address, " "),
         "with an IPv", family == AF_INET6 ? 6 : 4, " address is here; see `ip address`");
  }
  found.index = if_nametoindex(found.name.c_str());
  found.mtu = mtu_of(found.name, family);
  return found;
}

// A thread of its own is moved there: the caller's never leaves its namespace, whatever fails.
void in_namespace(int namespace_fd, const std::function<void()>& make) {
  if (namespace_fd < 0) return make();
  std::exception_ptr failure;
  const SignalsBlocked blocked;
  std::thread([&] {
    try {
      if (setns(namespace_fd, CLONE_NEWNET) != 0) {
        fail_errno(Code::driver, "cannot enter the network namespace");
      }
      make();
    } catch (...) {
      failure = std::current_exception();
    }
  }).join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace offcore::mcast
