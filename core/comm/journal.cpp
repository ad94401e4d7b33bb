#include "core/comm/journal.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace offcore {
namespace {

// Word 0 of a rank's memory counts its launches; a record is: stamp (sequence + 1, or 0 while it is
// being written), key, place, decided, then text.
constexpr uint64_t kHeadWords = 8;
constexpr uint64_t kTextAt = 4;
constexpr uint64_t kTextBytes = (Journal::kRecordWords - kTextAt) * sizeof(uint64_t);

uint64_t record_at(uint64_t sequence) {
  return kHeadWords + (sequence % Journal::kRecords) * Journal::kRecordWords;
}

}  // namespace

void Journal::publish(Rank rank, uint64_t sequence, const Entry& entry) {
  const uint64_t at = record_at(sequence);
  // A reader that sees any word of the new record also sees that its stamp has gone.
  word(rank, at).store(0, std::memory_order_relaxed);
  word(rank, at + 1).store(entry.key, std::memory_order_release);
  word(rank, at + 2).store(entry.place, std::memory_order_release);
  word(rank, at + 3).store(entry.decided, std::memory_order_release);
  std::array<uint64_t, kTextBytes / sizeof(uint64_t)> text{};
  std::memcpy(text.data(), entry.text.data(), std::min<size_t>(entry.text.size(), kTextBytes));
  // The same few calls come again and again: what stands there already is not written again.
  for (uint64_t i = 0; i < text.size(); ++i) {
    const auto there = word(rank, at + kTextAt + i);
    if (there.load(std::memory_order_relaxed) == text[i]) continue;
    there.store(text[i], std::memory_order_release);
  }
  word(rank, at).store(sequence + 1, std::memory_order_release);
  word(rank, 0).store(sequence + 1, std::memory_order_release);
}

std::optional<Entry> Journal::read(Rank rank, uint64_t sequence) const {
  const uint64_t at = record_at(sequence);
  if (word(rank, at).load(std::memory_order_acquire) != sequence + 1) return std::nullopt;
  Entry entry{.key = word(rank, at + 1).load(std::memory_order_acquire),
              .place = word(rank, at + 2).load(std::memory_order_acquire),
              .decided = word(rank, at + 3).load(std::memory_order_acquire) != 0};
  std::array<uint64_t, kTextBytes / sizeof(uint64_t)> text;
  for (uint64_t i = 0; i < text.size(); ++i) {
    text[i] = word(rank, at + kTextAt + i).load(std::memory_order_acquire);
  }
  if (word(rank, at).load(std::memory_order_relaxed) != sequence + 1) return std::nullopt;
  const char* chars = reinterpret_cast<const char*>(text.data());
  entry.text.assign(chars, strnlen(chars, kTextBytes));
  return entry;
}

bool Journal::contradicts(Rank rank, uint64_t sequence, const Entry& mine) const {
  const uint64_t at = record_at(sequence);
  if (word(rank, at).load(std::memory_order_acquire) != sequence + 1) return false;
  const uint64_t key = word(rank, at + 1).load(std::memory_order_acquire);
  const uint64_t place = word(rank, at + 2).load(std::memory_order_acquire);
  const bool decided = word(rank, at + 3).load(std::memory_order_acquire) != 0;
  if (word(rank, at).load(std::memory_order_relaxed) != sequence + 1) return false;
  return key != mine.key || (decided && mine.decided && place != mine.place);
}

uint64_t Journal::published(Rank rank) const {
  return word(rank, 0).load(std::memory_order_acquire);
}

}  // namespace offcore
