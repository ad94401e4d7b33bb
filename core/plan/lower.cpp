// Lowers moves to a program. Knows no collective: it groups moves into commands, assigns them to
// queues, and puts the protocol's polls and signals around them (DMA-Latte section 4).
//
// In a captured program a queue waits for the entry of every rank that it notifies, also where no
// bytes flow: a rank that has entered has reset what it was told last time (see verify.h, replay).
#include <algorithm>
#include <optional>
#include <utility>

#include "core/base/error.h"
#include "core/ir/verify.h"
#include "core/plan/flags.h"
#include "core/plan/group.h"
#include "core/plan/pipeline.h"
#include "core/plan/plan.h"
#include "core/plan/progression.h"

namespace offcore {
namespace {

constexpr uint16_t kDone = 1;                 // every word is used once a launch
constexpr uint64_t kShareBytesMin = 1 << 20;  // of a copy that engines divide, each
constexpr uint64_t kAlign = 64;

void check_possible(const Moves& moves, const Variant& variant, const ProtocolForm& form) {
  if (const auto reason = why_not(moves, variant, form); !reason.empty()) {
    fail(Code::unsupported, "variant ", to_string(variant), ": ", reason);
  }
}

class Lowering {
 public:
  Lowering(const Moves& moves, const Variant& variant, const Machine& machine,
           const ProtocolForm& form, ScaleRange* range = nullptr)
      : moves_(moves),
        variant_(variant),
        machine_(machine),
        form_(form),
        range_(range != nullptr ? *range : unasked_),
        words_(machine, moves.ranks) {
    form_.entry = form.entry || form.captured;
  }

  Program run() {
    check_possible(moves_, variant_, form_);
    stage();
    assign();
    return program();
  }

  Program run(QueuedCommands queues) {
    drains_.resize(moves_.ranks);
    assign(std::move(queues));
    return program();
  }

 private:
  // One queue of one rank while it is being filled.
  struct Draft {
    std::vector<Command> data;
    std::vector<Command> own;    // copies within the rank that nobody has to wait for
    std::vector<Rank> touched;   // remote ranks whose memory the data commands touch
    std::vector<Rank> notified;  // ranks that hear when this queue has delivered
    std::vector<Move> drains;    // staged: from the slot into `out`, once peers have delivered
  };

  Program program() {
    if (form_.captured) check_capturable();
    Program program{.op = moves_.op,
                    .machine = machine_.name,
                    .variant = to_string(variant_),
                    .protocol = protocol_of(form_),
                    .mode = form_.captured       ? Mode::capture
                            : variant_.prelaunch ? Mode::armed
                                                 : Mode::eager,
                    .ranks = moves_.ranks,
                    .buffers = moves_.buffers};
    note_words();
    for (Rank rank = 0; rank < moves_.ranks; ++rank) emit(rank, program);
    program.flag_words = words_.whole();
    program.flag_span = kDone;
    return program;
  }

  void check_capturable() const {
    if (words_.on_host()) {
      fail(Code::unsupported, "machine ", machine_.name, " keeps flags in host memory, where ",
           "several ranks poll one word: none may reset it, and no program can be captured");
    }
  }

  // Staged: peers write into the lane's slot, the owner copies on into its private `out`.
  void stage() {
    drains_.resize(moves_.ranks);
    if (!form_.staged) return;
    const auto slot = static_cast<BufferId>(moves_.buffers.size());
    // Every window has a part of the slot as large as itself.
    std::vector<std::optional<uint64_t>> part(moves_.buffers.size());
    uint64_t slot_bytes = 0;
    for (size_t id = kFlagBuffer + 1; id < moves_.buffers.size(); ++id) {
      Buffer& buffer = moves_.buffers[id];
      if (buffer.kind != Buffer::Home::window) continue;
      part[id] = slot_bytes;
      slot_bytes += buffer.bytes;
      buffer.kind = Buffer::Home::local;
    }
    moves_.buffers.push_back({.name = "slot", .kind = Buffer::Home::window, .bytes = slot_bytes});
    for (Move& move : moves_.moves) {
      // Only what a peer pushes; bytes from the host are fetched by the destination itself.
      const bool own = move.src.rank == move.dst.rank || move.src.rank == kHostRank;
      if (own || !part[move.dst.buffer]) continue;
      const Slice landing{*part[move.dst.buffer] + move.dst.offset, move.dst.rank, slot};
      drains_[move.dst.rank].push_back({.dst = move.dst, .src = landing, .bytes = move.bytes});
      move.dst = landing;
    }
    for (Rank rank = 0; rank < moves_.ranks; ++rank) {
      drains_[rank] = merge(std::move(drains_[rank]));
      close_gap(rank);
    }
  }

  // What a rank keeps parts the drains of what its peers send in two. Where that is small it goes
  // into the slot too, in the queue that drains and before the peers' parts have come, and one copy
  // drains all.
  void close_gap(Rank rank) {
    std::vector<Move>& drains = drains_[rank];
    if (drains.size() != 2 || !one_engine(variant_) || machine_.cost.overlap > 1) return;
    Move& first = drains[0];
    Move gap{.dst = first.src, .src = first.dst};  // from `out` into the slot
    gap.dst.offset += first.bytes;
    gap.src.offset += first.bytes;
    gap.bytes = drains[1].dst.offset - gap.src.offset;
    const bool alike = drains[1].dst.buffer == first.dst.buffer &&
                       drains[1].src.offset == gap.dst.offset + gap.bytes;
    const double small = std::min(machine_.cost.setup_ns * machine_.links.local_gbps, 0x1p60);
    if (!alike || !range_.at_most(gap.bytes, static_cast<uint64_t>(small))) return;
    const auto kept = std::find_if(moves_.moves.begin(), moves_.moves.end(), [&](const Move& move) {
      return move.dst == gap.src && move.bytes == gap.bytes && move.src.rank == rank;
    });
    if (kept != moves_.moves.end()) {
      kept->dst = gap.dst;
    } else if (moves_.in_place) {
      moves_.moves.push_back(gap);
    } else {
      return;
    }
    first.bytes += gap.bytes + drains[1].bytes;
    drains.pop_back();
  }

  uint16_t engines_of(size_t pieces) const {
    size_t engines = variant_.engines != 0 ? variant_.engines : machine_.engines_peer;
    if (one_engine(variant_)) engines = 1;
    engines = std::min({engines, size_t{machine_.engines_peer}, pieces});
    return static_cast<uint16_t>(std::max<size_t>(engines, 1));
  }

  // Where a link has room for several engines, as memory that CPUs share, they divide a large copy.
  // How many do depends on the peers alone, so that in place and out of place peers are told alike.
  void spread(std::vector<PlannedCopy>& pieces) {
    const auto remote = static_cast<size_t>(
        std::count_if(pieces.begin(), pieces.end(),
                      [](const PlannedCopy& piece) { return !piece.peers.empty(); }));
    const auto room = static_cast<size_t>(machine_.links.link_gbps / machine_.links.engine_gbps);
    const size_t engines = variant_.engines != 0 ? variant_.engines : machine_.engines_peer;
    const size_t ways = std::min(room, engines / std::max<size_t>(remote, 1));
    if (ways < 2 || variant_.kind != Variant::Shape::pcpy) return;
    std::vector<PlannedCopy> parts;
    for (const PlannedCopy& piece : pieces) {
      const uint64_t whole = piece.command.bytes;
      const size_t count = range_.at_most(whole, ways * kShareBytesMin - 1) ? 1 : ways;
      if (count > 1) range_.none();  // shares are aligned
      const uint64_t share = whole / count / kAlign * kAlign;
      for (size_t i = 0; i < count; ++i) {
        PlannedCopy& part = parts.emplace_back(piece);
        part.command.dst.offset += i * share;
        part.command.src.offset += i * share;
        part.command.bytes = i + 1 == count ? whole - i * share : share;
      }
    }
    pieces = std::move(parts);
  }

  void assign() {
    auto pieces = group(moves_, variant_.kind, machine_);
    drafts_.resize(moves_.ranks);
    for (Rank rank = 0; rank < moves_.ranks; ++rank) {
      spread(pieces[rank]);
      auto& drafts = drafts_[rank];
      if (!pieces[rank].empty()) drafts.resize(engines_of(pieces[rank].size()));
      for (size_t i = 0; i < pieces[rank].size(); ++i) {
        Draft& draft = drafts[i % drafts.size()];
        const bool own = last(pieces[rank][i], pieces[rank]);
        (own ? draft.own : draft.data).push_back(pieces[rank][i].command);
        draft.touched.insert(draft.touched.end(), pieces[rank][i].peers.begin(),
                             pieces[rank][i].peers.end());
      }
      part_own(drafts);
      notify(rank);
      if (!drains_[rank].empty() && drafts.empty()) drafts.emplace_back();
      if (!drains_[rank].empty()) drafts[0].drains = std::move(drains_[rank]);
    }
  }

  void assign(QueuedCommands queues) {
    drafts_.resize(moves_.ranks);
    for (Rank rank = 0; rank < moves_.ranks; ++rank) {
      std::vector<Rank> peers;
      for (Rank peer = 0; peer < moves_.ranks; ++peer) {
        if (peer != rank) peers.push_back(peer);
      }
      peers = in_ring_order(std::move(peers), rank, moves_.ranks);
      for (std::vector<Command>& commands : queues[rank]) {
        Draft& draft = drafts_[rank].emplace_back();
        draft.data = std::move(commands);
        draft.touched = draft.notified = peers;
        // A host that keeps the flags sees by them alone that its own queues have ended.
        if (words_.on_host()) draft.notified.push_back(rank);
      }
    }
  }

  // Where an engine makes one copy at a time, those within the rank come after the signals: peers
  // get theirs earlier, and the time until they have is spent. Elsewhere all copies overlap. None
  // that would then read what another one has written: all moves read what was there before.
  bool last(const PlannedCopy& piece, const std::vector<PlannedCopy>& all) const {
    return machine_.cost.overlap <= 1 && piece.peers.empty() &&
           std::none_of(all.begin(), all.end(), [&](const PlannedCopy& other) {
             return !other.peers.empty() && writes_what_reads(other.command, piece.command);
           });
  }

  // Whether the first copy writes what the second one reads.
  bool writes_what_reads(const Command& first, const Command& second) const {
    for (uint32_t row = 0; row < first.rows; ++row) {
      const Slice dst = row_of(first.dst, first.dst_step, row, moves_.ranks);
      for (uint32_t other = 0; other < second.rows; ++other) {
        const Slice src = row_of(second.src, second.src_step, other, moves_.ranks);
        if (dst.buffer == src.buffer && dst.rank == src.rank &&
            dst.offset < src.offset + second.bytes && src.offset < dst.offset + first.bytes) {
          return true;
        }
      }
    }
    return false;
  }

  // What is copied within the rank behind the signals takes a queue of its own where it is large:
  // it needs nobody's entry, and runs while the peers' parts do.
  void part_own(std::vector<Draft>& drafts) {
    if (drafts.size() != 1 || variant_.engines != 0 || variant_.prelaunch) return;
    if (drafts[0].data.empty() || machine_.engines_peer < 2) return;
    uint64_t bytes = 0;
    for (const Command& command : drafts[0].own) {
      if (form_.staged && command.dst.buffer + 1u == moves_.buffers.size()) return;  // the slot
      bytes += command.bytes * command.rows;
    }
    if (range_.at_most(bytes, kOwnQueueBytesMin - 1)) return;
    drafts.emplace_back().own = std::exchange(drafts[0].own, {});
  }

  // A full exchange signals every peer, also where no bytes flow: that is what lets a rank that
  // has finished conclude that all have entered (the slot rule).
  void notify(Rank rank) {
    auto& drafts = drafts_[rank];
    std::vector<bool> heard(moves_.ranks, false);
    for (Draft& draft : drafts) {
      draft.touched = in_ring_order(std::move(draft.touched), rank, moves_.ranks);
      draft.notified = draft.touched;
      for (Rank peer : draft.notified) heard[peer] = true;
    }
    if (!moves_.full_exchange) return;
    std::vector<Rank> silent;
    for (Rank peer = 0; peer < moves_.ranks; ++peer) {
      if (peer != rank && !heard[peer]) silent.push_back(peer);
    }
    if (silent.empty()) return;
    if (drafts.empty()) drafts.emplace_back();
    drafts[0].notified.insert(drafts[0].notified.end(), silent.begin(), silent.end());
    drafts[0].notified = in_ring_order(std::move(drafts[0].notified), rank, moves_.ranks);
  }

  // Who is told by which queues, and by whose entry, from who tells and waits.
  void note_words() {
    exit_words_.resize(moves_.ranks);
    awaiting_.resize(moves_.ranks);
    for (Rank rank = 0; rank < moves_.ranks; ++rank) {
      for (size_t queue = 0; queue < drafts_[rank].size(); ++queue) {
        const Draft& draft = drafts_[rank][queue];
        for (const Rank reader : draft.notified) {
          exit_words_[reader].push_back(words_.exit(rank, queue));
        }
        for (const Rank peer : awaited_by(draft)) awaiting_[peer].push_back(rank);
      }
    }
    for (Rank rank = 0; rank < moves_.ranks; ++rank) {
      awaiting_[rank] = in_ring_order(std::move(awaiting_[rank]), rank, moves_.ranks);
    }
  }

  void emit(Rank rank, Program& program) {
    const auto& drafts = drafts_[rank];
    for (size_t index = 0; index < drafts.size(); ++index) {
      program.queues.push_back({.rank = rank,
                                .index = static_cast<uint16_t>(index),
                                .commands = engine_commands(rank, index)});
    }
    std::vector<Command> caller = caller_commands(rank);
    if (!caller.empty()) {
      program.queues.push_back({.rank = rank, .index = kCallerQueue, .commands = caller});
    }
  }

  std::vector<Command> engine_commands(Rank rank, size_t index) {
    const Draft& draft = drafts_[rank][index];
    std::vector<Command> commands;
    if (variant_.prelaunch) words_.poll(commands, rank, {words_.start(rank)}, kDone);
    if (form_.entry) {
      const std::vector<Rank>& awaited = awaited_by(draft);
      words_.poll(commands, rank, {awaited.begin(), awaited.end()}, kDone);
    }
    commands.insert(commands.end(), draft.data.begin(), draft.data.end());
    words_.signal(commands, draft.notified, words_.exit(rank, index), kDone);
    commands.insert(commands.end(), draft.own.begin(), draft.own.end());
    if (draft.drains.empty()) return commands;
    words_.poll(commands, rank, exit_words_[rank], kDone);
    for (const Move& move : draft.drains) {
      commands.push_back({.dst = move.dst, .src = move.src, .bytes = move.bytes, .op = Op::copy});
    }
    return commands;
  }

  std::vector<Command> caller_commands(Rank rank) {
    std::vector<Command> commands;
    if (form_.entry) words_.signal(commands, awaiting_[rank], words_.entry(rank), kDone);
    if (variant_.prelaunch && !drafts_[rank].empty()) {
      words_.signal(commands, {rank}, words_.start(rank), kDone);
    }
    const bool drains = !drafts_[rank].empty() && !drafts_[rank][0].drains.empty();
    if (!drains) words_.poll(commands, rank, exit_words_[rank], kDone);
    return commands;
  }

  // The ranks whose entry a queue waits for.
  const std::vector<Rank>& awaited_by(const Draft& draft) const {
    return form_.captured ? draft.notified : draft.touched;
  }

  Moves moves_;
  Variant variant_;
  const Machine& machine_;
  ProtocolForm form_;
  ScaleRange unasked_;
  ScaleRange& range_;
  const FlagWords words_;
  std::vector<std::vector<Draft>> drafts_;  // [rank][queue]
  std::vector<std::vector<Move>> drains_;   // [rank]
  // By rank: the words that tell it, and the ranks that wait for its entry, in ring order.
  std::vector<std::vector<uint64_t>> exit_words_;
  std::vector<std::vector<Rank>> awaiting_;
};

}  // namespace

Protocol protocol_of(const ProtocolForm& form) {
  if (form.entry || form.captured) return Protocol::barrier;
  return form.staged ? Protocol::eager : Protocol::promise;
}

Program lower(const Moves& moves, const Variant& variant, const Machine& machine,
              const ProtocolForm& form, ScaleRange* range) {
  if (variant.kind == Variant::Shape::pipelined && form.staged) {
    check_possible(moves, variant, form);
    if (range != nullptr) range->none();  // chunks are cut by size
    return lower_pipelined(moves, variant.chunk_bytes, machine, form);
  }
  return Lowering(moves, variant, machine, form, range).run();
}

Program lower(const Moves& moves, const Variant& variant, const Machine& machine,
              const ProtocolForm& form, QueuedCommands queues) {
  return Lowering(moves, variant, machine, form).run(std::move(queues));
}

std::shared_ptr<const Program> plan(const Moves& moves, const Variant& variant,
                                    const Machine& machine, const ProtocolForm& form,
                                    const Deadline& deadline, ScaleRange* range) {
  Program lowered = lower(moves, variant, machine, form, range);
  if (range != nullptr) note_limits(lowered, machine, *range);
  auto program = std::make_shared<Program>(legalize(std::move(lowered), machine));
  if (range != nullptr) note_whole(*program, *range);
  verify(*program, deadline);
  return program;
}

std::vector<Variant> variants_of(const Moves& moves, const ProtocolForm& form) {
  std::vector<Variant> variants = all_variants();
  std::erase_if(variants,
                [&](const Variant& variant) { return !why_not(moves, variant, form).empty(); });
  return variants;
}

}  // namespace offcore
