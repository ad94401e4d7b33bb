// Sends parts over one subgroup: cuts them into datagrams, a slice at a time, so that what shares
// its loop gets turns in between, and no further than a window ahead of the leaves.
#pragma once
#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "core/mcast/group.h"
#include "core/mcast/udp/credit.h"
#include "core/mcast/udp/loop.h"
#include "core/mcast/udp/multicast.h"
#include "core/mcast/wire.h"

namespace offcore::mcast {

class Sender {
 public:
  // `sent` is called on the loop when the kernel has taken a part, or refused it: that is a loss
  // like any other, and counted. `window_bytes`: see Window.
  Sender(Loop& loop, std::unique_ptr<SendSocket> socket, const Group& group, uint64_t window_bytes,
         std::function<void(const BlockPart&)> sent);

  void push(const BlockPart& part);  // any thread
  void take(const Credit& credit);   // any thread
  void stop();                       // any thread: when it returns, no buffer is read any more

  const SendSocket& socket() const { return *socket_; }
  struct SenderCounters {
    Counter failures;  // parts that could not be sent whole
    Counter waits;     // for credits
    Counter give_ups;  // of those: in vain
  };
  const SenderCounters& counters() const { return counters_; }

 private:
  static constexpr size_t kSliceChunks = 256;
  static constexpr int64_t kPatienceMinNs = 4'000'000;
  static constexpr int64_t kPatienceMaxNs = 64'000'000;

  void work();
  void wait();
  bool held_up() const;  // by the window
  bool send_slice();     // false: the kernel has no room

  Loop& loop_;
  const std::unique_ptr<SendSocket> socket_;
  const Group group_;
  const std::function<void(const BlockPart&)> sent_;
  std::deque<BlockPart> parts_;  // the first one is under way
  uint32_t next_ = 0;            // chunk of the first part
  bool working_ = false;         // work() is posted or waits
  bool waiting_ = false;         // for credits
  int64_t waiting_ns_ = 0;       // since when
  int64_t patience_ns_ = kPatienceMinNs;
  bool stopped_ = false;
  CreditWindow window_;
  std::vector<std::array<std::byte, kHeadBytesMax>> heads_;
  std::vector<Datagram> slice_;
  SenderCounters counters_;
};

}  // namespace offcore::mcast
