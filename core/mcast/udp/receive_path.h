// Takes what a subgroup's socket has received to its places in the user's buffer.
//
// The kernel copies a run of datagrams once, and we would have to copy its chunks a second time.
// But mostly the chunks that come are those that follow the last ones: so the kernel is told to
// scatter a run, its heads to one side and its chunks to the places where the next ones belong. If
// others come, the run is gathered into a staging buffer, and its chunks are copied from there.
#pragma once
#include <sys/uio.h>

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "core/mcast/receiver.h"
#include "core/mcast/udp/counter.h"
#include "core/mcast/udp/multicast.h"

namespace offcore::mcast {

class ReceivePath {
 public:
  // `answer` gets the head of a datagram that asked for a credit, after it has been taken.
  ReceivePath(ReceiveSocket& socket, Receiver& receiver, const Group& group,
              std::function<void(const std::byte* head)> answer);

  // What has come, up to a bound so that others get their turn. True where much is still to come,
  // and this was so little that to be woken for the like of it costs more than it is worth.
  bool turn();

  struct ReceivePathCounters {
    Counter placed;  // datagrams whose chunk the kernel put to its place
  };
  const ReceivePathCounters& counters() const { return counters_; }

 private:
  void take(Receiver::ReceiveVisit& batch, std::span<std::byte> run, uint32_t segment_bytes);
  bool take_scattered(Receiver::ReceiveVisit& batch);
  std::span<std::byte> gathered(size_t first, size_t run_bytes);
  void note_question(std::byte* head);

  ReceiveSocket& socket_;
  Receiver& receiver_;
  const uint32_t head_bytes_;
  const uint32_t chunk_bytes_;
  const std::function<void(const std::byte*)> answer_;
  std::vector<std::byte> heads_;
  std::vector<std::byte*> places_;
  size_t places_now_ = 0;
  size_t offered_ = 1;  // places, at most: twice the last run, since the kernel reads all of a list
  std::vector<iovec> parts_;
  std::vector<std::byte> rest_;    // of a run, behind what is scattered
  std::vector<std::byte> linear_;  // a run that was gathered
  std::vector<std::byte> question_;
  bool asked_ = false;
  ReceivePathCounters counters_;
};

}  // namespace offcore::mcast
