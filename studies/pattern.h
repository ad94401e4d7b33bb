// A stream of bytes that a seed determines, to fill buffers with and to check them against: a wrong
// offset, a stale or a missing byte shows, and nothing has to be kept to compare with.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace offcore {

// Writes bytes [offset, offset + out.size()) of the stream.
void fill_pattern(std::span<std::byte> out, uint64_t seed, uint64_t offset);

// How many bytes differ from bytes [offset, offset + data.size()) of the stream.
uint64_t count_wrong(std::span<const std::byte> data, uint64_t seed, uint64_t offset);

}  // namespace offcore
