#include "core/mcast/siphash.h"

#include <bit>
#include <cstring>

namespace offcore::mcast {
namespace {

uint64_t load_little(const std::byte* from, size_t bytes) {
  uint64_t word = 0;
  if (bytes > 0) std::memcpy(&word, from, bytes);  // nothing may be at nowhere
  return word;
}

class Sip {
 public:
  Sip(uint64_t k0, uint64_t k1)
      : v0_(k0 ^ 0x736f6d6570736575),
        v1_(k1 ^ 0x646f72616e646f6d),
        v2_(k0 ^ 0x6c7967656e657261),
        v3_(k1 ^ 0x7465646279746573) {}

  void add(uint64_t word) {
    v3_ ^= word;
    round();
    round();
    v0_ ^= word;
  }
  uint64_t end() {
    v2_ ^= 0xff;
    for (int i = 0; i < 4; ++i) round();
    return v0_ ^ v1_ ^ v2_ ^ v3_;
  }

 private:
  void round() {
    v0_ += v1_;
    v2_ += v3_;
    v1_ = std::rotl(v1_, 13) ^ v0_;
    v3_ = std::rotl(v3_, 16) ^ v2_;
    v0_ = std::rotl(v0_, 32);
    v2_ += v1_;
    v0_ += v3_;
    v1_ = std::rotl(v1_, 17) ^ v2_;
    v3_ = std::rotl(v3_, 21) ^ v0_;
    v2_ = std::rotl(v2_, 32);
  }
  uint64_t v0_, v1_, v2_, v3_;
};

}  // namespace

uint64_t siphash(const std::array<std::byte, 16>& key, std::span<const std::byte> front,
                 std::span<const std::byte> back) {
  Sip sip(load_little(key.data(), 8), load_little(key.data() + 8, 8));
  for (size_t at = 0; at < front.size(); at += 8) sip.add(load_little(front.data() + at, 8));
  size_t at = 0;
  for (; at + 8 <= back.size(); at += 8) sip.add(load_little(back.data() + at, 8));
  const uint64_t length = front.size() + back.size();
  sip.add(load_little(back.data() + at, back.size() - at) | length << 56);
  return sip.end();
}

}  // namespace offcore::mcast
