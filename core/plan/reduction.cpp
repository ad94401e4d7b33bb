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

constexpr uint64_t kOneShotBytesMax = 32 << 20;  // of all arrays that a rank gets from two or more
constexpr double kClearly = 0.993;               // of closer estimates the one with fewer chunks
constexpr double kSteps = 0.85;  // two steps are estimated too low: an engine waits for cores
constexpr uint32_t kLag = 2;     // chunks between the exchange and the gather of one
constexpr uint32_t kDepth = 8;   // chunks of a peer in a slot that does not hold all of them
// Where ranks send in step, and chunks are larger. In a reduce to one rank, the others gather from
// the place that a chunk came to, kLag chunks later.
constexpr uint32_t kStepDepth = 2;
constexpr uint32_t kRootedDepth = 4;
constexpr uint64_t kReducedMax = 26 << 20;            // of all peers in one ring
constexpr uint64_t kSlotBytesMax = 192 << 20;         // of a slot that holds all of them
constexpr uint64_t kPushedMin = 6;                    // of a smaller share cores gain nothing
constexpr uint64_t kPushes[] = {512 << 10, 1 << 20};  // that callers may exchange themselves

// Ranks of which callers gather without engines: between more each has too many to push to.
constexpr Rank kAloneMax = 8;

class ReductionLowering {
 public:
  // In one shot, every rank reduces the whole array: all of it is everyone's part.
  ReductionLowering(const ReductionPlan& plan, const Machine& machine, const ProtocolForm& form,
                    Chunks chunking, bool one_shot, bool pushes)
      : plan_(plan),
        machine_(machine),
        form_(form),
        words_(machine, static_cast<Rank>(plan.parts.size())),
        ranks_(static_cast<Rank>(plan.parts.size())),
        gathers_(plan.op != "reduce_scatter" && !one_shot),
        overwrites_(one_shot && plan.in_place && ranks_ > 1),
        pushes_(pushes),
        parts_(plan.parts),
        chunking_(std::move(chunking)) {
    for (const uint64_t part : plan.parts) {
      offsets_.push_back(one_shot ? 0 : total_bytes_);
      total_bytes_ += part;
    }
    if (one_shot) parts_.assign(ranks_, total_bytes_);
    chunks_ = std::max(chunking_.count(largest_part()), 1u);
    // Where all peers are reached by one port, one queue sends chunks in their order: engines take
    // turns between queues only where one of them waits.
    const bool port = machine.topology == Topology::switched;
    const bool one = port || overwrites_ || form.captured;  // captured words release one poll
    queues_ = one ? 1 : std::clamp<uint32_t>(ranks_ - 1u, 1, machine.engines_peer);
    steps_ = in_step(machine, ranks_) && !form.captured;
    alone_ = pushes_ && chunks_ == 1 && ranks_ <= kAloneMax;
    const uint32_t step_depth = plan.op == "reduce" ? kRootedDepth : kStepDepth;
    depth_ = steps_ ? step_depth : kDepth;
    const uint64_t all_bytes = round_up(largest_part(), kChunkAlign) * (ranks_ - 1u);
    ring_ = !form.captured && chunks_ > depth_ && all_bytes > kSlotBytesMax;
    slot_bytes_ = ring_ ? depth_ * (ranks_ - 1u) * chunking_.bytes() : all_bytes;
    declare(one_shot);
  }

  const std::string& variant() const { return program_.variant; }
  double lost_ns() const { return steps_ ? steps_ns(machine_, chunks_) : 0; }

  Program run() {
    for (Rank rank = 0; rank < ranks_; ++rank) {
      for (uint32_t queue = 0; queue < queues_; ++queue) {
        add(rank, static_cast<uint16_t>(queue), engine(rank, queue));
      }
      add(rank, kCallerQueue, caller(rank));
    }
    return std::move(program_);
  }

 private:
  uint64_t largest_part() const { return *std::max_element(parts_.begin(), parts_.end()); }

  void declare(bool one_shot) {
    program_ = {.op = plan_.op,
                .machine = machine_.name,
                .variant = one_shot ? "one_shot" : "pipelined",
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
    const bool direct = gathers_ && !form_.staged;
    out_ = declare("out", direct ? Buffer::Home::window : Buffer::Home::local,
                   gathers_ ? total_bytes_ : largest_part());
    if (plan_.in_place) in_ = out_;
    const uint64_t slots = gathers_ && form_.staged ? 2 : 1;
    if (ranks_ > 1) slot_ = declare("slot", Buffer::Home::window, slot_bytes_ * slots);
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
    return chunking_.bytes_of(parts_[part], chunk);
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
    const uint64_t before = ring_ ? chunk % depth_ * chunking_.bytes() : chunking_.begin(chunk);
    const uint64_t place = before * (ranks_ - 1u) + row_of_peer(owner, peer) * step_of(chunk);
    return {(gathered ? slot_bytes_ : 0) + place, owner, slot_};
  }

  // Where a peer gets a rank's reduced chunk.
  Slice gathered(Rank peer, Rank rank, uint32_t chunk) const {
    return form_.staged ? landing(peer, rank, chunk, true) : in_array(peer, out_, rank, chunk);
  }

  // Between what two peers send of a chunk.
  uint64_t step_of(uint32_t chunk) const {
    if (ring_) return chunking_.bytes();
    return round_up(chunking_.bytes_of(largest_part(), chunk), kChunkAlign);
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

  void enter(std::vector<Command>& commands, Rank rank, const std::vector<Rank>& peers) const {
    if (!form_.captured) return;
    for (const Rank peer : peers) poll(commands, rank, words_.entry(peer), 1);
  }

  // A queue takes every queues_-th peer: it exchanges a chunk with each, and gathers an earlier
  // one. Waits, copies and signals go together: each costs a command, and copies in a row follow
  // each other without a gap.
  std::vector<Command> engine(Rank rank, uint32_t queue) const {
    std::vector<Command> commands;
    std::vector<Rank> peers;
    std::vector<Rank> receivers;
    const std::vector<Rank> all = peers_of(rank);
    for (size_t i = queue; i < all.size(); i += queues_) {
      peers.push_back(all[i]);
      if (gathers_ && receives(all[i])) receivers.push_back(all[i]);
    }
    if (peers.empty() || alone_) return commands;
    enter(commands, rank, peers);
    for (uint32_t step = 0; step < chunks_ + (receivers.empty() ? 0 : kLag); ++step) {
      const bool exchanges = step < chunks_ && !(pushes_ && step == 0);
      const bool gathers = !receivers.empty() && step >= kLag;
      const uint32_t earlier = step - kLag;
      if (exchanges) await_step(commands, rank, step);
      if (exchanges) await_free(commands, rank, peers, step, 0);
      if (gathers) {
        poll(commands, rank, words_.passed(rank, earlier), value_of(earlier));
        if (form_.staged) await_free(commands, rank, receivers, earlier, 1);
      }
      if (exchanges) exchange(commands, rank, peers, step);
      if (gathers) gather(commands, rank, receivers, earlier);
      if (exchanges) words_.signal(commands, peers, words_.exchanged(rank, step), value_of(step));
      if (exchanges && overwrites_) {
        signal(commands, rank, words_.passed(rank, step), value_of(step));
      }
      if (!gathers) continue;
      words_.signal(commands, receivers, words_.gathered(rank, earlier), value_of(earlier));
      if (!receives(rank)) free(commands, rank, earlier, 0);
    }
    return commands;
  }

  // Until all have sent the chunk before; the first may be the callers'.
  void await_step(std::vector<Command>& commands, Rank rank, uint32_t chunk) const {
    const uint32_t pushed = pushes_ ? 1 : 0;
    if (!steps_ || chunk <= pushed) return;
    std::vector<uint64_t> words;
    for (const Rank peer : peers_of(rank)) words.push_back(words_.exchanged(peer, chunk - 1));
    words_.poll(commands, rank, words, value_of(chunk - 1));
  }

  // What a caller that is alone gathers: each command waits for the reduction, whose kernel it may
  // share.
  void push_reduced(std::vector<Command>& commands, Rank rank) const {
    for (const Rank peer : peers_of(rank)) {
      if (!receives(peer)) continue;
      poll(commands, rank, words_.passed(rank, 0), value_of(0));
      if (const uint64_t bytes = bytes_of(rank, 0); bytes > 0) {
        commands.push_back({.dst = gathered(peer, rank, 0),
                            .src = reduced(rank, 0),
                            .bytes = bytes,
                            .op = Op::reduce});
      }
      signal(commands, peer, words_.gathered(rank, 0), value_of(0));
    }
  }

  // Until a chunk has a place, and the next one, too: a wait takes a while even where nothing is
  // waited for.
  void await_free(std::vector<Command>& commands, Rank rank, const std::vector<Rank>& peers,
                  uint32_t chunk, uint32_t ring) const {
    const uint32_t turn = steps_ ? 1 : depth_ / 2;
    if (!ring_ || chunk < depth_ || (chunk - depth_) % turn != 0) return;
    const uint32_t last = std::min(chunk + turn, chunks_) - 1;
    std::vector<uint64_t> words;
    for (const Rank peer : peers) words.push_back(words_.free(peer, ring));
    words_.poll(commands, rank, words, static_cast<uint16_t>(last - depth_ + 1));
  }

  void exchange(std::vector<Command>& commands, Rank rank, const std::vector<Rank>& peers,
                uint32_t chunk) const {
    for (const Rank peer : peers) {
      copy(commands, landing(peer, rank, chunk, false), in_array(rank, in_, peer, chunk),
           bytes_of(peer, chunk));
    }
  }

  void gather(std::vector<Command>& commands, Rank rank, const std::vector<Rank>& receivers,
              uint32_t chunk) const {
    for (const Rank peer : receivers) {
      copy(commands, gathered(peer, rank, chunk), reduced(rank, chunk), bytes_of(rank, chunk));
    }
  }

  std::vector<Command> caller(Rank rank) const {
    std::vector<Command> commands;
    if (form_.captured) {
      for (const Rank peer : peers_of(rank)) signal(commands, peer, words_.entry(rank), 1);
    }
    if (pushes_) push(commands, rank);
    const uint32_t lag = gathers_ ? kLag : 0;
    for (uint32_t step = 0; step < chunks_ + lag; ++step) {
      if (step < chunks_) reduce_chunk(commands, rank, step);
      if (gathers_ && alone_ && step == 0) push_reduced(commands, rank);
      if (gathers_ && step >= lag) take_chunk(commands, rank, step - lag);
    }
    return commands;
  }

  // The first chunk of the exchange, while engines begin with the others. Its words are no
  // engine's: whoever is first of the two raises no word above the other.
  void push(std::vector<Command>& commands, Rank rank) const {
    for (const Rank peer : peers_of(rank)) {
      if (const uint64_t bytes = bytes_of(peer, 0); bytes > 0) {
        commands.push_back({.dst = landing(peer, rank, 0, false),
                            .src = in_array(rank, in_, peer, 0),
                            .bytes = bytes,
                            .op = Op::reduce});
      }
      signal(commands, peer, words_.exit(rank, 0), value_of(0));
    }
    if (overwrites_) signal(commands, rank, words_.start(rank), value_of(0));
  }

  void reduce_chunk(std::vector<Command>& commands, Rank rank, uint32_t chunk) const {
    for (const Rank peer : peers_of(rank)) {
      const bool pushed = pushes_ && chunk == 0;
      poll(commands, rank, pushed ? words_.exit(peer, 0) : words_.exchanged(peer, chunk),
           value_of(chunk));
    }
    if (overwrites_) {
      const bool pushed = pushes_ && chunk == 0;
      poll(commands, rank, pushed ? words_.start(rank) : words_.passed(rank, chunk),
           value_of(chunk));
    }
    if (const uint64_t bytes = bytes_of(rank, chunk); bytes > 0) {
      const Slice own = in_array(rank, in_, rank, chunk);
      const Slice others = ranks_ == 1 ? own : landing(rank, rank == 0 ? 1 : 0, chunk, false);
      commands.push_back(reduction(reduced(rank, chunk), own, others, step_of(chunk), bytes));
    }
    const std::vector<Rank> peers = peers_of(rank);
    const bool tells =
        std::any_of(peers.begin(), peers.end(), [&](Rank one) { return receives(one); });
    const bool takes = alone_ && form_.staged && receives(rank);  // in the same kernel, perhaps
    if (gathers_ && (tells || takes)) {
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
      if (alone_) poll(commands, rank, words_.passed(rank, chunk), value_of(chunk));
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
    if (!ring_ || chunk + depth_ >= chunks_) return;
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

  const ReductionPlan& plan_;
  const Machine& machine_;
  const ProtocolForm form_;
  const FlagWords words_;
  const Rank ranks_;
  const bool gathers_;
  const bool overwrites_;        // what it has sent, where it reduces
  const bool pushes_;            // callers exchange the first chunk
  std::vector<uint64_t> parts_;  // bytes that each rank reduces
  Chunks chunking_;
  std::vector<uint64_t> offsets_;
  uint64_t total_bytes_ = 0;
  uint64_t slot_bytes_ = 0;
  uint32_t chunks_ = 1;
  uint32_t queues_ = 1;
  bool steps_ = false;  // ranks send in step
  bool alone_ = false;  // callers push all there is
  uint32_t depth_ = kDepth;
  bool ring_ = false;  // slots hold depth_ chunks of a peer, not all of them
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

bool one_shot_fits(const ReductionPlan& plan) {
  const uint64_t peers = plan.parts.size() - 1;
  const uint64_t total = std::accumulate(plan.parts.begin(), plan.parts.end(), uint64_t{0});
  return plan.op == "all_reduce" && (peers == 1 || total * peers <= kOneShotBytesMax);
}

std::shared_ptr<const Program> plan_reduction(const ReductionPlan& plan, const std::string& wanted,
                                              const Machine& machine, const ProtocolForm& form,
                                              const Deadline& deadline) {
  const std::string tuned = wanted == "auto" ? tuned_variant(plan, machine, form) : "";
  const std::string& variant = tuned.empty() ? wanted : tuned;
  if (variant != "auto" && variant != "pipelined" && variant != "one_shot") {
    fail(Code::unsupported, plan.op, " has the variants pipelined and one_shot, not ", variant);
  }
  if (variant == "one_shot" && plan.op != "all_reduce") {
    fail(Code::unsupported, plan.op, " has no variant one_shot: only all_reduce has");
  }
  std::optional<Program> best;
  double best_ns = 0;
  const auto consider = [&](ReductionLowering lowering) {
    const bool alike = best && best->variant == lowering.variant();
    const double limit_ns = best ? (alike ? kClearly : kSteps) * best_ns : kNoLimit;
    const double lost_ns = lowering.lost_ns();
    if (lost_ns >= limit_ns) return;
    Program program = legalize(lowering.run(), machine);
    const double total_ns = lost_ns + estimate(program, machine, limit_ns - lost_ns).total_ns();
    if (total_ns >= limit_ns) return;
    best = std::move(program);
    best_ns = total_ns;
  };
  const uint64_t ranks = plan.parts.size();
  const uint64_t peers = ranks - 1;
  const uint64_t stepped = kSteppedBytesMax / (plan.op == "reduce" ? 2 : 1);
  const uint64_t most = in_step(machine, static_cast<Rank>(ranks)) ? stepped : kReducedMax;
  const auto consider_cuts = [&](uint64_t largest, bool one_shot) {
    // One shot has no ring for what is gathered.
    const CutLimits limits{.peers = peers,
                           .shared = most * (one_shot && form.staged ? 2 : 1),
                           .captured = form.captured,
                           .behind = peers > 0 && machine.cost.reduce_gbps / ranks <
                                                      machine.links.egress_gbps / peers};
    const auto consider_first = [&](uint64_t first) {
      for (Chunks& chunks : chunkings(largest, limits, first)) {
        consider(ReductionLowering(plan, machine, form, std::move(chunks), one_shot, first > 0));
      }
    };
    consider_first(0);
    if (machine.cost.push_gbps == 0 || form.captured || peers == 0 || largest == 0) return;
    for (const uint64_t first : kPushes) {
      if (first >= largest / kPushedMin) consider_first(std::min(first, largest));
    }
  };
  const uint64_t total = std::accumulate(plan.parts.begin(), plan.parts.end(), uint64_t{0});
  if (variant == "one_shot" || (variant == "auto" && one_shot_fits(plan))) {
    consider_cuts(total, true);
  }
  if (variant != "one_shot") {
    consider_cuts(*std::max_element(plan.parts.begin(), plan.parts.end()), false);
  }
  auto program = std::make_shared<Program>(std::move(*best));
  verify(*program, deadline);
  return program;
}

}  // namespace offcore
