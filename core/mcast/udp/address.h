// Socket addresses and network interfaces, IPv4 and IPv6, in the network namespace of the thread.
#pragma once
#include <sys/socket.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace offcore::mcast {

struct Interface;

// An address and a port, as the kernel wants them.
struct Address {
  sockaddr_storage storage{};
  socklen_t bytes = 0;

  // `host` is a number ("10.0.0.1", "fd00::1"), never a name to be looked up.
  static Address of(const std::string& host, uint16_t port);
  static Address bound_to(int fd);  // where a socket is bound

  int family() const { return storage.ss_family; }
  uint16_t port() const;
  std::string host() const;  // without a scope, which means something on one host only
  bool multicast() const;
  bool link_local() const;  // IPv6
  // The same host and scope, with a port; the n-th multicast group after this one.
  Address with_port(uint16_t port) const;
  Address next_group(uint32_t n) const;
  // Addresses and groups of one link (IPv6) need to be told which link.
  Address scoped_to(const Interface& interface) const;
  std::string text() const;  // "10.0.0.1:4000", "[fd00::1]:4000"
  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

struct Interface {
  std::string name;
  unsigned index = 0;
  uint32_t mtu = 0;
  bool loopback = false;
  Address address;  // its first of the family, port 0

  // The largest UDP payload of one unfragmented packet.
  uint32_t datagram_bytes() const;
};

// The interface of that name or that has that address; empty: the first that is up, takes
// multicast and has an address of the family (AF_INET, AF_INET6), and if there is none, loopback.
// Throws invalid where there is none such.
Interface find_interface(const std::string& name_or_address, int family);

// Runs `make` in a network namespace, given by a descriptor of it: sockets that it opens stay
// there. -1: where the calling thread is.
void in_namespace(int namespace_fd, const std::function<void()>& make);

}  // namespace offcore::mcast
