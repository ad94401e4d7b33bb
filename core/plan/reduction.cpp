#include "core/plan/reduction.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "core/base/error.h"
#include "core/ir/verify.h"
#include "core/machine/cost.h"
#include "core/plan/chunks.h"
#include "core/plan/flags.h"

namespace offcore {
namespace {

constexpr uint64_t kOneShotBytesMax = 4 << 20;  // of all arrays that a rank receives
constexpr uint32_t kLag = 2;  // chunks of a queue between the exchange and the gather of one

class ReductionLowering {
 public:
  ReductionLowering(const ReductionPlan& plan, const Machine& machine, const ProtocolForm& form,
                    uint64_t chunk_bytes)
      : plan_(plan),
        machine_(machine),
        form_(form),
        words_(machine, static_cast<Rank>(plan.parts.size())),
        ranks_(static_cast<Rank>(plan.parts.size())),
        gathers_(plan.op != "reduce_scatter"),
        largest_(*std::max_element(plan.parts.begin(), plan.parts.end())) {
    for (const uint64_t part : plan.parts) {
      offsets_.push_back(total_bytes_);
      total_bytes_ += part;
    }
    const bool one = form.captured || plan.op == "reduce";  // signals of one word are in order
    const uint32_t most = one ? 1 : std::min<uint32_t>(kChunkQueues, machine.engines_peer);
    chunking_ = Chunks(chunk_bytes, largest_, most);
    chunks_ = std::max(chunking_.count(largest_), 1u);
    queues_ = std::min(most, chunks_);
  }

  Program run() {
    declare("pipelined");
    for (Rank rank = 0; rank < ranks_; ++rank) {
      for (uint32_t queue = 0; queue < queues_; ++queue) {
        add(rank, static_cast<uint16_t>(queue), engine(rank, queue));
      }
      add(rank, kCallerQueue, caller(rank));
    }
    return std::move(program_);
  }

  Program run_one_shot() {
    declare("one_shot");
    for (Rank rank = 0; rank < ranks_; ++rank) {
      add(rank, 0, whole_to_all(rank));
      add(rank, kCallerQueue, reduce_all(rank));
    }
    return std::move(program_);
  }

 private:
  void declare(std::string_view variant) {
    const bool one_shot = variant == "one_shot";
    const bool direct = gathers_ && !one_shot && !form_.staged;
    program_ = {.op = plan_.op,
                .machine = machine_.name,
                .variant = std::string(variant),
                .protocol = form_.captured ? Protocol::barrier : Protocol::eager,
                .mode = form_.captured ? Mode::capture : Mode::eager,
                .ranks = ranks_,
                .flag_words = words_.count(),
                .flag_span = static_cast<uint16_t>(chunks_),
                .reduction = plan_.reduction,
                .buffers = {flag_buffer()}};
    if (!plan_.in_place) {
      in_ = declare("in", Buffer::Home::local, total_bytes_);
    }
    out_ = declare("out", direct ? Buffer::Home::window : Buffer::Home::local,
                   gathers_ ? total_bytes_ : largest_);
    if (plan_.in_place) in_ = out_;
    const uint64_t peers = ranks_ - 1u;
    ring_bytes_ = std::min<uint64_t>(chunks_, kRingDepth) * peers * chunking_.bytes();
    const uint64_t slot = one_shot ? peers * round_up(total_bytes_, kChunkAlign)
                                   : ring_bytes_ * (gathers_ && form_.staged ? 2 : 1);
    if (peers > 0) slot_ = declare("slot", Buffer::Home::window, slot);
  }

  BufferId declare(std::string_view name, Buffer::Home kind, uint64_t bytes) {
    program_.buffers.push_back({.name = std::string(name), .kind = kind, .bytes = bytes});
    return static_cast<BufferId>(program_.buffers.size() - 1);
  }

  void add(Rank rank, uint16_t index, std::vector<Command> commands) {
    if (commands.empty()) return;
    program_.queues.push_back({.rank = rank, .index = index, .commands = std::move(commands)});
  }

  uint64_t bytes_of(Rank part, uint32_t chunk) const {
    return chunking_.bytes_of(plan_.parts[part], chunk);
  }

  Slice in_array(Rank rank, BufferId buffer, Rank part, uint32_t chunk) const {
    return {offsets_[part] + chunking_.begin(chunk), rank, buffer};
  }

  // Where a rank reduces a chunk of its part to. One without an output has the slot's first row.
  Slice reduced(Rank rank, uint32_t chunk) const {
    if (!gathers_) return {chunking_.begin(chunk), rank, out_};
    return receives(rank) ? in_array(rank, out_, rank, chunk)
                          : landing(rank, rank == 0 ? 1 : 0, chunk, false);
  }

  static uint64_t row_of_peer(Rank owner, Rank peer) { return peer < owner ? peer : peer - 1u; }

  // The slot of what `peer` sends of a chunk: exchanged, or gathered.
  Slice landing(Rank owner, Rank peer, uint32_t chunk, bool gathered) const {
    const uint64_t place = chunk % kRingDepth * (ranks_ - 1u) + row_of_peer(owner, peer);
    return {(gathered ? ring_bytes_ : 0) + place * chunking_.bytes(), owner, slot_};
  }

  static uint16_t value_of(uint32_t chunk) { return FlagWords::value_of(chunk); }

  bool receives(Rank rank) const { return plan_.op == "all_reduce" || rank == plan_.root; }

  // In the order of a ring, beginning behind the rank: no two of them begin with the same peer.
  std::vector<Rank> peers_of(Rank rank) const {
    std::vector<Rank> peers;
    for (Rank step = 1; step < ranks_; ++step) {
      peers.push_back(static_cast<Rank>((rank + step) % ranks_));
    }
    return peers;
  }

  void signal(std::vector<Command>& commands, Rank reader, uint64_t word, uint16_t value) const {
    commands.push_back({.dst = words_.at(reader, word), .value = value, .op = Op::signal});
  }
  void poll(std::vector<Command>& commands, Rank reader, uint64_t word, uint16_t value) const {
    commands.push_back({.dst = words_.at(reader, word), .value = value, .op = Op::poll});
  }
  static void copy(std::vector<Command>& commands, const Slice& dst, const Slice& src,
                   uint64_t bytes) {
    if (bytes == 0) return;
    commands.push_back({.dst = dst, .src = src, .bytes = bytes, .op = Op::copy});
  }

  void enter(std::vector<Command>& commands, Rank rank) const {
    if (!form_.captured) return;
    for (const Rank peer : peers_of(rank)) poll(commands, rank, words_.entry(peer), 1);
  }

  // A queue takes every queues_-th chunk: it exchanges one, and gathers an earlier one.
  std::vector<Command> engine(Rank rank, uint32_t queue) const {
    std::vector<Command> commands;
    if (ranks_ == 1) return commands;
    enter(commands, rank);
    const uint32_t steps = (chunks_ - queue + queues_ - 1) / queues_;
    for (uint32_t step = 0; step < steps + (gathers_ ? kLag : 0); ++step) {
      if (step < steps) exchange(commands, rank, queue + step * queues_);
      if (gathers_ && step >= kLag) gather(commands, rank, queue + (step - kLag) * queues_);
    }
    return commands;
  }

  void exchange(std::vector<Command>& commands, Rank rank, uint32_t chunk) const {
    for (const Rank peer : peers_of(rank)) {
      if (chunk >= kRingDepth) {
        poll(commands, rank, words_.free(peer, 0), static_cast<uint16_t>(chunk - kRingDepth + 1));
      }
      copy(commands, landing(peer, rank, chunk, false), in_array(rank, in_, peer, chunk),
           bytes_of(peer, chunk));
      signal(commands, peer, words_.exchanged(rank, chunk), value_of(chunk));
    }
  }

  void gather(std::vector<Command>& commands, Rank rank, uint32_t chunk) const {
    poll(commands, rank, words_.passed(rank, chunk), value_of(chunk));
    for (const Rank peer : peers_of(rank)) {
      if (!receives(peer)) continue;
      if (form_.staged && chunk >= kRingDepth) {
        poll(commands, rank, words_.free(peer, 1), static_cast<uint16_t>(chunk - kRingDepth + 1));
      }
      const Slice dst =
          form_.staged ? landing(peer, rank, chunk, true) : in_array(peer, out_, rank, chunk);
      copy(commands, dst, reduced(rank, chunk), bytes_of(rank, chunk));
      signal(commands, peer, words_.gathered(rank, chunk), value_of(chunk));
    }
    if (!receives(rank)) free(commands, rank, chunk, 0);
  }

  std::vector<Command> caller(Rank rank) const {
    std::vector<Command> commands;
    if (form_.captured) {
      for (const Rank peer : peers_of(rank)) signal(commands, peer, words_.entry(rank), 1);
    }
    const uint32_t lag = gathers_ ? kLag * queues_ : 0;
    for (uint32_t step = 0; step < chunks_ + lag; ++step) {
      if (step < chunks_) reduce_chunk(commands, rank, step);
      if (gathers_ && step >= lag) take_chunk(commands, rank, step - lag);
    }
    return commands;
  }

  void reduce_chunk(std::vector<Command>& commands, Rank rank, uint32_t chunk) const {
    for (const Rank peer : peers_of(rank)) {
      poll(commands, rank, words_.exchanged(peer, chunk), value_of(chunk));
    }
    if (const uint64_t bytes = bytes_of(rank, chunk); bytes > 0) {
      const Slice own = in_array(rank, in_, rank, chunk);
      const Slice others = ranks_ == 1 ? own : landing(rank, rank == 0 ? 1 : 0, chunk, false);
      commands.push_back(reduction(reduced(rank, chunk), own, others, chunking_.bytes(), bytes));
    }
    if (gathers_ && ranks_ > 1) {
      signal(commands, rank, words_.passed(rank, chunk), value_of(chunk));
    }
    if (!gathers_ || receives(rank)) free(commands, rank, chunk, 0);
  }

  // The gathered parts of a chunk: out of the slots where they lie there.
  void take_chunk(std::vector<Command>& commands, Rank rank, uint32_t chunk) const {
    if (!receives(rank)) return;
    for (const Rank peer : peers_of(rank)) {
      poll(commands, rank, words_.gathered(peer, chunk), value_of(chunk));
    }
    if (!form_.staged) return;
    for (const Rank peer : peers_of(rank)) {
      const uint64_t bytes = bytes_of(peer, chunk);
      if (bytes == 0) continue;
      commands.push_back({.dst = in_array(rank, out_, peer, chunk),
                          .src = landing(rank, peer, chunk, true),
                          .bytes = bytes,
                          .op = Op::reduce});
    }
    free(commands, rank, chunk, 1);
  }

  void free(std::vector<Command>& commands, Rank rank, uint32_t chunk, uint32_t ring) const {
    if (chunk + kRingDepth >= chunks_) return;
    for (const Rank peer : peers_of(rank)) {
      signal(commands, peer, words_.free(rank, ring), static_cast<uint16_t>(chunk + 1));
    }
  }

  // Of the rank's own share and the others', which lie `step` apart.
  Command reduction(const Slice& dst, const Slice& own, const Slice& others, uint64_t step,
                    uint64_t bytes) const {
    return {.dst = dst,
            .src = others,
            .bytes = bytes,
            .dst_step = static_cast<int64_t>(own.offset),
            .src_step = static_cast<int64_t>(step),
            .rows = ranks_,
            .value = own.rank,
            .op = Op::reduce,
            .own = own.buffer};
  }

  std::vector<Command> whole_to_all(Rank rank) const {
    std::vector<Command> commands;
    enter(commands, rank);
    for (const Rank peer : peers_of(rank)) {
      copy(commands, whole(peer, rank), {0, rank, in_}, total_bytes_);
      signal(commands, peer, words_.exchanged(rank, 0), 1);
    }
    // The reduction overwrites what was sent.
    if (plan_.in_place && ranks_ > 1) signal(commands, rank, words_.passed(rank, 0), 1);
    return commands;
  }

  Slice whole(Rank owner, Rank peer) const {
    return {row_of_peer(owner, peer) * round_up(total_bytes_, kChunkAlign), owner, slot_};
  }

  std::vector<Command> reduce_all(Rank rank) const {
    std::vector<Command> commands;
    if (form_.captured) {
      for (const Rank peer : peers_of(rank)) signal(commands, peer, words_.entry(rank), 1);
    }
    for (const Rank peer : peers_of(rank)) poll(commands, rank, words_.exchanged(peer, 0), 1);
    if (plan_.in_place && ranks_ > 1) poll(commands, rank, words_.passed(rank, 0), 1);
    if (total_bytes_ == 0) return commands;
    const Slice own{0, rank, in_};
    const Slice others = ranks_ == 1 ? own : Slice{0, rank, slot_};
    commands.push_back(
        reduction({0, rank, out_}, own, others, round_up(total_bytes_, kChunkAlign), total_bytes_));
    return commands;
  }

  const ReductionPlan& plan_;
  const Machine& machine_;
  const ProtocolForm form_;
  const FlagWords words_;
  const Rank ranks_;
  const bool gathers_;
  const uint64_t largest_;  // part
  Chunks chunking_;
  std::vector<uint64_t> offsets_;
  uint64_t total_bytes_ = 0;
  uint64_t ring_bytes_ = 0;
  uint32_t chunks_ = 1;
  uint32_t queues_ = 1;
  BufferId in_ = 0;
  BufferId out_ = 0;
  BufferId slot_ = 0;
  Program program_;
};

}  // namespace

std::vector<uint64_t> equal_parts(uint64_t bytes, Rank ranks) {
  const uint64_t share = round_up((bytes + ranks - 1) / ranks, kChunkAlign);
  std::vector<uint64_t> parts(ranks);
  for (Rank rank = 0; rank < ranks; ++rank) {
    const uint64_t begin = std::min(bytes, rank * share);
    parts[rank] = std::min(bytes, begin + share) - begin;
  }
  return parts;
}

std::shared_ptr<const Program> plan_reduction(const ReductionPlan& plan, const std::string& variant,
                                              const Machine& machine, const ProtocolForm& form,
                                              const Deadline& deadline) {
  if (variant != "auto" && variant != "pipelined" && variant != "one_shot") {
    fail(Code::unsupported, plan.op, " has the variants pipelined and one_shot, not ", variant);
  }
  if (variant == "one_shot" && plan.op != "all_reduce") {
    fail(Code::unsupported, plan.op, " has no variant one_shot: only all_reduce has");
  }
  std::optional<Program> best;
  double best_ns = 0;
  const auto consider = [&](Program program) {
    program = legalize(std::move(program), machine);
    const double total_ns = estimate(program, machine).total_ns();
    if (best && total_ns >= best_ns) return;
    best = std::move(program);
    best_ns = total_ns;
  };
  if (variant != "one_shot") {
    const uint64_t largest = *std::max_element(plan.parts.begin(), plan.parts.end());
    for (const uint64_t bytes :
         chunk_sizes(largest, plan.parts.size() - 1, kRingDepth, form.captured)) {
      consider(ReductionLowering(plan, machine, form, bytes).run());
    }
  }
  const uint64_t total = std::accumulate(plan.parts.begin(), plan.parts.end(), uint64_t{0});
  const bool fits = total * plan.parts.size() <= kOneShotBytesMax;
  if (variant == "one_shot" || (variant == "auto" && plan.op == "all_reduce" && fits)) {
    consider(ReductionLowering(plan, machine, form, std::max<uint64_t>(total, 1)).run_one_shot());
  }
  auto program = std::make_shared<Program>(std::move(*best));
  verify(*program, deadline);
  return program;
}

}  // namespace offcore
