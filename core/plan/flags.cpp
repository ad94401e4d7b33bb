#include "core/plan/flags.h"

#include <algorithm>
#include <optional>

#include "core/plan/progression.h"

namespace offcore {

void FlagWords::signal(std::vector<Command>& commands, const std::vector<Rank>& readers,
                       uint64_t word, uint16_t value) const {
  if (readers.empty()) return;
  if (host_ && word < whole()) {
    commands.push_back({.dst = at(0, word), .value = value, .op = Op::signal});
    return;
  }
  const auto step_of = [&](Rank from, Rank to) -> std::optional<int64_t> {
    if (host_) return int64_t{to} - from;
    return (from + 1) % ranks_ == to ? std::optional(kRankStep) : std::nullopt;
  };
  for (size_t i = 0; i < readers.size();) {
    const size_t rows = run_of(readers.size() - i, [&](size_t row) {
      return step_of(readers[i + row], readers[i + row + 1]);
    });
    commands.push_back({.dst = at(readers[i], word),
                        .dst_step = rows > 1 ? *step_of(readers[i], readers[i + 1]) : 0,
                        .rows = static_cast<uint32_t>(rows),
                        .value = value,
                        .op = Op::signal});
    i += rows;
  }
}

void FlagWords::poll(std::vector<Command>& commands, Rank reader,
                     const std::vector<uint64_t>& words, uint16_t value) const {
  std::vector<int64_t> places;
  for (const uint64_t word : words) {
    places.push_back(static_cast<int64_t>(at(reader, word).offset));
  }
  std::sort(places.begin(), places.end());
  Slice place = at(reader, 0);
  for (size_t i = 0; i < places.size();) {
    const auto step_of = [&](size_t row) {
      return std::optional(places[i + row + 1] - places[i + row]);
    };
    const size_t rows = run_of(places.size() - i, step_of);
    place.offset = static_cast<uint64_t>(places[i]);
    commands.push_back({.dst = place,
                        .dst_step = rows > 1 ? *step_of(0) : 0,
                        .rows = static_cast<uint32_t>(rows),
                        .value = value,
                        .op = Op::poll});
    i += rows;
  }
}

}  // namespace offcore
