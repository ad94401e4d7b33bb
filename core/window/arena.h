// Parts of a range of addresses: the first that fits, joined with free neighbours when it comes
// back. The same requests in the same order give the same places, so ranks that allocate alike
// find theirs at the same offset of a window. Callers lock.
#pragma once
#include <cstdint>
#include <map>
#include <optional>

namespace offcore {

class Arena {
 public:
  // Parts begin and end at multiples of `align`, a power of two.
  Arena(uint64_t bytes, uint64_t align);

  // Where the part begins, or nothing if no free range is as long.
  std::optional<uint64_t> take(uint64_t bytes);
  // False: no part that was taken begins there.
  bool give(uint64_t offset);
  uint64_t taken_bytes() const { return taken_bytes_; }
  bool empty() const { return taken_.empty(); }

 private:
  uint64_t align_;
  uint64_t taken_bytes_ = 0;
  std::map<uint64_t, uint64_t> free_;   // bytes by offset; no two are neighbours
  std::map<uint64_t, uint64_t> taken_;  // likewise, but neighbours stay apart
};

}  // namespace offcore
