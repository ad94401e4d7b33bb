// FNV-1a over values one after another: tells contents apart, not enemies.
#pragma once
#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

namespace offcore {

class Digest {
 public:
  void add(std::string_view text) {
    for (const unsigned char byte : text) hash_ = (hash_ ^ byte) * 0x100000001b3;
  }
  // A number, or a value of an enumeration: by its bytes.
  template <typename Value>
    requires std::is_arithmetic_v<Value> || std::is_enum_v<Value>
  void add(Value value) {
    char bytes[sizeof(Value)];
    std::memcpy(bytes, &value, sizeof(Value));
    add(std::string_view(bytes, sizeof(Value)));
  }
  uint64_t value() const { return hash_ == 0 ? 1 : hash_; }  // never 0

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

inline uint64_t digest(std::string_view text) {
  Digest digest;
  digest.add(text);
  return digest.value();
}

}  // namespace offcore
