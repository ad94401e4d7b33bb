// The estimate walks the queues in time order, as the simulator does, but takes a group of copies
// at once and gives every queue an equal part of each link that it uses, whatever the others do at
// that moment.
#include "core/machine/cost.h"

#include <algorithm>
#include <queue>
#include <utility>

#include "core/base/error.h"
#include "core/machine/timeline.h"

namespace offcore {
namespace {

class Estimate {
 public:
  Estimate(const Program& program, const Machine& machine)
      : program_(program),
        machine_(machine),
        resources_(machine, program.ranks),
        users_(resources_.capacities_gbps().size(), 0),
        group_bytes_(users_.size(), 0),
        pushed_bytes_(users_.size(), 0),
        submit_times_(program, machine),
        hosts_(host_threads(machine, program.ranks)),
        actors_(program.queues.size()),
        numbers_(program),
        words_(numbers_.count()),
        asides_(machine.native.signals_aside && submit_times_.serial()) {}

  Phases run(double limit_ns) {
    count_users();
    count_pushes();
    for (uint32_t i = 0; i < actors_.size(); ++i) {
      if (!program_.queues[i].commands.empty()) push(i, submit_times_.at(i, 0));
    }
    while (!heap_.empty()) {
      const NextQueue turn = heap_.top();
      heap_.pop();
      now_ns_ = turn.at_ns;
      while (step(turn.actor)) {  // on while no other queue's turn comes first
        const NextQueue next{actors_[turn.actor].now.at_ns, turn.actor};
        if (!heap_.empty() && next < heap_.top()) {
          heap_.push(next);
          break;
        }
        now_ns_ = next.at_ns;
      }
      if (now_ns_ >= limit_ns) return {.copy_ns = now_ns_};
    }
    Moment last;
    for (uint32_t i = 0; i < actors_.size(); ++i) {
      if (actors_[i].next < program_.queues[i].commands.size()) {
        fail(Code::verify, "deadlock: queue ", queue_name(program_.queues[i]), ", command ",
             actors_[i].next, ": its poll is never released");
      }
      last = latest(last, actors_[i].now);
    }
    return last.phases;
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  struct QueueClock {
    Moment now;  // the end of the last command
    uint32_t next = 0;
    uint32_t data_end = 0;   // behind its last data
    bool reduced = false;    // signals follow its reduction directly
    bool reducing = false;   // or polls and signals do
    uint32_t waits = kNone;  // the next queue that waits for the same word
  };
  struct Change {
    uint32_t before;  // another one of the word
    uint32_t moment;  // of all words that a command signals
    uint16_t value;
  };
  struct Notice {
    uint16_t value;
    Moment at;
  };
  struct WordHistory {         // small: programs name many words, and use some of them
    uint32_t change = kNone;   // the last one
    uint32_t waiting = kNone;  // the last queue that came to wait
    uint32_t notice = kNone;   // what the host thread has read last
  };
  struct NextQueue {
    double at_ns;
    uint32_t actor;
    bool operator<(const NextQueue& other) const {
      return at_ns != other.at_ns ? at_ns > other.at_ns : actor > other.actor;
    }
  };

  void push(uint32_t i, const Moment& at) { heap_.push({at.at_ns, i}); }

  // How many queues use each resource, and where each queue's data end.
  void count_users() {
    std::vector<uint32_t> last(users_.size(), kNone);
    for (uint32_t i = 0; i < program_.queues.size(); ++i) {
      const std::vector<Command>& commands = program_.queues[i].commands;
      for (const Command& command : commands) {
        if (!moves_data(command.op)) continue;
        actors_[i].data_end = static_cast<uint32_t>(&command - commands.data()) + 1;
        for_each_flow(command, program_.ranks, [&](Rank dst, Rank src, uint64_t) {
          const Resources::Path path = resources_.path(src, dst);
          for (uint32_t k = 0; k < path.count; ++k) {
            if (last[path.index[k]] == i) continue;
            last[path.index[k]] = i;
            ++users_[path.index[k]];
          }
        });
      }
    }
  }

  // What callers write to peers passes the links that engines use meanwhile.
  void count_pushes() {
    for (const Queue& queue : program_.queues) {
      for (const Command& command : queue.commands) {
        if (command.op != Op::reduce || command.dst.rank == queue.rank) continue;
        const Resources::Path path = resources_.path(queue.rank, command.dst.rank);
        for (uint32_t k = 0; k < path.count; ++k) {
          pushed_bytes_[path.index[k]] += static_cast<double>(command.bytes);
        }
      }
    }
  }

  // When the queue's first `count` commands have been fetched.
  Moment fetched(uint32_t i, bool caller, uint32_t count) const {
    const Moment& submitted = submit_times_.at(i, count - 1);
    if (caller || program_.mode == Mode::armed) return submitted;
    return submitted.after(&Phases::schedule_ns,
                           machine_.cost.wake_ns + machine_.cost.fetch_ns * count);
  }

  // Takes the queue's next commands, if it can. False: it has ended, or is to be called again.
  bool step(uint32_t i) {
    QueueClock& actor = actors_[i];
    const Queue& queue = program_.queues[i];
    if (actor.next == queue.commands.size()) return false;
    const bool caller = queue.index == kCallerQueue;
    const Command& command = queue.commands[actor.next];
    const Moment start = latest(actor.now, fetched(i, caller, actor.next + 1));
    if (moves_data(command.op)) {
      const CopyGroup group = take_group(queue, actor);
      actor.now = latest(start.after(&Phases::copy_ns, group.whole_ns),
                         fetched(i, caller, actor.next).after(&Phases::copy_ns, group.last_ns));
      actor.reduced = actor.reducing = false;
    } else if (command.op == Op::signal) {
      signal(queue, actor, command, start);
    } else if (command.op == Op::poll) {
      if (!poll(i, command, start)) return false;
      actor.reduced = false;
    } else {
      const bool reduces = command.op == Op::reduce;
      actor.now =
          reduces ? start.after(&Phases::copy_ns,
                                reduce_ns(command, machine_) -
                                    (follows_reduce(queue, actor) ? machine_.cost.trigger_ns : 0))
                  : start;
      actor.reduced = actor.reducing = reduces;
      ++actor.next;
    }
    return true;
  }

  // How long a group of data commands takes, and its last one alone.
  struct CopyGroup {
    double whole_ns;
    double last_ns;
  };

  // The group at the queue's front, which it passes over.
  CopyGroup take_group(const Queue& queue, QueueClock& actor) {
    const Cost& cost = machine_.cost;
    const std::vector<double>& capacities = resources_.capacities_gbps();
    double engine_ns = 0;
    double link_ns = 0;
    double serial_ns = 0;
    double last_ns = 0;
    const uint32_t first = actor.next;
    touched_.clear();
    for (; actor.next < queue.commands.size(); ++actor.next) {
      const Command& command = queue.commands[actor.next];
      if (!moves_data(command.op)) break;
      double written = 0;
      last_ns = 0;
      for_each_flow(command, program_.ranks, [&](Rank dst, Rank src, uint64_t bytes) {
        written += static_cast<double>(bytes);
        const Resources::Path path = resources_.path(src, dst);
        for (uint32_t k = 0; k < path.count; ++k) {
          const uint32_t index = path.index[k];
          group_bytes_[index] += static_cast<double>(bytes);
          touched_.push_back(index);
          last_ns = std::max(last_ns, static_cast<double>(bytes) / capacities[index]);
        }
      });
      const double command_ns = written / engine_gbps(command, machine_);
      engine_ns += command_ns;
      last_ns = std::max(last_ns, command_ns);
      serial_ns += cost.setup_ns + last_ns;
    }
    for (const uint32_t index : touched_) {
      group_bytes_[index] += std::exchange(pushed_bytes_[index], 0);
      link_ns = std::max(link_ns, group_bytes_[index] * users_[index] / capacities[index]);
      group_bytes_[index] = 0;
    }
    const uint32_t copies = actor.next - first;
    const double pipelined_ns =
        cost.setup_ns + std::max({(copies - 1) * cost.issue_ns + last_ns, engine_ns, link_ns});
    return {.whole_ns = std::max(pipelined_ns, serial_ns / std::min(cost.overlap, copies)),
            .last_ns = cost.setup_ns + last_ns};
  }

  void signal(const Queue& queue, QueueClock& actor, const Command& command, const Moment& start) {
    const Cost& cost = machine_.cost;
    if (queue.index == kCallerQueue) {
      Moment& host = hosts_[host_thread_of(machine_, queue.rank)];
      const double trigger_ns = actor.reduced ? 0 : cost.trigger_ns;
      host = latest(start, host).after(&Phases::schedule_ns, trigger_ns * command_steps(command));
      actor.now = host;
    } else {
      actor.now = start.after(&Phases::sync_ns, cost.sync_ns * command_steps(command));
    }
    Moment seen = actor.now;
    if (queue.index != kCallerQueue && asides_ && actor.next < actor.data_end) {
      seen = seen.after(&Phases::sync_ns, cost.poll_ns);  // of the stream that signals
      actor.now = start;
    }
    ++actor.next;
    moments_.push_back(seen);
    for (uint32_t row = 0; row < command.rows; ++row) {
      WordHistory& word = words_[index_of(command, row)];
      changes_.push_back({.before = word.change,
                          .moment = static_cast<uint32_t>(moments_.size() - 1),
                          .value = command.value});
      word.change = static_cast<uint32_t>(changes_.size() - 1);
      while (word.waiting != kNone) {
        push(word.waiting, seen);
        word.waiting = std::exchange(actors_[word.waiting].waits, kNone);
      }
    }
  }

  // When the word first had the value, or null.
  const Moment* first_change(const WordHistory& word, uint16_t value) const {
    const Moment* first = nullptr;
    for (uint32_t i = word.change; i != kNone; i = changes_[i].before) {
      const Change& change = changes_[i];
      if (change.value < value) continue;
      const Moment& at = moments_[change.moment];
      if (first == nullptr || at.at_ns <= first->at_ns) first = &at;
    }
    return first;
  }

  bool poll(uint32_t i, const Command& command, const Moment& start) {
    Moment changed;
    for (uint32_t row = 0; row < command.rows; ++row) {
      WordHistory& word = words_[index_of(command, row)];
      const Moment* change = first_change(word, command.value);
      if (change == nullptr && command.value > 0) {
        actors_[i].waits = std::exchange(word.waiting, i);
        return false;
      }
      if (change != nullptr) changed = latest(changed, *change);
    }
    QueueClock& actor = actors_[i];
    const Queue& queue = program_.queues[i];
    if (queue.index == kCallerQueue && changed.at_ns > now_ns_) {
      push(i, changed);  // until then the host thread is others' to use
      return false;
    }
    ++actor.next;
    if (queue.index != kCallerQueue) {
      const double poll_ns = machine_.cost.poll_ns;
      // Where signals go aside, a wait takes as long where nothing is waited for.
      actor.now = asides_ ? latest(start, changed).after(&Phases::schedule_ns, poll_ns)
                          : latest(start, changed.after(&Phases::schedule_ns, poll_ns));
      return true;
    }
    // A kernel that reduces several chunks waits for them itself.
    actor.now = follows_reduce(queue, actor) ? latest(start, changed)
                                             : notice(queue, command, latest(start, changed));
    return true;
  }

  bool follows_reduce(const Queue& queue, const QueueClock& actor) const {
    return asides_ && queue.index == kCallerQueue && actor.reducing;
  }

  // A caller reads the words of its poll; one host thread reads a word once for all its ranks.
  Moment notice(const Queue& queue, const Command& command, Moment seen) {
    Moment& host = hosts_[host_thread_of(machine_, queue.rank)];
    const bool shared = hosts_.size() == 1;
    uint32_t words = shared ? 0 : command_steps(command);
    for (uint32_t row = 0; row < command.rows && shared; ++row) {
      const Notice* noticed = noticed_of(words_[index_of(command, row)], command.value);
      if (noticed == nullptr) ++words;
      if (noticed != nullptr) seen = latest(seen, noticed->at);
    }
    if (words == 0) return seen;
    host = latest(seen, host).after(&Phases::sync_ns, machine_.cost.host_poll_ns * words);
    for (uint32_t row = 0; row < command.rows && shared; ++row) {
      WordHistory& word = words_[index_of(command, row)];
      if (noticed_of(word, command.value) != nullptr) continue;
      word.notice = static_cast<uint32_t>(notices_.size());
      notices_.push_back({.value = command.value, .at = host});
    }
    return host;
  }

  // What the host thread has read, if it was that value or a later one. Null: it was not.
  const Notice* noticed_of(const WordHistory& word, uint16_t value) const {
    static constexpr Notice kNothing{.value = 0, .at = {}};
    const Notice& notice = word.notice == kNone ? kNothing : notices_[word.notice];
    return notice.value >= value ? &notice : nullptr;
  }

  // A command of several flag words is one step only where the machine has such commands.
  uint32_t command_steps(const Command& command) const {
    return machine_.native.strided_flags ? 1 : command.rows;
  }

  size_t index_of(const Command& command, uint32_t row) const {
    return numbers_.of(row_of(command.dst, command.dst_step, row, program_.ranks));
  }

  const Program& program_;
  const Machine& machine_;
  Resources resources_;
  std::vector<uint32_t> users_;
  std::vector<double> group_bytes_;   // by resource; zero outside take_group
  std::vector<double> pushed_bytes_;  // by resource; of callers, not yet part of a group
  std::vector<uint32_t> touched_;
  const SubmitTimes submit_times_;
  std::vector<Moment> hosts_;
  std::vector<QueueClock> actors_;
  const WordNumbers numbers_;
  std::vector<WordHistory> words_;
  std::vector<Change> changes_;
  std::vector<Moment> moments_;
  std::vector<Notice> notices_;
  const bool asides_;  // signals amid data
  std::priority_queue<NextQueue> heap_;
  double now_ns_ = 0;
};

}  // namespace

Phases estimate(const Program& program, const Machine& machine, double limit_ns) {
  check_places(program);
  return Estimate(program, machine).run(limit_ns);
}

}  // namespace offcore
