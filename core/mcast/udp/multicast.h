// UDP multicast: a socket that sends to one group, and a socket that receives one group.
//
// Both move many datagrams a system call. The sender hands the kernel runs of equal datagrams as
// one (GSO), gathered from headers and from the user's buffer without a copy of ours; the receiver
// takes runs that the kernel has merged (GRO). Where the kernel refuses either, datagrams go one by
// one, and gso() and gro() say so. Each socket is one thread's at a time; counters may be read by
// any.
#pragma once
#include <sys/socket.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/base/descriptor.h"
#include "core/mcast/udp/address.h"
#include "core/mcast/udp/counter.h"

namespace offcore::mcast {

struct Datagram {
  std::span<const std::byte> header;
  std::span<const std::byte> payload;
  size_t bytes() const { return header.size() + payload.size(); }
};

struct SendOptions {
  int hops = 1;      // TTL: how many routers a datagram may pass, plus one
  bool loop = true;  // to receivers of this host (and namespace) too
  bool gso = true;
  uint32_t buffer_bytes = 4 << 20;
};

class SendSocket {
 public:
  SendSocket(const Interface& interface, const Address& group, const SendOptions& options);

  // Gives as many to the kernel as it takes without waiting; how many that were. What the network
  // then drops is nobody's news here.
  size_t send(std::span<const Datagram> datagrams);

  int fd() const { return socket_.get(); }
  Address source() const { return source_; }
  bool gso() const { return gso_; }  // turns false when the kernel refuses
  uint32_t buffer_bytes() const { return buffer_bytes_; }

  struct SendCounters {
    Counter datagrams, bytes, calls;
    Counter refused;  // dropped on this host: a full queue or a firewall
  };
  const SendCounters& counters() const { return counters_; }

 private:
  struct SendBatch;
  size_t pack(std::span<const Datagram> datagrams, SendBatch& batch) const;

  Descriptor socket_;
  Address source_;
  std::atomic<bool> gso_;
  uint32_t buffer_bytes_ = 0;
  SendCounters counters_;
};

struct ReceiveOptions {
  bool gro = true;
  uint32_t buffer_bytes = 4 << 20;  // the kernel's, before datagrams are dropped
  uint32_t ring_bytes = 1 << 20;    // of staging buffers, where there is no GRO
  uint32_t datagram_bytes = 65507;  // the largest that is expected: longer ones are cut and counted
};

class ReceiveSocket {
 public:
  ReceiveSocket(const Interface& interface, const Address& group, const ReceiveOptions& options);

  // The kernel drops what comes from these senders (a rank's own datagrams, looped back). At most
  // one call.
  void ignore(const Address& source);

  // Where gro() is false: takes what has arrived, at most one ring full, without waiting, and calls
  // back for every datagram. The caller may scribble on it until the next call. How many there
  // were.
  template <typename Each>
  size_t receive(Each&& each) {
    const size_t count = take();
    for (size_t i = 0; i < count; ++i) each(taken_[i]);
    return count;
  }

  // One run of datagrams, scattered over these parts, which hold the longest: each has
  // segment_bytes, only the last one may have fewer. 0 bytes: none, or one that does not count, and
  // then there may be `more`.
  struct DatagramRun {
    size_t bytes = 0;
    uint32_t segment_bytes = 0;
    bool more = false;
  };
  DatagramRun receive_run(std::span<iovec> parts);

  int fd() const { return socket_.get(); }
  bool gro() const { return gro_; }
  uint32_t buffer_bytes() const { return buffer_bytes_; }  // what the kernel gave
  uint64_t dropped() const;  // by the kernel, at a full buffer or by ignore(), since it was opened

  struct DatagramCounters {
    Counter datagrams, bytes, calls;
    Counter runs;  // what the kernel handed over; fewer than datagrams where it merged
    Counter cut;   // longer than a staging buffer
  };
  const DatagramCounters& counters() const { return counters_; }

 private:
  void make_ring(const ReceiveOptions& options);
  size_t take();
  void count(size_t bytes, uint32_t segment_bytes);

  Descriptor socket_;
  bool gro_ = false;
  uint32_t buffer_bytes_ = 0;
  uint32_t slot_bytes_ = 0;
  std::vector<std::byte> ring_;
  std::vector<iovec> parts_;
  std::vector<mmsghdr> messages_;
  std::vector<std::span<std::byte>> taken_;
  DatagramCounters counters_;
};

// What a receiving socket's buffer will hold, of what is asked for.
uint32_t receive_buffer_bytes(int family, uint32_t asked_bytes);
// A plain UDP socket at an address, on a port that the kernel picks.
Descriptor open_datagrams(const Address& at);

}  // namespace offcore::mcast
