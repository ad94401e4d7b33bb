#include "core/mcast/group.h"

#include "core/base/error.h"
#include "core/mcast/wire.h"

namespace offcore::mcast {

void check(const Group& group) {
  if (group.ranks == 0 || group.ranks > kRanksMax || group.rank >= group.ranks) {
    fail(Code::invalid, "rank ", group.rank, " of ", group.ranks, ": 1 to ", kRanksMax, " ranks");
  }
  if (group.chunk_bytes == 0 || group.chunk_bytes > kChunkBytesMax) {
    fail(Code::invalid, "chunks of ", group.chunk_bytes, " bytes: 1 to ", kChunkBytesMax);
  }
  if (group.subgroups == 0 || group.subgroups > kSubgroupsMax || group.chains == 0) {
    fail(Code::invalid, group.subgroups, " subgroups and ", group.chains, " chains: 1 to ",
         kSubgroupsMax, " subgroups, 1 or more chains");
  }
  const bool fetches =
      group.fetch_bytes > 0 && group.fetch_bytes <= kReplyBytesMax && group.fetches_in_flight > 0;
  const bool times = group.link_bytes_s > 0 && group.alpha_ns >= 0 && group.settle_ns >= 0 &&
                     group.timeout_ns > 0 && group.silence_ns > 0;
  if (!fetches || !times) {
    fail(Code::invalid,
         "fetch sizes, link speed and times of a group must be positive, and a fetch ", "at most ",
         kReplyBytesMax, " bytes");
  }
}

}  // namespace offcore::mcast
