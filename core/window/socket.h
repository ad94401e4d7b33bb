// Sockets with deadlines, and the frames that ranks send each other over them.
//
// A frame is a 16-byte header (magic, kind, whether a descriptor comes along, payload bytes) and
// its payload. All reads are bounded; nothing raises SIGPIPE; every socket is non-blocking and
// closed on exec. Numbers travel as they lie in memory, little-endian: see the magic.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/base/clock.h"
#include "core/base/descriptor.h"

namespace offcore {

enum class FrameKind : uint16_t {
  knock,      // rank to store, first: see address.h for these
  challenge,  // store to rank
  hello,      // rank to store
  progress,   // store to rank
  roster,     // store to rank
  refusal,    // store to rank
  greeting,   // rank to rank, first: see greetings.h
  welcome,    // its answer
  parcel,     // rank to rank: sequence, tag, blob
  goodbye,    // rank to rank, last: nothing, or a rank that it has seen die
};

struct Frame {
  FrameKind kind = FrameKind::knock;
  std::string payload;
  Descriptor fd;
};

// Builds a payload.
class Packer {
 public:
  template <typename Number>
  Packer& number(Number value) {
    static_assert(std::is_arithmetic_v<Number>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    return *this;
  }
  Packer& text(std::string_view text) {
    number(static_cast<uint32_t>(text.size()));
    bytes_.append(text);
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// Takes a payload apart; a payload that is too short makes it fail for good.
class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : bytes_(bytes) {}
  template <typename Number>
  Number number() {
    Number value{};
    const std::string_view raw = take(sizeof(value));
    if (raw.size() == sizeof(value)) std::memcpy(&value, raw.data(), sizeof(value));
    return value;
  }
  std::string_view text() { return take(number<uint32_t>()); }
  bool ok() const { return ok_; }

 private:
  std::string_view take(size_t count) {
    ok_ = ok_ && count <= bytes_.size();
    if (!ok_) return {};
    const std::string_view taken = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return taken;
  }

  std::string_view bytes_;
  bool ok_ = true;
};

// A connected stream that frames travel over. Sending and receiving may run on two threads.
class Connection {
 public:
  enum class Status : uint8_t {
    ok,
    late,     // the deadline passed; after a send the stream is broken
    closed,   // by the peer, or broken
    garbage,  // bytes that are no frame
  };

  Connection() = default;
  Connection(Descriptor socket, uint64_t payload_bytes_max)
      : socket_(std::move(socket)), payload_bytes_max_(payload_bytes_max) {}

  int fd() const { return socket_.get(); }
  // From now on longer payloads, and descriptors: before, one that comes along is garbage.
  void trust(uint64_t payload_bytes_max) {
    payload_bytes_max_ = payload_bytes_max;
    fds_max_ = kFdsMax;
  }
  // `fd` -1: none.
  Status send(FrameKind kind, std::string_view payload, int fd, const Deadline& deadline);
  // Takes in what has arrived, without waiting. The frames before a close still come out of next().
  Status receive();
  // The next whole frame. Status garbage once the stream makes no sense.
  std::optional<Frame> next(Status& status);
  // Waits for a frame.
  Status wait_frame(Frame& frame, const Deadline& deadline);

 private:
  Descriptor socket_;
  static constexpr size_t kFdsMax = 64;  // that nobody has taken yet
  uint64_t payload_bytes_max_ = 0;
  size_t fds_max_ = 0;
  std::string received_;
  size_t used_ = 0;  // of received_
  std::deque<Descriptor> fds_;
};

using ConnectionStatus = Connection::Status;

// Waits until the descriptor is readable or writable (POLLIN, POLLOUT); false when it is late.
bool wait_ready(int fd, short events, const Deadline& deadline);

// TCP at "host:port" or "[v6]:port". All throw invalid for a malformed address, and those that
// connect or listen for an unknown one.
uint16_t port_of(const std::string& address);
Descriptor listen_at(const std::string& address);  // throws driver
// One attempt; empty, with errno's text in `reason`, where nobody listens.
Descriptor connect_to(const std::string& address, const Deadline& deadline, std::string& reason);

// A Unix socket under a name that the kernel picks, outside the file system.
Descriptor listen_unix(std::string& name);
// Waits while more connect than are accepted. Empty, with errno set, on failure.
Descriptor connect_unix(const std::string& name, const Deadline& deadline);
// Empty, with errno set, where nobody waits or no descriptor is free. Throws driver.
Descriptor accept_from(int listener);
// Whose process connected, or listens, at the other end of a Unix socket, as the kernel knows.
uid_t peer_uid(int unix_fd);

}  // namespace offcore
