// What a simulated launch does to memory, and how it tells what became of it.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/backend/exec/submission.h"
#include "core/backend/reduce.h"
#include "core/backend/sim/simulation.h"
#include "core/backend/wakeup.h"
#include "core/base/error.h"
#include "core/base/swap_bytes.h"

namespace offcore::sim {
// A flag word: in the bound memory, or in the simulation's own where none is bound.
std::atomic_ref<uint32_t> Simulation::word_at(const Slice& word) {
  std::byte* base = launch_.binding.base(kFlagBuffer, word.rank);
  if (base != nullptr) return flag_word(base, word.offset);
  return std::atomic_ref(unbound_words_[numbers_.of(word)]);
}

// Whether every row's word has reached the poll's value, and the last change of these words.
bool Simulation::reached(const Command& command, const Moment** change) {
  *change = nullptr;
  for (uint32_t row = 0; row < command.rows; ++row) {
    const Slice word = row_of(command.dst, command.dst_step, row, program_.ranks);
    const uint32_t value = word_at(word).load(std::memory_order_acquire);
    if (!reached_value(value, launch_.epoch + command.value)) return false;
    const Moment& candidate = changed_[numbers_.of(word)];
    if (*change == nullptr || candidate.at_ns > (*change)->at_ns) *change = &candidate;
  }
  return true;
}

void Simulation::store(const Command& command) {
  for (uint32_t row = 0; row < command.rows; ++row) {
    const Slice word = row_of(command.dst, command.dst_step, row, program_.ranks);
    word_at(word).store(launch_.epoch + command.value, std::memory_order_release);
  }
}

// Rows are cut in the middle: one half moves as the flow begins, the other as it ends.
void Simulation::move_half(const Command& command, bool second) {
  const bool upper = second != ((state_.options.seed & 1) != 0);
  const uint64_t cut = command.bytes / 2;
  const uint64_t from = upper ? cut : 0;
  const uint64_t bytes = upper ? command.bytes - cut : cut;
  if (bytes == 0) return;
  for (uint32_t row = 0; row < command.rows; ++row) {
    const Slice dst = row_of(command.dst, command.dst_step, row, program_.ranks);
    const Slice src = row_of(command.src, command.src_step, row, program_.ranks);
    std::byte* dst_base = launch_.binding.base(dst.buffer, dst.rank);
    std::byte* src_base = launch_.binding.base(src.buffer, src.rank);
    if (dst_base == nullptr || src_base == nullptr) continue;
    std::byte* to = dst_base + dst.offset + from;
    std::byte* what = src_base + src.offset + from;
    if (command.op == Op::swap) {
      swap_bytes(to, what, bytes);
    } else {
      std::memmove(to, what, bytes);
    }
  }
}

void Simulation::reduce_bytes(const Command& command) {
  const auto place = [&](const Slice& slice) -> std::byte* {
    std::byte* base = launch_.binding.base(slice.buffer, slice.rank);
    return base == nullptr ? nullptr : base + slice.offset;
  };
  std::vector<const std::byte*> sources;
  for (uint32_t row = 0; row < command.rows; ++row) {
    sources.push_back(place(source_of(command, row)));
    if (sources.back() == nullptr) return;
  }
  std::byte* dst = place(command.dst);
  if (dst != nullptr) reduce(*program_.reduction, command, dst, sources, command.bytes);
}

void Simulation::flip_byte(const Command& command) {
  const uint64_t pick = mix(state_.options.seed, state_.events);
  const uint32_t row = static_cast<uint32_t>(pick % command.rows);
  const Slice dst = row_of(command.dst, command.dst_step, row, program_.ranks);
  std::byte* base = launch_.binding.base(dst.buffer, dst.rank);
  if (base == nullptr) return;
  base[dst.offset + mix(pick, 0) % command.bytes] ^= std::byte{1} << (mix(pick, 1) % 8);
}

void Simulation::finish(SimOutcome& outcome) {
  Moment last;
  bool complete = true;
  for (const SimQueue& actor : actors_) {
    complete &= actor.next == actor.queue->commands.size() && actor.running == 0 && !actor.busy;
    last = latest(last, latest(actor.ordered, actor.moved));
  }
  for (const int killer : killer_) complete &= killer < 0;
  report_.time_ns = std::llround(last.at_ns);
  report_.phases = last.phases;
  outcome.report = std::move(report_);
  if (!complete) blame(outcome);
}

void Simulation::blame(SimOutcome& outcome) const {
  const auto killed =
      std::find_if(killer_.begin(), killer_.end(), [](int killer) { return killer >= 0; });
  outcome.failure = killed == killer_.end() ? Code::timeout : Code::peer;
  const auto virtual_ns = std::llround(state_.clock_ns + now_ns_);
  if (killed == killer_.end()) {
    outcome.message = cat("nothing can happen any more at ", virtual_ns, " ns of virtual time");
  } else {
    const auto rank = killed - killer_.begin();
    outcome.message = *killed == rank ? cat("rank ", rank, " is dead")
                                      : cat("rank ", rank, " was poisoned by rank ", *killed);
  }
  outcome.message += "; stuck: " + stuck();
  if (killed == killer_.end()) return;
  for (Wakeup* wakeup : launch_.wakeups) poison(*wakeup, static_cast<Rank>(*killed));
}

// The queues that have not ended, and the commands that they have reached.
std::string Simulation::stuck() const {
  std::vector<size_t> reached;
  for (const SimQueue& actor : actors_) {
    reached.push_back(actor.next);
    for (uint32_t i = actor.next; i-- > 0 && actor.running > 0;) {
      if (!runs_[first_command_[actor.index] + i].ended) reached.back() = i;
    }
  }
  const std::string text = exec::print_position(program_, reached);
  return text.empty() ? "none" : text;
}

}  // namespace offcore::sim
