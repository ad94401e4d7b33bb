#include "core/ir/order.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "core/base/error.h"
#include "core/ir/text.h"

namespace offcore {
namespace {

constexpr uint64_t kClockEntriesMax = uint64_t{1} << 27;
constexpr uint32_t kNone = UINT32_MAX;
constexpr size_t kQueuesMany = 256;
constexpr size_t kKnownShare = 16;  // of all queues: more are as quickly gone through all

// Polls in a row share a clock: nothing can happen between them that others could see.
bool opens_clock(const Queue& queue, uint32_t command) {
  if (queue.commands[command].op != Op::poll) return false;
  return command == 0 || queue.commands[command - 1].op != Op::poll;
}

}  // namespace

const Command& command_at(const Program& program, Place place) {
  return program.queues[place.queue].commands[place.command];
}

std::string describe(const Program& program, Place place) {
  return cat("queue ", queue_name(program.queues[place.queue]), ", command ", place.command, " (",
             print(command_at(program, place), program), ")");
}

Order::Order(const Program& program) : program_(program) {
  number_nodes();
  collect_signals();
  match_polls();
  if (program.mode == Mode::armed) check_started();
  run();
  check_rising();
}

bool Order::before(Place first, Place second) const {
  if (first.queue == second.queue) return node(first).group < node(second).group;
  return clock(second)[first.queue] > first.command;
}

const uint32_t* Order::clock(Place place) const {
  return clocks_.data() + node(place).clock * program_.queues.size();
}

uint64_t Order::word_of(const Command& command, uint32_t row) const {
  const Slice word = row_of(command.dst, command.dst_step, row, program_.ranks);
  return (uint64_t{word.rank} << 32) | word.offset;
}

void Order::number_nodes() {
  uint32_t total = 0;
  uint64_t clocks = 1;
  for (const Queue& queue : program_.queues) {
    starts_.push_back(total);
    total += static_cast<uint32_t>(queue.commands.size());
  }
  nodes_.reserve(total);
  for (const Queue& queue : program_.queues) {
    uint32_t group = 0;
    for (uint32_t c = 0; c < queue.commands.size(); ++c) {
      // An ordering command is alone in its group, so that it is ordered with both neighbours.
      const bool ordering = !moves_data(queue.commands[c].op);
      group += ordering;
      nodes_.push_back({.group = group});
      group += ordering;
      clocks += opens_clock(queue, c);
    }
  }
  if (clocks * program_.queues.size() > kClockEntriesMax) {
    fail(Code::verify, "shape: program: polls at ", clocks - 1, " places on ",
         program_.queues.size(), " queues are too many to order; split the program");
  }
  clocks_.reserve(clocks * program_.queues.size());
  clocks_.resize(program_.queues.size());
  if (program_.queues.size() >= kQueuesMany) known_.resize(1);
}

void Order::collect_signals() {
  for (uint32_t q = 0; q < program_.queues.size(); ++q) {
    const std::vector<Command>& commands = program_.queues[q].commands;
    for (uint32_t c = 0; c < commands.size(); ++c) {
      if (commands[c].op != Op::signal) continue;
      for (uint32_t row = 0; row < commands[c].rows; ++row) {
        signals_.push_back(
            {.word = word_of(commands[c], row), .value = commands[c].value, .place = {q, c}});
      }
    }
  }
  std::sort(signals_.begin(), signals_.end(), [](const OrderSignal& a, const OrderSignal& b) {
    return std::tuple(a.word, a.value, a.place.queue, a.place.command) <
           std::tuple(b.word, b.value, b.place.queue, b.place.command);
  });
  for (size_t i = 1; i < signals_.size(); ++i) {
    const OrderSignal& first = signals_[i - 1];
    const OrderSignal& second = signals_[i];
    if (first.word != second.word || first.value != second.value) continue;
    fail(Code::verify, "words: ", describe(program_, second.place), ": ",
         first.place == second.place
             ? std::string("two of its rows signal one word")
             : cat("signals the same word and value as ", describe(program_, first.place)));
  }
}

void Order::match_polls() {
  for (uint32_t q = 0; q < program_.queues.size(); ++q) {
    const std::vector<Command>& commands = program_.queues[q].commands;
    for (uint32_t c = 0; c < commands.size(); ++c) {
      if (commands[c].op != Op::poll) continue;
      node({q, c}).releases = static_cast<uint32_t>(releases_.size());
      for (uint32_t row = 0; row < commands[c].rows; ++row) {
        const std::pair key(word_of(commands[c], row), commands[c].value);
        const auto signal = std::lower_bound(signals_.begin(), signals_.end(), key,
                                             [](const OrderSignal& a, const auto& wanted) {
                                               return std::pair(a.word, a.value) < wanted;
                                             });
        if (signal == signals_.end() || signal->word != key.first) {
          fail(Code::verify, "unmatched: ", describe(program_, {q, c}), ": no signal sets row ",
               row, " to ", commands[c].value, " or more");
        }
        releases_.push_back(signal->place);
      }
    }
  }
}

// A prelaunched queue must wait for the call, and only its own rank's caller tells of that.
void Order::check_started() const {
  for (uint32_t q = 0; q < program_.queues.size(); ++q) {
    const Queue& queue = program_.queues[q];
    if (queue.index == kCallerQueue) continue;
    if (queue.commands.empty() || queue.commands[0].op != Op::poll) {
      fail(Code::verify, "shape: queue ", queue_name(queue),
           ": an armed queue must start with a poll of its start word");
    }
    const auto first = releases_.begin() + node({q, 0}).releases;
    const bool started = std::any_of(first, first + queue.commands[0].rows, [&](Place signal) {
      const Queue& from = program_.queues[signal.queue];
      return from.index == kCallerQueue && from.rank == queue.rank;
    });
    if (started) continue;
    fail(Code::verify, "deadlock: ", describe(program_, {q, 0}), ": the caller of rank ",
         queue.rank, " never starts this armed queue; let it signal the word");
  }
}

// Runs all queues as far as they get, joining clocks at polls.
void Order::run() {
  const uint32_t queues = static_cast<uint32_t>(program_.queues.size());
  std::vector<uint32_t> next(queues, 0);                // the command that each queue has reached
  std::vector<uint32_t> current(queues, 0);             // its clock
  std::vector<uint32_t> waiters(nodes_.size(), kNone);  // of a signal: the first queue that waits
  std::vector<uint32_t> also_waits(queues, kNone);      // the next queue that waits for it
  std::vector<uint32_t> ready(queues);
  for (uint32_t q = 0; q < queues; ++q) ready[q] = queues - 1 - q;
  size_t done = 0;
  while (!ready.empty()) {
    const uint32_t q = ready.back();
    ready.pop_back();
    const std::vector<Command>& commands = program_.queues[q].commands;
    for (; next[q] < commands.size(); ++next[q]) {
      const Place place{q, next[q]};
      if (commands[next[q]].op == Op::poll) {
        if (const Place* signal = missing(place, next)) {
          uint32_t& first = waiters[starts_[signal->queue] + signal->command];
          also_waits[q] = std::exchange(first, q);
          break;
        }
        current[q] = join(place, current[q]);
      }
      node(place).clock = current[q];
      uint32_t waiter = std::exchange(waiters[starts_[q] + next[q]], kNone);
      while (waiter != kNone) {
        ready.push_back(waiter);
        waiter = std::exchange(also_waits[waiter], kNone);
      }
    }
    done += next[q] == commands.size();
  }
  if (done < queues) fail_deadlock(next);
}

// The first signal that a poll still waits for, or null.
const Place* Order::missing(Place poll, const std::vector<uint32_t>& next) const {
  const Place* first = releases_.data() + node(poll).releases;
  const Place* last = first + command_at(program_, poll).rows;
  const Place* found =
      std::find_if(first, last, [&](Place signal) { return next[signal.queue] <= signal.command; });
  return found == last ? nullptr : found;
}

// The clock after a poll: what the queue knew, and what the signals that released the poll knew.
uint32_t Order::join(Place poll, uint32_t current) {
  const size_t queues = program_.queues.size();
  if (opens_clock(program_.queues[poll.queue], poll.command)) {
    const auto opened = static_cast<uint32_t>(clocks_.size() / queues);
    clocks_.resize(clocks_.size() + queues);
    std::copy_n(clocks_.data() + current * queues, queues, clocks_.data() + opened * queues);
    if (!known_.empty()) known_.push_back(known_[current]);
    current = opened;
  }
  const Place* signal = releases_.data() + node(poll).releases;
  for (uint32_t k = 0; k < command_at(program_, poll).rows; ++k, ++signal) {
    join_clock(current, node(*signal).clock);
    raise(current, signal->queue, signal->command + 1);
  }
  return current;
}

void Order::join_clock(uint32_t into, uint32_t from) {
  const size_t queues = program_.queues.size();
  const uint32_t* known = clocks_.data() + from * queues;
  if (!known_.empty() && !known_[from].many) {
    for (const uint32_t queue : known_[from].queues) raise(into, queue, known[queue]);
    return;
  }
  if (!known_.empty()) known_[into].many = true;
  uint32_t* joined = clocks_.data() + into * queues;
  for (size_t q = 0; q < queues; ++q) joined[q] = std::max(joined[q], known[q]);
}

void Order::raise(uint32_t clock, uint32_t queue, uint32_t commands) {
  uint32_t& entry = clocks_[clock * program_.queues.size() + queue];
  if (entry >= commands) return;
  if (entry == 0 && !known_.empty() && !known_[clock].many) {
    Known& known = known_[clock];
    known.queues.push_back(queue);
    if (known.queues.size() > program_.queues.size() / kKnownShare) known = {.many = true};
  }
  entry = commands;
}

void Order::check_rising() const {
  for (size_t i = 1; i < signals_.size(); ++i) {
    const OrderSignal& first = signals_[i - 1];
    const OrderSignal& second = signals_[i];
    if (first.word != second.word || done_before(first, second.place)) continue;
    fail(Code::verify, "words: ", describe(program_, second.place),
         ": must happen after the smaller value of ", describe(program_, first.place));
  }
}

// Whether that row of a signal is done before `place` begins. Its rows are events of their own: to
// have seen one tells nothing of the others, but a later command of its queue tells of all.
bool Order::done_before(const OrderSignal& signal, Place place) const {
  if (!before(signal.place, place)) return false;
  const bool one =
      signal.place.queue == place.queue || command_at(program_, signal.place).rows == 1;
  if (one || clock(place)[signal.place.queue] > signal.place.command + 1) return true;
  for (uint32_t q = 0; q < program_.queues.size(); ++q) {
    const std::vector<Command>& commands = program_.queues[q].commands;
    for (uint32_t c = 0; c < commands.size(); ++c) {
      if (commands[c].op != Op::poll || !before({q, c}, place)) continue;
      for (uint32_t row = 0; row < commands[c].rows; ++row) {
        if (word_of(commands[c], row) == signal.word &&
            releases_[node({q, c}).releases + row] == signal.place) {
          return true;
        }
      }
    }
  }
  return false;
}

void Order::fail_deadlock(const std::vector<uint32_t>& next) const {
  std::string text;
  for (uint32_t q = 0; q < program_.queues.size(); ++q) {
    if (next[q] == program_.queues[q].commands.size()) continue;
    const Place poll{q, next[q]};
    text += cat(text.empty() ? "" : "; ", describe(program_, poll), ": waits for ever for ",
                describe(program_, *missing(poll, next)));
  }
  fail(Code::verify, "deadlock: ", text);
}

}  // namespace offcore
