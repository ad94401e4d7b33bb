// Pacing: a root runs at most a window ahead of the leaves, so that it does not overrun the sockets
// of those that get less of a processor than it does.
//
// Now and then a datagram asks for a credit (a bit of its header that the protocol never sees), and
// some leaves answer with a datagram of their own to the root: "I have come as far as this one". A
// credit is advice, not an acknowledgement: the root waits for one only so long, and what is lost
// nevertheless comes through the fetch ring.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/mcast/group.h"
#include "core/mcast/udp/counter.h"
#include "core/mcast/wire.h"

namespace offcore::mcast {

// What a leaf answers: the header of the datagram that asked, and who it is in place of the bytes.
struct Credit {
  uint64_t op = 0;
  uint32_t subgroup = 0;
  uint32_t psn = 0;
  GroupRank from = 0;
};
inline constexpr size_t kCreditBytes = kHeaderBytes;

void ask_for_credit(std::byte* head);
// Whether a datagram asked, and takes the question out of it.
bool take_question(std::byte* head);
// The answer of rank `from` to a datagram that asked.
void write_credit(DatagramHead head, GroupRank from, std::byte* out);
// Empty for what is no credit of this communicator.
std::optional<Credit> read_credit(const Group& group, std::span<const std::byte> datagram);

// Whether `leaf` is one of those that answer `source`: a few ranks, whatever the number of all.
bool answers(const Group& group, GroupRank leaf, GroupRank source);

// How far a root may go with the parts of one subgroup.
class CreditWindow {
 public:
  // `bytes`: of the smallest receive buffer of all ranks; 0: no limit.
  CreditWindow(const Group& group, uint64_t bytes);

  void begin(const BlockPart& part);
  // Whether the part's index-th chunk asks for a credit.
  bool asks(uint32_t index) const;
  // Chunks [0, limit()) may be sent now, which only grows; a part has ended when all are sent and
  // ended() is true.
  uint32_t limit() const { return limit_; }
  bool ended() const { return slowest() >= needed_; }
  void take(const Credit& credit);
  // Nothing came for long: the leaves that are waited for are left out until they answer again.
  void give_up();

 private:
  uint32_t slowest() const;
  void open();

  const Group& group_;
  const uint64_t bytes_;
  uint32_t chunks_ = 0;  // of the window, for this part; 0: no limit
  BlockPart part_;
  uint32_t limit_ = 0;
  uint32_t step_ = 1;           // chunks between two questions
  uint32_t needed_ = 0;         // chunks that leaves must have seen before the next root begins
  std::vector<uint32_t> seen_;  // chunks, by leaf's distance to the right, less one
  std::vector<bool> silent_;    // likewise
};

}  // namespace offcore::mcast
