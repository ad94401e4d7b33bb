// What reads packets: dwords to fields, kinds and fields by name, and what engines refuse.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/backend/sdma/packet.h"

namespace offcore::sdma {

std::string_view to_string(PacketKind kind);   // "copy"
PacketKind parse_kind(std::string_view name);  // throw invalid
Field parse_field(std::string_view name);

// Why no engine takes it, wherever its memory lies; empty: they do. pack writes what fits all the
// same.
std::string refusal(const Packet& packet);

// The packet that begins at dwords[at], into `packet`; returns its dwords. `dwords` may end behind
// it. 0, and in `why` the reason, which names the dword (its number is `first` + its place): no
// such operation, too few dwords left, a bit set that has to be 0.
uint32_t unpack(std::span<const uint32_t> dwords, size_t at, Packet& packet, uint64_t first,
                std::string& why);

}  // namespace offcore::sdma
