// HMAC-SHA256 (RFC 2104, FIPS 180-4): who does not know the key cannot make the code of a text.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

namespace offcore {

inline constexpr size_t kHmacBytes = 32;

std::string sha256(std::string_view text);
std::string hmac_sha256(std::string_view key, std::string_view text);

// Takes as long wherever the first difference lies, so that its time tells nothing.
bool equal_codes(std::string_view one, std::string_view other);

}  // namespace offcore
