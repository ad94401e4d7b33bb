#include "studies/sdma/packet_path.h"

#include <algorithm>
#include <memory>
#include <span>

#include "core/backend/sdma/encode.h"
#include "core/backend/sdma/encode_program.h"
#include "core/backend/sdma/packet_ring.h"
#include "core/base/error.h"
#include "studies/sdma/decode.h"

namespace offcore::sdma {
namespace {

constexpr size_t kRingDwords = 1024;

class PacketPath {
 public:
  PacketPath(const Program& program, uint64_t copy_bytes_max)
      : program_(program),
        addresses_(model_addresses(program)),
        streams_(encode(program, addresses_, copy_bytes_max)),
        ring_dwords_(kRingDwords),
        ring_({.dwords = ring_dwords_, .rptr = &rptr_, .wptr = &wptr_, .doorbell = &doorbell_}) {}

  Program fetched(uint32_t epoch) {
    Addresses now = addresses_;
    now.epoch = epoch;
    std::vector<EncodedQueue> fetched;
    for (EncodedQueue& stream : streams_) {
      replay(stream, addresses_, now);
      fetched.push_back({.queue = stream.queue, .dwords = through_ring(stream.dwords)});
    }
    return decode(fetched, program_, now);
  }

 private:
  std::vector<uint32_t> through_ring(const std::vector<uint32_t>& dwords) {
    std::vector<uint32_t> fetched;
    fetched.reserve(dwords.size());
    std::span<const uint32_t> left = dwords;
    while (!left.empty()) {
      const size_t part = ring_.part_of(left);
      if (!ring_.try_submit(left.first(part))) fail(Code::driver, "an empty ring has no room");
      left = left.subspan(part);
      for (; rptr_ < doorbell_; rptr_ += 4) {
        fetched.push_back(ring_dwords_[rptr_ / 4 % kRingDwords]);
      }
    }
    return fetched;
  }

  const Program& program_;
  const Addresses addresses_;
  std::vector<EncodedQueue> streams_;
  std::vector<uint32_t> ring_dwords_;
  uint64_t rptr_ = 0;
  uint64_t wptr_ = 0;
  uint64_t doorbell_ = 0;
  PacketRing ring_;
};

}  // namespace

sim::SimOptions::FetchPath through_packets(const Machine& machine) {
  if (machine.vendor != "amd") {
    fail(Code::unsupported, "machine ", machine.name, " has no SDMA engines: packets are AMD's");
  }
  const uint64_t largest = std::min(machine.limits.copy_bytes_max, kCopyBytesMax);
  return [largest](const Program& program) -> sim::SimOptions::Fetched {
    return [path = std::make_shared<PacketPath>(program, largest)](uint32_t epoch) {
      return path->fetched(epoch);
    };
  };
}

}  // namespace offcore::sdma
