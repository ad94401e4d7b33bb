// SipHash-2-4 with a 64-bit result (Aumasson and Bernstein, 2012): a keyed hash that is short to
// write and quick for datagrams. Who does not know the key cannot make a message that fits.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace offcore::mcast {

// Of `front` and `back` one after the other; front's size must be a multiple of 8.
uint64_t siphash(const std::array<std::byte, 16>& key, std::span<const std::byte> front,
                 std::span<const std::byte> back);

}  // namespace offcore::mcast
