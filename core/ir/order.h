// Which command of a program happens before which, over all ranks.
//
// A command of a queue happens after every command before the last poll, signal, timestamp or fence
// between them; a command after a poll happens after the signals that released its rows. A word's
// signals rise in value, so a poll is released by the smallest value that satisfies it. Kept as one
// vector clock per run of polls: row[q] is how many commands of queue q are known to be complete.
// The last one of them may be a signal of several rows: then the row that was seen is complete, and
// the others may not be.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/ir/program.h"

namespace offcore {

// A command of a program: indices into `queues` and into the queue's commands.
struct Place {
  uint32_t queue = 0;
  uint32_t command = 0;

  friend bool operator==(const Place&, const Place&) = default;
};

const Command& command_at(const Program& program, Place place);
std::string describe(const Program& program, Place place);  // "queue 0.1, command 3 (copy ...)"

class Order {
 public:
  // The commands must be in bounds. Throws verify: words, unmatched or deadlock. Keeps `program`.
  explicit Order(const Program& program);

  bool before(Place first, Place second) const;

  // Whether `place` happens after some signal of another queue.
  bool after_signal_of(uint32_t queue, Place place) const { return clock(place)[queue] > 0; }

  // Whether `place`, of another queue, is complete once `queue` has ended.
  bool before_end_of(uint32_t queue, Place place) const {
    const auto commands = static_cast<uint32_t>(program_.queues[queue].commands.size());
    return commands > 0 && before(place, {queue, commands - 1});
  }

 private:
  struct OrderSignal {
    uint64_t word = 0;
    uint16_t value = 0;
    Place place;
  };
  struct OrderNode {
    uint32_t group = 0;     // how many ordering commands of the queue come before
    uint32_t clock = 0;     // the row of clocks_ that holds once the command may start
    uint32_t releases = 0;  // of a poll: where its rows' signals start in releases_
  };

  uint64_t word_of(const Command& command, uint32_t row) const;
  const uint32_t* clock(Place place) const;
  OrderNode& node(Place place) { return nodes_[starts_[place.queue] + place.command]; }
  const OrderNode& node(Place place) const { return nodes_[starts_[place.queue] + place.command]; }

  void number_nodes();
  void collect_signals();
  void match_polls();
  void check_started() const;
  void run();
  uint32_t join(Place poll, uint32_t current);
  void join_clock(uint32_t into, uint32_t from);
  void raise(uint32_t clock, uint32_t queue, uint32_t commands);
  void check_rising() const;
  bool done_before(const OrderSignal& signal, Place place) const;
  [[noreturn]] void fail_deadlock(const std::vector<uint32_t>& next) const;
  const Place* missing(Place poll, const std::vector<uint32_t>& next) const;

  const Program& program_;
  std::vector<uint32_t> starts_;  // of each queue in nodes_
  std::vector<OrderNode> nodes_;
  std::vector<OrderSignal> signals_;  // by word, then value
  std::vector<Place> releases_;
  std::vector<uint32_t> clocks_;  // rows of one entry a queue; row 0 knows nothing
  struct Known {
    std::vector<uint32_t> queues;  // those of entries above 0, unless there are
    bool many = false;
  };
  std::vector<Known> known_;  // by clock, of programs with many queues: most clocks know few
};

}  // namespace offcore
