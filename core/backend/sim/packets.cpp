#include "core/backend/sim/packets.h"

#include <algorithm>
#include <span>

#include "core/backend/sdma/decode.h"
#include "core/backend/sdma/encode.h"
#include "core/base/error.h"

namespace offcore::sim {
namespace {

constexpr size_t kRingDwords = 1024;

}  // namespace

PacketPath::PacketPath(const Program& program, const Machine& machine)
    : program_(program),
      addresses_(sdma::model_addresses(program)),
      streams_(sdma::encode(program, addresses_,
                            std::min(machine.limits.copy_bytes_max, sdma::kCopyBytesMax))),
      ring_dwords_(kRingDwords),
      ring_({.dwords = ring_dwords_, .rptr = &rptr_, .wptr = &wptr_, .doorbell = &doorbell_}) {}

std::vector<uint32_t> PacketPath::through_ring(const std::vector<uint32_t>& dwords) {
  std::vector<uint32_t> fetched;
  fetched.reserve(dwords.size());
  std::span<const uint32_t> left = dwords;
  while (!left.empty()) {
    const size_t part = ring_.part_of(left);
    if (!ring_.try_submit(left.first(part))) fail(Code::driver, "an empty ring has no room");
    left = left.subspan(part);
    for (; rptr_ < doorbell_; rptr_ += 4) fetched.push_back(ring_dwords_[rptr_ / 4 % kRingDwords]);
  }
  return fetched;
}

Program PacketPath::fetched(uint32_t epoch) {
  sdma::Addresses now = addresses_;
  now.epoch = epoch;
  std::vector<sdma::EncodedQueue> fetched;
  for (sdma::EncodedQueue& stream : streams_) {
    sdma::replay(stream, addresses_, now);
    fetched.push_back({.queue = stream.queue, .dwords = through_ring(stream.dwords)});
  }
  return sdma::decode(fetched, program_, now);
}

}  // namespace offcore::sim
