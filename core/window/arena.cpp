#include "core/window/arena.h"

#include <algorithm>
#include <iterator>

namespace offcore {

Arena::Arena(uint64_t bytes, uint64_t align) : align_(align) {
  if (bytes / align_ > 0) free_.emplace(0, bytes / align_ * align_);
}

std::optional<uint64_t> Arena::take(uint64_t bytes) {
  if (bytes > ~uint64_t{0} - align_) return std::nullopt;
  const uint64_t rounded = (std::max<uint64_t>(bytes, 1) + align_ - 1) / align_ * align_;
  const auto found = std::find_if(free_.begin(), free_.end(),
                                  [&](const auto& range) { return range.second >= rounded; });
  if (found == free_.end()) return std::nullopt;
  const auto [offset, length] = *found;
  free_.erase(found);
  if (length > rounded) free_.emplace(offset + rounded, length - rounded);
  taken_.emplace(offset, rounded);
  taken_bytes_ += rounded;
  return offset;
}

bool Arena::give(uint64_t offset) {
  const auto part = taken_.find(offset);
  if (part == taken_.end()) return false;
  taken_bytes_ -= part->second;
  auto range = free_.emplace(part->first, part->second).first;
  taken_.erase(part);
  if (const auto next = std::next(range);
      next != free_.end() && range->first + range->second == next->first) {
    range->second += next->second;
    free_.erase(next);
  }
  if (range == free_.begin()) return true;
  const auto before = std::prev(range);
  if (before->first + before->second == range->first) {
    before->second += range->second;
    free_.erase(range);
  }
  return true;
}

}  // namespace offcore
