// The rules one after another, cheapest first: each may rely on those before it.
#include "core/ir/verify.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "core/ir/order.h"
#include "core/ir/reject.h"
#include "core/ir/text.h"

namespace offcore {
namespace {

constexpr size_t kLookEvery = 4096;  // accesses between two looks at the clock

void check_time(const Program& program, const Deadline& deadline) {
  if (!deadline.passed()) return;
  fail(Code::timeout, "planning ", program.op, " takes more than ", shown_s(deadline.wait_ns()),
       " s: pass a longer timeout, or move less in a call");
}

// The bytes that a row of a command touches in one buffer of one rank.
struct Access {
  uint32_t memory = 0;  // buffer and rank
  bool writes = false;
  uint64_t begin = 0;
  uint64_t end = 0;
  Place place;
};

class Accesses {
 public:
  Accesses(const Program& program, const Order& order)
      : program_(program), order_(order), enters_(program.protocol == Protocol::barrier) {
    for (uint32_t q = 0; q < program.queues.size(); ++q) {
      first_queue_.resize(program.queues[q].rank + size_t{1}, q);
    }
    first_queue_.resize(program.ranks + size_t{1}, static_cast<uint32_t>(program.queues.size()));
  }

  void check(const Deadline& deadline) {
    // Programs often write in the order of places already.
    collect(true);
    const auto reads = static_cast<std::ptrdiff_t>(all_.size());
    collect(false);
    sort(all_.begin(), all_.begin() + reads);
    sort(all_.begin() + reads, all_.end());
    std::inplace_merge(all_.begin(), all_.begin() + reads, all_.end(), less);
    // Only accesses that a later one may still overlap stay open. Reads never meet reads.
    std::vector<AccessRun> writes;
    std::vector<AccessRun> others;
    for (size_t i = 0; i < all_.size(); ++i) {
      const Access& access = all_[i];
      if (i % kLookEvery == 0) check_time(program_, deadline);
      close(access, writes);
      close(access, others);
      meet(access, writes);
      if (access.writes) meet(access, others);
      open(access, access.writes ? writes : others);
    }
    for (const Access& access : all_) check_exit(access);
  }

 private:
  using Iterator = std::vector<Access>::iterator;

  // Accesses of one queue to the same bytes, in its order: as of a scratch that it uses again and
  // again.
  struct AccessRun {
    const Access* first;
    std::vector<const Access*> more = {};

    size_t size() const { return 1 + more.size(); }
    const Access& operator[](size_t i) const { return i == 0 ? *first : *more[i - 1]; }
  };

  static bool less(const Access& a, const Access& b) {
    if (a.memory != b.memory) return a.memory < b.memory;
    if (a.begin != b.begin) return a.begin < b.begin;
    return std::pair(a.place.queue, a.place.command) < std::pair(b.place.queue, b.place.command);
  }

  static void sort(Iterator begin, Iterator end) {
    if (!std::is_sorted(begin, end, less)) std::sort(begin, end, less);
  }

  void collect(bool dst) {
    for (uint32_t q = 0; q < program_.queues.size(); ++q) {
      const std::vector<Command>& commands = program_.queues[q].commands;
      for (uint32_t c = 0; c < commands.size(); ++c) {
        const Command& command = commands[c];
        if (command.op == Op::reduce) add_reduce({q, c}, command, dst);
        if (!moves_data(command.op)) continue;
        if (dst) {
          add({q, c}, command.dst, command.dst_step, true);
        } else {
          add({q, c}, command.src, command.src_step, command.op == Op::swap);
        }
      }
    }
  }

  // A source that is the destination itself is read element by element before it is written.
  void add_reduce(Place place, const Command& command, bool dst) {
    if (dst) {
      check_entry(place, command.dst, true);
      return add_row(place, command.dst, command.bytes, true);
    }
    for (uint32_t row = 0; row < command.rows; ++row) {
      const Slice source = source_of(command, row);
      if (source != command.dst) add_row(place, source, command.bytes, false);
    }
  }

  void add(Place place, const Slice& slice, int64_t step, bool writes) {
    const Command& command = command_at(program_, place);
    // Rows that all read the same bytes are one access: many readers are no hazard.
    const uint32_t rows = step == 0 && !writes ? 1 : command.rows;
    for (uint32_t k = 0; k < rows; ++k) {
      const Slice row = row_of(slice, step, k, program_.ranks);
      check_entry(place, row, writes);
      add_row(place, row, command.bytes, writes);
    }
  }

  void add_row(Place place, const Slice& row, uint64_t bytes, bool writes) {
    all_.push_back({.memory = uint32_t{row.buffer} << 16 | row.rank,
                    .writes = writes,
                    .begin = row.offset,
                    .end = row.offset + bytes,
                    .place = place});
  }

  bool is_remote(Place place, BufferId buffer, Rank rank) const {
    return program_.buffers[buffer].kind == Buffer::Home::window &&
           program_.queues[place.queue].rank != rank;
  }

  void check_entry(Place place, const Slice& row, bool writes) const {
    if (!enters_ || !is_remote(place, row.buffer, row.rank)) return;
    const uint32_t end = first_queue_[row.rank + size_t{1}];  // a rank's caller queue is its last
    if (end > first_queue_[row.rank] && program_.queues[end - 1].index == kCallerQueue &&
        order_.after_signal_of(end - 1, place)) {
      return;
    }
    reject("entry", program_, place, writes ? "writes " : "reads ",
           program_.buffers[row.buffer].name, '[', row.rank, "] before the caller of rank ",
           row.rank, " has signalled that it entered");
  }

  // The owner of a window reads and reuses it once all of its queues have ended.
  void check_exit(const Access& access) const {
    const auto buffer = static_cast<BufferId>(access.memory >> 16);
    const auto rank = static_cast<Rank>(access.memory);
    if (!is_remote(access.place, buffer, rank)) return;
    for (uint32_t q = first_queue_[rank + size_t{1}]; q-- > first_queue_[rank];) {
      if (order_.before_end_of(q, access.place)) return;
    }
    reject("exit", program_, access.place, access.writes ? "writes " : "reads ",
           program_.buffers[buffer].name, '[', rank, "], and no queue of rank ", rank,
           " waits until it has: rank ", rank, " would be done too early");
  }

  static void open(const Access& access, std::vector<AccessRun>& runs) {
    const auto same = std::find_if(runs.begin(), runs.end(), [&](const AccessRun& run) {
      return run.first->place.queue == access.place.queue && run.first->begin == access.begin &&
             run.first->end == access.end;
    });
    if (same == runs.end()) {
      runs.push_back({.first = &access});
    } else {
      same->more.push_back(&access);
    }
  }

  // Those that end before an access begins.
  static void close(const Access& access, std::vector<AccessRun>& runs) {
    std::erase_if(runs, [&](const AccessRun& run) {
      return run.first->memory != access.memory || run.first->end <= access.begin;
    });
  }

  // Checks an access against the open ones. Of a run some come before it, all others have to come
  // after it: the first of these tells for the rest.
  void meet(const Access& access, const std::vector<AccessRun>& runs) const {
    for (const AccessRun& run : runs) {
      size_t later = 0;
      for (size_t end = run.size(); later < end;) {
        const size_t middle = (later + end) / 2;
        if (order_.before(run[middle].place, access.place)) {
          later = middle + 1;
        } else {
          end = middle;
        }
      }
      if (later == run.size() || order_.before(access.place, run[later].place)) continue;
      const Access& other = run[later];
      const bool in_order = std::pair(other.place.queue, other.place.command) <
                            std::pair(access.place.queue, access.place.command);
      fail_hazard(in_order ? other : access, in_order ? access : other);
    }
  }

  [[noreturn]] void fail_hazard(const Access& first, const Access& second) const {
    const BufferId buffer = static_cast<BufferId>(first.memory >> 16);
    const Rank rank = static_cast<Rank>(first.memory);
    const std::string bytes =
        cat("bytes ", std::max(first.begin, second.begin), " to ", std::min(first.end, second.end),
            " of ", program_.buffers[buffer].name, '[',
            rank == kHostRank ? "host" : std::to_string(rank), ']');
    const auto verb = [](const Access& access) { return access.writes ? "writes " : "reads "; };
    if (first.place == second.place) {
      reject("hazard", program_, first.place, "touches ", bytes,
             " twice, and its rows are unordered");
    }
    reject("hazard", program_, first.place, verb(first), bytes, ", which ",
           describe(program_, second.place), " ", verb(second),
           "as well, and neither happens before the other");
  }

  const Program& program_;
  const Order& order_;
  const bool enters_;                  // by signals that others wait for
  std::vector<uint32_t> first_queue_;  // of each rank, and one past the last rank's
  std::vector<Access> all_;
};

// A captured program's words: each is 0 before a replay and after it, whatever ranks are ahead.
//
// The entry words, of callers: rank q polls p's before p ends, and p enters again after that. The
// exit words, of engine queues: q has polled p's last one before q enters, and p waits for that.
class Replays {
 public:
  Replays(const Program& program, const Order& order) : program_(program), order_(order) {}

  void check() {
    if (program_.protocol != Protocol::barrier) {
      reject("replay", "a captured program enters by protocol barrier, not ",
             to_string(program_.protocol));
    }
    collect(Op::signal, signals_);
    collect(Op::poll, polls_);
    for (const auto& [word, signal] : signals_) {
      const auto poll = polls_.find(word);
      if (poll == polls_.end()) {
        reject("replay", program_, signal, "no queue polls word ", word.second, " of rank ",
               word.first, ", which then still holds its value at the next replay");
      }
      check_word(signal, poll->second);
    }
  }

 private:
  using ReplayWords = std::map<std::pair<Rank, uint64_t>, Place>;

  Rank rank_of(Place place) const { return program_.queues[place.queue].rank; }

  void collect(Op op, ReplayWords& words) const {
    for (uint32_t q = 0; q < program_.queues.size(); ++q) {
      const std::vector<Command>& commands = program_.queues[q].commands;
      for (uint32_t c = 0; c < commands.size(); ++c) {
        if (commands[c].op == op) collect({q, c}, words);
      }
    }
  }

  void collect(Place place, ReplayWords& words) const {
    const Command& command = command_at(program_, place);
    if (command.value != 1) reject("replay", program_, place, "a captured word is 0 or 1");
    for (uint32_t row = 0; row < command.rows; ++row) {
      const Slice word = row_of(command.dst, command.dst_step, row, program_.ranks);
      if (command.op == Op::poll && word.rank != rank_of(place)) {
        reject("replay", program_, place, "a captured poll resets its words: they must be its own");
      }
      const auto [other, added] = words.insert({{word.rank, word.offset}, place});
      if (added) continue;
      reject("replay", program_, place, to_string(command.op), "s word ", word.offset, " of rank ",
             word.rank, " a second time, after ", describe(program_, other->second));
    }
  }

  void check_word(Place signal, Place poll) const {
    const Rank from = rank_of(signal);
    const Rank reader = rank_of(poll);
    if (from == reader) return;  // a rank's replays are in order
    bool safe = false;
    const bool by_caller = program_.queues[signal.queue].index == kCallerQueue;
    for (uint32_t q = 0; q < program_.queues.size(); ++q) {
      const Queue& queue = program_.queues[q];
      if (by_caller) {
        safe |= queue.rank == from && order_.before_end_of(q, poll);
      } else {
        safe |= queue.rank == reader && queue.index == kCallerQueue &&
                order_.after_signal_of(q, signal);
      }
    }
    if (safe) return;
    reject("replay", program_, signal, "may signal again before ", describe(program_, poll),
           " has reset the word: ",
           by_caller ? cat("rank ", from, " can end before that poll")
                     : cat("it does not wait until rank ", reader, " has entered"));
  }

  const Program& program_;
  const Order& order_;
  ReplayWords signals_;
  ReplayWords polls_;
};

}  // namespace

void verify(const Program& program, const Deadline& deadline) {
  if (program.only) reject("shape", "only the queues of rank ", *program.only, " are here");
  verify_form(program);
  check_time(program, deadline);
  const Order order(program);
  Accesses(program, order).check(deadline);
  if (program.mode == Mode::capture) Replays(program, order).check();
}

}  // namespace offcore
