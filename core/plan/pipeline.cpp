#include "core/plan/pipeline.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/base/error.h"
#include "core/machine/cost.h"
#include "core/plan/chunks.h"
#include "core/plan/flags.h"
#include "core/plan/group.h"

namespace offcore {
namespace {

constexpr uint32_t kPiecesMax = 512;         // that the cost model looks at
constexpr uint32_t kDrainLag = 2;            // chunks, where one queue sends and drains
constexpr uint64_t kCutBytesMax = 16 << 20;  // of a chunk, of all peers

// What one rank sends to another: the bytes of its moves, one after another.
struct Stream {
  Rank from = 0;
  Rank to = 0;
  uint64_t row = 0;  // of the chunks in the receiver's slot
  std::vector<Move> moves = {};
  uint64_t bytes = 0;
  uint32_t chunks = 0;
};

class PipelineLowering {
 public:
  PipelineLowering(const Moves& moves, uint64_t chunk_bytes, const Machine& machine,
                   const ProtocolForm& form)
      : moves_(moves),
        machine_(machine),
        form_(form),
        words_(machine, moves.ranks),
        sends_(moves.ranks),
        receives_(moves.ranks),
        kept_(moves.ranks) {
    find_streams();
    chunking_ = Chunks(chunk_bytes != 0 ? chunk_bytes : std::max<uint64_t>(largest_, 1));
    for (Stream& stream : streams_) {
      const uint32_t least = moves_.full_exchange ? 1 : 0;
      stream.chunks = stream.bytes == 0 ? least : chunking_.count(stream.bytes);
      chunks_ = std::max(chunks_, stream.chunks);
    }
    // Engines take turns between queues only where one of them waits: where one port reaches all
    // peers, one queue sends chunks in their order.
    const uint32_t most = std::max(machine.engines_peer - 1u, 1u);
    const auto peers = static_cast<uint32_t>(std::max<uint64_t>(rows_, 1));
    const bool one = machine.topology == Topology::switched || sent_before_drained();
    queues_ = one ? 1 : std::min(most, peers);
    steps_ = in_step(machine, moves.ranks) && moves.full_exchange;
  }

  uint64_t largest() const { return largest_; }
  uint64_t senders() const { return rows_; }
  uint64_t cut_bytes_max() const { return steps_ ? kSteppedBytesMax / 2 : kCutBytesMax; }
  double lost_ns() const { return steps_ ? steps_ns(machine_, chunks_) : 0; }

  Program run() {
    if (chunks_ > kChunksMax) {
      fail(Code::unsupported, "chunks of ", chunking_.bytes(), " bytes are more than ", kChunksMax,
           " here: pass a larger size, or none");
    }
    Program program{.op = moves_.op,
                    .machine = machine_.name,
                    .variant = to_string(Variant{.kind = Variant::Shape::pipelined,
                                                 .chunk_bytes = chunking_.bytes()}),
                    .protocol = protocol_of(form_),
                    .mode = Mode::eager,
                    .ranks = moves_.ranks,
                    .flag_words = words_.count(),
                    .flag_span = static_cast<uint16_t>(std::max(chunks_, 1u)),
                    .buffers = moves_.buffers};
    for (Buffer& buffer : program.buffers) {
      const bool window = buffer.kind == Buffer::Home::window && &buffer != &program.buffers[0];
      if (window) buffer.kind = Buffer::Home::local;
    }
    const uint64_t places = std::min(chunks_, kRingDepth) * rows_;
    if (places > 0)
      program.buffers.push_back(
          {.name = "slot", .kind = Buffer::Home::window, .bytes = places * chunking_.bytes()});
    for (Rank rank = 0; rank < moves_.ranks; ++rank) emit(rank, program);
    return program;
  }

 private:
  // In the order of a ring, each rank beginning behind itself: no two begin with the same peer.
  void find_streams() {
    const Rank ranks = moves_.ranks;
    for (Rank from = 0; from < ranks; ++from) {
      for (Rank step = 1; step < ranks; ++step) {
        streams_.push_back({.from = from, .to = static_cast<Rank>((from + step) % ranks)});
      }
    }
    for (const Move& move : moves_.moves) {
      const Rank from = executor_of(move.dst, move.src);
      const Rank to = move.dst.rank;
      if (from == to || to == kHostRank) {
        kept_[from].push_back(move);
        continue;
      }
      const uint32_t steps = (to + ranks - from) % ranks;
      Stream& stream = streams_[size_t{from} * (ranks - 1u) + steps - 1];
      stream.moves.push_back(move);
      stream.bytes += move.bytes;
    }
    for (size_t i = 0; i < streams_.size(); ++i) {
      Stream& stream = streams_[i];
      if (stream.bytes == 0 && !moves_.full_exchange) continue;
      stream.row = receives_[stream.to].size();
      largest_ = std::max(largest_, stream.bytes);
      sends_[stream.from].push_back(i);
      receives_[stream.to].push_back(i);
      rows_ = std::max<uint64_t>(rows_, receives_[stream.to].size());
    }
  }

  void emit(Rank rank, Program& program) const {
    uint16_t index = 0;
    const auto add = [&](std::vector<Command> commands) {
      if (commands.empty()) return;
      program.queues.push_back({.rank = rank, .index = index++, .commands = std::move(commands)});
    };
    std::vector<Command> own;
    for (const Move& move : kept_[rank]) copy(own, move.dst, move.src, move.bytes);
    uint64_t own_bytes = 0;
    for (const Command& command : own) own_bytes += command.bytes;
    const bool one = machine_.engines_peer < 2;
    const bool apart = machine_.engines_peer > queues_ + 1 && own_bytes >= kOwnQueueBytesMin;
    if (one) {
      add(both(rank, std::exchange(own, {})));
    } else {
      for (uint32_t queue = 0; queue < queues_; ++queue) add(sending(rank, queue));
      add(draining(rank, apart ? std::vector<Command>{} : std::exchange(own, {})));
      add(std::move(own));
    }
    std::vector<Command> caller;
    if (form_.entry) words_.signal(caller, senders_to(rank), words_.entry(rank), 1);
    if (caller.empty()) return;
    program.queues.push_back({.rank = rank, .index = kCallerQueue, .commands = std::move(caller)});
  }

  std::vector<Rank> senders_to(Rank rank) const {
    std::vector<Rank> senders;
    for (const size_t i : receives_[rank]) senders.push_back(streams_[i].from);
    return in_ring_order(std::move(senders), rank, moves_.ranks);
  }

  uint32_t chunks_of(const std::vector<size_t>& streams) const {
    uint32_t chunks = 0;
    for (const size_t i : streams) chunks = std::max(chunks, streams_[i].chunks);
    return chunks;
  }

  void enter(std::vector<Command>& commands, Rank rank, const std::vector<size_t>& streams) const {
    if (!form_.entry) return;
    std::vector<uint64_t> words;
    for (const size_t i : streams) words.push_back(words_.entry(streams_[i].to));
    words_.poll(commands, rank, words, 1);
  }

  // A queue takes every queues_-th peer.
  std::vector<Command> sending(Rank rank, uint32_t queue) const {
    std::vector<Command> commands;
    std::vector<size_t> streams;
    for (size_t i = queue; i < sends_[rank].size(); i += queues_) {
      streams.push_back(sends_[rank][i]);
    }
    const uint32_t chunks = chunks_of(streams);
    if (chunks > 0) enter(commands, rank, streams);
    for (uint32_t chunk = 0; chunk < chunks; ++chunk) send(commands, rank, streams, chunk);
    return commands;
  }

  std::vector<Command> draining(Rank rank, std::vector<Command> commands) const {
    const uint32_t chunks = chunks_of(receives_[rank]);
    for (uint32_t chunk = 0; chunk < chunks; ++chunk) drain(commands, rank, chunk);
    return commands;
  }

  // Where a rank has one engine. A peer's chunk is free by then: its queue has drained it before it
  // sends the one that this rank waits for.
  std::vector<Command> both(Rank rank, std::vector<Command> commands) const {
    const uint32_t sent = chunks_of(sends_[rank]);
    const uint32_t drained = chunks_of(receives_[rank]);
    if (sent > 0) enter(commands, rank, sends_[rank]);
    for (uint32_t step = 0; step < std::max(sent, drained + kDrainLag); ++step) {
      if (step < sent) send(commands, rank, sends_[rank], step);
      if (step >= kDrainLag && step - kDrainLag < drained) drain(commands, rank, step - kDrainLag);
    }
    return commands;
  }

  void send(std::vector<Command>& commands, Rank rank, const std::vector<size_t>& streams,
            uint32_t chunk) const {
    std::vector<uint64_t> freed;
    std::vector<Rank> readers;
    if (steps_ && chunk > 0) await_step(commands, rank, chunk - 1);
    for (const size_t i : streams) {
      const Stream& stream = streams_[i];
      if (chunk >= stream.chunks) continue;
      readers.push_back(stream.to);
      if (chunk >= kRingDepth) freed.push_back(words_.free(stream.to, 0));
    }
    words_.poll(commands, rank, freed, static_cast<uint16_t>(chunk - kRingDepth + 1));
    for (const size_t i : streams) {
      each_piece(streams_[i], chunk, [&](const Slice& slot, const Move& move) {
        copy(commands, slot, move.src, move.bytes);
      });
    }
    words_.signal(commands, readers, words_.exchanged(rank, chunk), FlagWords::value_of(chunk));
    if (sent_before_drained()) {
      words_.signal(commands, {rank}, words_.passed(rank, chunk), FlagWords::value_of(chunk));
    }
  }

  // Until all have sent that chunk.
  void await_step(std::vector<Command>& commands, Rank rank, uint32_t chunk) const {
    std::vector<uint64_t> words;
    for (const size_t i : receives_[rank]) {
      if (chunk < streams_[i].chunks) words.push_back(words_.exchanged(streams_[i].from, chunk));
    }
    words_.poll(commands, rank, words, FlagWords::value_of(chunk));
  }

  // Where ranks exchange ranges in place, what comes overwrites what is sent.
  bool sent_before_drained() const {
    return moves_.exchange && moves_.in_place && machine_.engines_peer >= 2;
  }

  void drain(std::vector<Command>& commands, Rank rank, uint32_t chunk) const {
    std::vector<uint64_t> words;
    std::vector<Rank> waiting;
    for (const size_t i : receives_[rank]) {
      const Stream& stream = streams_[i];
      if (chunk >= stream.chunks) continue;
      words.push_back(words_.exchanged(stream.from, chunk));
      if (chunk + kRingDepth < stream.chunks) waiting.push_back(stream.from);
    }
    if (sent_before_drained() && chunk < chunks_of(sends_[rank])) {
      words.push_back(words_.passed(rank, chunk));
    }
    words_.poll(commands, rank, words, FlagWords::value_of(chunk));
    for (const size_t i : receives_[rank]) {
      each_piece(streams_[i], chunk, [&](const Slice& slot, const Move& move) {
        copy(commands, move.dst, slot, move.bytes);
      });
    }
    words_.signal(commands, in_ring_order(std::move(waiting), rank, moves_.ranks),
                  words_.free(rank, 0), static_cast<uint16_t>(chunk + 1));
  }

  // The pieces of moves that a stream's chunk consists of, each with its place in the slot.
  template <typename Piece>
  void each_piece(const Stream& stream, uint32_t chunk, const Piece& piece) const {
    if (chunk >= stream.chunks) return;
    const uint64_t begin = chunking_.begin(chunk);
    const uint64_t end = begin + chunking_.bytes_of(stream.bytes, chunk);
    const uint64_t place = (chunk % kRingDepth * rows_ + stream.row) * chunking_.bytes();
    const auto slot = static_cast<BufferId>(moves_.buffers.size());
    uint64_t offset = 0;
    for (const Move& move : stream.moves) {
      const uint64_t first = std::max(begin, offset);
      const uint64_t last = std::min(end, offset + move.bytes);
      if (first < last) {
        Move part{.dst = move.dst, .src = move.src, .bytes = last - first};
        part.dst.offset += first - offset;
        part.src.offset += first - offset;
        piece(Slice{place + first - begin, stream.to, slot}, part);
      }
      offset += move.bytes;
    }
  }

  static void copy(std::vector<Command>& commands, const Slice& dst, const Slice& src,
                   uint64_t bytes) {
    commands.push_back({.dst = dst, .src = src, .bytes = bytes, .op = Op::copy});
  }

  const Moves& moves_;
  const Machine& machine_;
  const ProtocolForm form_;
  const FlagWords words_;
  std::vector<Stream> streams_;
  std::vector<std::vector<size_t>> sends_;     // [rank]: streams, in ring order
  std::vector<std::vector<size_t>> receives_;  // [rank]
  std::vector<std::vector<Move>> kept_;        // [rank]: within it, or from or to the host
  uint64_t largest_ = 0;                       // stream
  uint64_t rows_ = 0;                          // of a chunk in a slot: the most senders of a rank
  Chunks chunking_;
  uint32_t chunks_ = 0;
  uint32_t queues_ = 1;  // that send
  bool steps_ = false;   // in step
};

}  // namespace

Program lower_pipelined(const Moves& moves, uint64_t chunk_bytes, const Machine& machine,
                        const ProtocolForm& form) {
  PipelineLowering given(moves, chunk_bytes, machine, form);
  if (chunk_bytes != 0) return given.run();
  std::optional<Program> best;
  double best_ns = kNoLimit;
  const uint64_t shared = given.cut_bytes_max();
  for (const uint64_t bytes : chunk_sizes(given.largest(), given.senders(), kPiecesMax, shared)) {
    PipelineLowering lowering(moves, bytes, machine, form);
    const double lost_ns = lowering.lost_ns();
    if (lost_ns >= best_ns) continue;
    Program program = lowering.run();
    const double total_ns = lost_ns + estimate(program, machine, best_ns - lost_ns).total_ns();
    if (total_ns >= best_ns) continue;
    best = std::move(program);
    best_ns = total_ns;
  }
  return std::move(*best);
}

}  // namespace offcore
