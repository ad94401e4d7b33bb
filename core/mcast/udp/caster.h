// Sends parts over one subgroup: cuts them into datagrams, a slice at a time, so that what shares
// its loop gets turns in between.
#pragma once
#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "core/mcast/group.h"
#include "core/mcast/udp/loop.h"
#include "core/mcast/udp/multicast.h"
#include "core/mcast/wire.h"

namespace offcore::mcast {

class Caster {
 public:
  // `sent` is called on the loop when the kernel has taken a part, or refused it: that is a loss
  // like any other, and counted.
  Caster(Loop& loop, std::unique_ptr<SendSocket> socket, const Group& group,
         std::function<void(const Part&)> sent);

  void push(const Part& part);  // any thread
  void stop();                  // any thread: when it returns, no buffer is read any more

  const SendSocket& socket() const { return *socket_; }
  uint64_t failures() const { return failures_; }  // parts that could not be sent whole

 private:
  static constexpr size_t kSliceChunks = 256;
  void work();
  bool send_slice();  // false: the kernel has no room

  Loop& loop_;
  const std::unique_ptr<SendSocket> socket_;
  const Group group_;
  const std::function<void(const Part&)> sent_;
  std::deque<Part> parts_;
  uint32_t next_ = 0;     // chunk of the first part
  bool working_ = false;  // work() is posted, or waits for room
  bool stopped_ = false;
  std::vector<std::array<std::byte, kHeadBytesMax>> heads_;
  std::vector<Datagram> slice_;
  Tally failures_;
};

}  // namespace offcore::mcast
