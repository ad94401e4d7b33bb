// A TCP connection between two ranks: messages in order, some of them with data that goes from the
// sender's buffer to the receiver's without a copy in between.
//
// Nothing here waits. Bytes that are no message break the connection, whoever sent them.
#pragma once
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "core/base/descriptor.h"
#include "core/mcast/udp/address.h"
#include "core/mcast/wire.h"

namespace offcore::mcast {

// What reads a stream's messages.
class MessageReader {
 public:
  virtual ~MessageReader() = default;
  // Where the payload of a reply or share goes; empty: it is read and dropped.
  virtual std::span<std::byte> place_of(const Message& reply) = 0;
  // Of one whose payload was dropped, payload_bytes is 0. False: no more of this stream.
  virtual bool read(const Message& message) = 0;
};

class MessageStream {
 public:
  enum class StreamState : uint8_t { open, closed, broken };

  explicit MessageStream(Descriptor socket);  // connected, or about to be

  int fd() const { return socket_.get(); }
  // Queues. The data stays where it is until it has been sent, or let_go(). A message without data
  // goes ahead of data that waits: what ranks agree on does not wait for what they move.
  void push(const Message& message, std::span<const std::byte> data = {});
  bool pending() const { return !queue_.empty(); }
  bool holds_data(Sequence sequence) const;  // of a sequence's operations, queued
  // Sends what the kernel takes now.
  StreamState flush();
  // Touches nobody's data any more: replies that wait are forgotten, of one that is under way the
  // rest is copied, and what comes is dropped. Messages stay queued.
  void let_go();
  // Tells the peer that nothing more will come.
  void finish();
  // Reads what has come, up to a bound so that others get their turn.
  StreamState receive(MessageReader& reader);
  // Why the last call said `broken`.
  const std::string& reason() const { return reason_; }

 private:
  struct Queued {
    std::array<std::byte, kMessageBytes> message;
    std::span<const std::byte> data;
    std::vector<std::byte> copy;  // `data`, since let_go()
    Sequence sequence = Sequence::gathers;
    size_t bytes() const { return message.size() + data.size(); }
  };
  StreamState broken(std::string reason);
  StreamState parse(MessageReader& reader);

  Descriptor socket_;
  std::deque<Queued> queue_;
  size_t sent_ = 0;  // of the first queued
  std::vector<std::byte> input_;
  size_t begin_ = 0, end_ = 0;  // of what was read and not parsed yet
  bool in_payload_ = false;
  Message reply_;               // whose payload is being read
  std::span<std::byte> place_;  // what of it is to come; empty: dropped
  bool dropped_ = false;
  uint64_t payload_left_ = 0;
  std::string reason_;
};

// A listener at an address, port 0: any. Throws driver.
Descriptor listen_tcp(const Address& address);
// Begins to connect; ready for writing once it is there. Throws driver.
Descriptor connect_tcp(const Address& from, const Address& to);
// How that has ended: 0 or an errno.
int connect_error(int fd);

}  // namespace offcore::mcast
