#include "core/mcast/udp/credit.h"

#include <algorithm>

namespace offcore::mcast {
namespace {

constexpr GroupRank kLeavesMax = 8;  // that answer a root
constexpr uint32_t kQuestions = 4;   // in a window
constexpr uint32_t kTailChunks = 64;
constexpr uint8_t kFlagAsks = 0x40;
constexpr uint8_t kFlagCredit = 0x80;

GroupRank distance(const Group& group, GroupRank leaf, GroupRank source) {
  return (leaf + group.ranks - source) % group.ranks;
}

}  // namespace

void ask_for_credit(std::byte* head) { head[kFlagsAt] |= std::byte{kFlagAsks}; }

bool take_question(std::byte* head) {
  if ((head[kFlagsAt] & std::byte{kFlagAsks}) == std::byte{0}) return false;
  head[kFlagsAt] &= ~std::byte{kFlagAsks};
  return true;
}

void write_credit(DatagramHead head, GroupRank from, std::byte* out) {
  head.flags = kFlagCredit;
  head.bytes = static_cast<uint16_t>(from);
  write_head(head, out);
}

std::optional<Credit> read_credit(const Group& group, std::span<const std::byte> datagram) {
  if (datagram.size() != kCreditBytes) return {};
  const DatagramHead head = read_head(datagram.data());
  const GroupRank from = head.bytes;
  if (head.magic != kMagic || head.version != kVersion || head.flags != kFlagCredit ||
      head.tag != group.key.tag || head.source != group.rank || head.subgroup >= group.subgroups ||
      from >= group.ranks || !answers(group, from, head.source)) {
    return {};
  }
  return Credit{.op = head.op, .subgroup = head.subgroup, .psn = head.psn, .from = from};
}

bool answers(const Group& group, GroupRank leaf, GroupRank source) {
  const GroupRank right = distance(group, leaf, source);
  return right >= 1 && right <= kLeavesMax;
}

CreditWindow::CreditWindow(const Group& group, uint64_t bytes) : group_(group), bytes_(bytes) {
  seen_.resize(std::min(group.ranks - 1, kLeavesMax));
  silent_.resize(seen_.size());
}

// Half of what a buffer holds, for all roots that send at once: what earlier ones have sent since
// leaves were last waited for may fill the other half. Small blocks are not waited for one by one,
// but where a window's worth has been sent by all roots since, going by blocks as large as this.
void CreditWindow::begin(const BlockPart& part) {
  part_ = part;
  if (bytes_ > 0) {
    const uint64_t share = bytes_ / 2 / part.roots / group_.chunk_bytes;
    chunks_ = static_cast<uint32_t>(std::clamp<uint64_t>(share, 1, UINT32_MAX));
    step_ = std::max(1u, chunks_ / kQuestions);
  }
  std::fill(seen_.begin(), seen_.end(), 0);
  needed_ = 0;
  limit_ = 0;
  open();
  if (chunks_ == 0 || part.chunks == 0) return;
  const uint64_t before = uint64_t{part.source} * part.chunks;
  if ((before + part.chunks) / chunks_ == before / chunks_) return;
  needed_ = part.chunks < chunks_ ? part.chunks - std::min(part.chunks - 1, kTailChunks)
                                  : part.chunks - chunks_ / 2;
}

bool CreditWindow::asks(uint32_t index) const {
  if (chunks_ == 0) return false;
  // Two questions at the end: one may be lost.
  const bool end = needed_ > 0 && (index + 1 == part_.chunks || index + 1 == needed_);
  return end || (part_.chunks > chunks_ / 2 && (index + 1) % step_ == 0);
}

// A leaf that answers again after a silence may be far behind: what was open stays open.
void CreditWindow::open() {
  const uint64_t far = chunks_ == 0 ? part_.chunks : uint64_t{slowest()} + chunks_;
  limit_ = std::max(limit_, static_cast<uint32_t>(std::min<uint64_t>(part_.chunks, far)));
}

uint32_t CreditWindow::slowest() const {
  uint32_t slowest = UINT32_MAX;
  for (size_t i = 0; i < seen_.size(); ++i) {
    if (!silent_[i]) slowest = std::min(slowest, seen_[i]);
  }
  return slowest;
}

void CreditWindow::take(const Credit& credit) {
  const GroupRank leaf = distance(group_, credit.from, group_.rank) - 1;
  silent_[leaf] = false;
  const uint32_t index = credit.psn - part_.psn;
  if (credit.op != part_.op || index >= part_.chunks) return;
  seen_[leaf] = std::max(seen_[leaf], index + 1);
  open();
}

void CreditWindow::give_up() {
  const uint32_t slow = slowest();
  for (size_t i = 0; i < seen_.size(); ++i) silent_[i] = silent_[i] || seen_[i] == slow;
  open();
}

}  // namespace offcore::mcast
