#include "core/plan/batch.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <utility>

#include "core/base/error.h"
#include "core/ir/verify.h"
#include "core/machine/copy_forms.h"
#include "core/plan/group.h"
#include "core/plan/plan.h"
#include "core/plan/progression.h"

namespace offcore {
namespace {

constexpr uint64_t kOffsetMask = (uint64_t{1} << kPositionBits) - 1;
constexpr size_t kMemoriesMax = size_t{1} << (64 - kPositionBits);

class Planner {
 public:
  Planner(const Moves& moves, std::span<const uint32_t> swaps, const BatchPolicy& policy,
          const Machine& machine, std::span<const Slice> seams)
      : moves_(moves),
        policy_(policy),
        machine_(machine),
        resources_(machine, moves.ranks),
        work_(moves.ranks) {
    number_memories(seams);
    place(swaps);
  }

  Batch run() {
    check_apart();
    if (policy_.merge) {
      merge(spans_);
      merge(swaps_);
    }
    if (policy_.bcst.value_or(machine_.native.bcst_rows > 1) && moves_.ranks > 1) broadcasts();
    if (policy_.fold.value_or(machine_.native.strided)) folds();
    for (const Span& span : spans_) add(command_of(span));
    for (const Span& span : swaps_) {
      Command command = command_of(span);
      command.op = Op::swap;
      add(command);
    }
    batch_.swaps = static_cast<uint32_t>(swaps_.size());
    return finish();
  }

 private:
  // Copies of one rank between the same two memories: what bounds them is their way.
  struct CopyPath {
    Rank dst = 0;
    Rank src = 0;
    uint64_t bytes = 0;
    std::vector<Command> commands;
    size_t engines = 1;
    size_t first_queue = 0;
  };

  static bool same_buffer(const Slice& a, const Slice& b) {
    return a.buffer == b.buffer && a.rank == b.rank;
  }

  static bool less(const Slice& a, const Slice& b) {
    return std::tuple(a.buffer, a.rank, a.offset) < std::tuple(b.buffer, b.rank, b.offset);
  }

  // In the order of buffers, ranks and seams, so that positions are in it too.
  void number_memories(std::span<const Slice> seams) {
    for (const auto side : {&Move::dst, &Move::src}) {
      const Slice* last = nullptr;
      for (const Move& move : moves_.moves) {
        const Slice& slice = move.*side;
        if (last != nullptr && same_buffer(*last, slice)) continue;
        last = &slice;
        add_memory({0, slice.rank, slice.buffer});
      }
    }
    for (const Slice& seam : seams) add_memory(seam);
    if (memories_.size() > kMemoriesMax) {
      fail(Code::unsupported, "a batch has at most ", kMemoriesMax, " memories, this one has ",
           memories_.size());
    }
  }

  void add_memory(const Slice& begin) {
    const auto at = std::lower_bound(memories_.begin(), memories_.end(), begin, less);
    if (at == memories_.end() || less(begin, *at)) memories_.insert(at, begin);
  }

  void place(std::span<const uint32_t> swaps) {
    std::vector<bool> swapped(moves_.moves.size(), false);
    for (const uint32_t index : swaps) {
      if (index >= swapped.size()) {
        fail(Code::invalid, "there is no entry ", index, " to swap: the batch has ",
             swapped.size());
      }
      swapped[index] = true;
    }
    spans_.reserve(moves_.moves.size());
    for (uint32_t i = 0; i < moves_.moves.size(); ++i) {
      const Move& move = moves_.moves[i];
      batch_.bytes += move.bytes;
      if (move.bytes == 0) {
        ++batch_.empty;
        continue;
      }
      const Span span{position(move.dst, move.bytes, i), position(move.src, move.bytes, i),
                      move.bytes, i};
      (swapped[i] ? swaps_ : spans_).push_back(span);
    }
    batch_.moves = static_cast<uint32_t>(moves_.moves.size());
    for (auto* spans : {&spans_, &swaps_}) {
      std::sort(spans->begin(), spans->end(),
                [](const Span& a, const Span& b) { return a.dst < b.dst; });
    }
  }

  // Whether the byte is in that memory, which lasts until the next one begins.
  bool holds(size_t memory, const Slice& byte) const {
    return same_buffer(memories_[memory], byte) && memories_[memory].offset <= byte.offset &&
           (memory + 1 == memories_.size() || less(byte, memories_[memory + 1]));
  }

  uint64_t position(const Slice& slice, uint64_t bytes, uint32_t move) {
    if (!holds(last_, slice)) {
      const auto next = std::upper_bound(memories_.begin(), memories_.end(), slice, less);
      last_ = static_cast<size_t>(next - memories_.begin()) - 1;
    }
    if (slice.offset > kOffsetMask || bytes > kOffsetMask - slice.offset) {
      fail(Code::unsupported, "a batch spans at most 2^", kPositionBits, " bytes of a memory");
    }
    if (!holds(last_, {slice.offset + bytes - 1, slice.rank, slice.buffer})) {
      fail(Code::invalid, "entry ", move, " crosses from one allocation into the next: split it ",
           "into two entries");
    }
    return uint64_t{last_} << kPositionBits | slice.offset;
  }

  Slice slice_of(uint64_t position) const {
    Slice slice = memories_[position >> kPositionBits];
    slice.offset = position & kOffsetMask;
    return slice;
  }

  // What a span reads or writes.
  struct Touch {
    uint64_t begin;
    uint64_t end;
    uint32_t move;
    bool writes;
    bool is_dst;
  };

  // Whether all that is read lies before, or behind, all that spans write, as where a GPU's memory
  // and the host's are the two sides.
  bool reads_elsewhere() const {
    uint64_t first_read = UINT64_MAX;
    uint64_t reads_end = 0;
    uint64_t writes_end = 0;
    for (const Span& span : spans_) {
      first_read = std::min(first_read, span.src);
      reads_end = std::max(reads_end, span.src + span.bytes);
      writes_end = std::max(writes_end, span.dst + span.bytes);
    }
    return spans_.empty() || reads_end <= spans_.front().dst || writes_end <= first_read;
  }

  // What is written comes sorted; so once what is read is sorted too, one walk over both sees all.
  void check_apart() const {
    std::vector<Touch> writes;
    std::vector<Touch> reads;
    writes.reserve(spans_.size() + 2 * swaps_.size());
    for (const Span& s : spans_) writes.push_back({s.dst, s.dst + s.bytes, s.move, true, true});
    if (!swaps_.empty() || !reads_elsewhere()) {
      reads.reserve(spans_.size());
      for (const Span& s : spans_) reads.push_back({s.src, s.src + s.bytes, s.move, false, false});
    }
    for (const Span& s : swaps_) {
      writes.push_back({s.dst, s.dst + s.bytes, s.move, true, true});
      writes.push_back({s.src, s.src + s.bytes, s.move, true, false});
    }
    const auto earlier = [](const Touch& a, const Touch& b) { return a.begin < b.begin; };
    if (!swaps_.empty()) std::sort(writes.begin(), writes.end(), earlier);
    std::sort(reads.begin(), reads.end(), earlier);
    // The one of each kind that reaches furthest is all that a later one can meet first.
    const Touch* write = nullptr;
    const Touch* read = nullptr;
    for (size_t w = 0, r = 0; w < writes.size() || r < reads.size();) {
      const bool writing =
          r == reads.size() || (w < writes.size() && writes[w].begin < reads[r].begin);
      const Touch& next = writing ? writes[w++] : reads[r++];
      if (write != nullptr && write->end > next.begin) fail_overlap(*write, next);
      if (writing && read != nullptr && read->end > next.begin) fail_overlap(*read, next);
      const Touch*& furthest = writing ? write : read;
      if (furthest == nullptr || next.end > furthest->end) furthest = &next;
    }
  }

  [[noreturn]] void fail_overlap(const Touch& one, const Touch& other) const {
    const auto side = [](const Touch& touch) { return touch.is_dst ? "destination" : "source"; };
    const uint64_t bytes = std::min(one.end, other.end) - other.begin;
    const bool swap = one.writes && other.writes && !(one.is_dst && other.is_dst);
    const auto& [first, second] =
        one.move <= other.move ? std::pair(one, other) : std::pair(other, one);
    if (one.move == other.move) {
      fail(Code::invalid, "entry ", one.move, ": its destination and its source overlap by ", bytes,
           " bytes");
    }
    fail(Code::invalid, "entries ", first.move, " and ", second.move, ": the ", side(first),
         " of entry ", first.move, " and the ", side(second), " of entry ", second.move,
         " overlap by ", bytes, " bytes", swap ? " (a swap writes both)" : "",
         "; entries of a batch have no order: use two batches");
  }

  void merge(std::vector<Span>& spans) {
    size_t kept = 0;
    for (const Span& span : spans) {
      if (kept > 0) {
        Span& last = spans[kept - 1];
        if (last.dst + last.bytes == span.dst && last.src + last.bytes == span.src &&
            same_memory(last.dst, span.dst) && same_memory(last.src, span.src)) {
          last.bytes += span.bytes;
          ++batch_.merged;
          continue;
        }
      }
      spans[kept++] = span;
    }
    spans.resize(kept);
  }

  Command command_of(const Span& span) const {
    return {
        .dst = slice_of(span.dst), .src = slice_of(span.src), .bytes = span.bytes, .op = Op::copy};
  }

  void add(const Command& command) {
    std::vector<CopyPath>& ways = work_[executor_of(command.dst, command.src)];
    auto way = std::find_if(ways.begin(), ways.end(), [&](const CopyPath& candidate) {
      return candidate.dst == command.dst.rank && candidate.src == command.src.rank;
    });
    if (way == ways.end()) {
      way = ways.insert(way, {.dst = command.dst.rank, .src = command.src.rank});
    }
    way->bytes += command.bytes * command.rows;
    way->commands.push_back(command);
  }

  // One source to the same place on ranks that follow each other: what one command can say.
  void broadcasts() {
    std::sort(spans_.begin(), spans_.end(), [](const Span& a, const Span& b) {
      return std::pair(a.src, a.dst) < std::pair(b.src, b.dst);
    });
    const uint32_t rows_max = std::max(machine_.native.bcst_rows, 2u);
    std::vector<Span> rest;
    for (size_t i = 0; i < spans_.size();) {
      Command command = command_of(spans_[i]);
      const size_t rows = run_of(
          std::min({spans_.size() - i, size_t{rows_max}, size_t{moves_.ranks}}), [&](size_t row) {
            const auto next = static_cast<uint32_t>(row + 1);
            return continues(command, next, spans_[i + next], spans_[i]) ? std::optional(kRankStep)
                                                                         : std::nullopt;
          });
      if (rows == 1) {
        rest.push_back(spans_[i]);
      } else {
        command.rows = static_cast<uint32_t>(rows);
        command.dst_step = kRankStep;
        batch_.bcst += command.rows;
        add(command);
      }
      i += rows;
    }
    spans_ = std::move(rest);
    std::sort(spans_.begin(), spans_.end(),
              [](const Span& a, const Span& b) { return a.dst < b.dst; });
  }

  bool continues(const Command& command, uint32_t row, const Span& next, const Span& first) const {
    const Rank own = command.src.rank;
    const Slice dst = slice_of(next.dst);
    return next.src == first.src && next.bytes == first.bytes && own != kHostRank &&
           command.dst.rank != kHostRank && command.dst.rank != own && dst.rank != own &&
           dst == row_of(command.dst, kRankStep, row, moves_.ranks);
  }

  // Whether a row costs an engine no more than a copy of its own would.
  bool pays(const Span& span) const {
    if (policy_.fold) return true;
    const double path = path_gbps(slice_of(span.dst).rank, slice_of(span.src).rank);
    const auto bytes = static_cast<double>(span.bytes);
    return RowCosts{
        .row_ns = bytes / std::min(path, machine_.links.strided_gbps),
        .single_ns = machine_.cost.issue_ns + bytes / std::min(path, machine_.links.engine_gbps)}
        .strided_pays(1);
  }

  void folds() {
    using FoldKey = std::tuple<uint64_t, uint64_t, uint64_t>;
    std::map<FoldKey, std::vector<Span>> alike;
    auto last = alike.end();
    for (const Span& span : spans_) {
      const FoldKey key(span.dst >> kPositionBits, span.src >> kPositionBits, span.bytes);
      if (last == alike.end() || last->first != key) last = alike.try_emplace(key).first;
      last->second.push_back(span);
    }
    spans_.clear();
    for (auto& [where, spans] : alike) {
      if (spans.size() >= policy_.fold_rows_min && pays(spans.front())) {
        for (const SpanFold& fold :
             offcore::fold(spans, policy_.fold_rows_min, machine_.limits.pitch_bytes_max)) {
          Command command = command_of(fold.first);
          command.rows = fold.rows;
          command.dst_step = static_cast<int64_t>(fold.dst_step);
          command.src_step = static_cast<int64_t>(fold.src_step);
          batch_.folded += fold.rows;
          ++batch_.strided;
          add(command);
        }
      }
      spans_.insert(spans_.end(), spans.begin(), spans.end());
    }
  }

  double path_gbps(Rank dst, Rank src) const {
    const Resources::Path path = resources_.path(src, dst);
    double gbps = path.count == 0 ? machine_.links.local_gbps : HUGE_VAL;
    for (uint32_t i = 0; i < path.count; ++i) {
      gbps = std::min(gbps, resources_.capacities_gbps()[path.index[i]]);
    }
    return gbps;
  }

  // As many engines as the way can feed, of those that there are for it.
  size_t engines_of(const CopyPath& way) const {
    const bool host = way.dst == kHostRank || way.src == kHostRank;
    const size_t all =
        host && machine_.engines_host > 0 ? machine_.engines_host : machine_.engines_peer;
    const double wanted = std::ceil(path_gbps(way.dst, way.src) / machine_.links.engine_gbps);
    return std::min(all, static_cast<size_t>(std::max(1.0, wanted)));
  }

  size_t engines_max() const {
    if (policy_.engines > machine_.engines_peer) {
      fail(Code::invalid, "engines is ", policy_.engines, "; ", machine_.name, " has only ",
           machine_.engines_peer);
    }
    if (policy_.engines != 0) return policy_.engines;
    const uint64_t limit = policy_.b2b_bytes_max.value_or(machine_.batches.b2b_bytes_max);
    return batch_.bytes <= limit ? 1 : machine_.engines_peer;
  }

  // Shares the engines out: each way one, and those that are left to the ways with the most bytes
  // an engine.
  size_t share(std::vector<CopyPath>& ways, size_t engines) const {
    if (ways.size() >= engines) {
      for (size_t i = 0; i < ways.size(); ++i) ways[i].first_queue = i % engines;
      return std::min(ways.size(), engines);
    }
    for (size_t left = engines - ways.size(); left > 0; --left) {
      CopyPath* hungry = nullptr;
      for (CopyPath& way : ways) {
        const size_t most = policy_.engines != 0 ? engines : engines_of(way);
        if (way.engines >= std::min(most, way.commands.size())) continue;
        if (hungry == nullptr || way.bytes * hungry->engines > hungry->bytes * way.engines) {
          hungry = &way;
        }
      }
      if (hungry == nullptr) break;
      ++hungry->engines;
    }
    size_t queues = 0;
    for (CopyPath& way : ways) way.first_queue = std::exchange(queues, queues + way.engines);
    return queues;
  }

  // Strided copies first: an engine is busy with one for as long as it takes to prepare the others.
  std::vector<std::vector<Command>> queues_of(std::vector<CopyPath>& ways, size_t engines) const {
    std::vector<std::vector<Command>> queues(ways.empty() ? 0 : share(ways, engines));
    std::vector<uint64_t> loads(queues.size());
    const uint32_t sub_batch = policy_.sub_batch.value_or(machine_.batches.sub_batch);
    for (const bool strided : {true, false}) {
      std::vector<SubBatches> singles(queues.size(), SubBatches(sub_batch));
      for (const CopyPath& way : ways) {
        for (const Command& command : way.commands) {
          if ((command.rows > 1) != strided) continue;
          size_t least = way.first_queue;
          for (size_t k = 1; k < way.engines; ++k) {
            if (loads[way.first_queue + k] < loads[least]) least = way.first_queue + k;
          }
          loads[least] += command.bytes * command.rows;
          if (!strided && singles[least].next_begins() && !queues[least].empty()) {
            queues[least].push_back({.op = Op::fence});
          }
          queues[least].push_back(command);
        }
      }
    }
    return queues;
  }

  Batch finish() {
    const size_t engines = engines_max();
    QueuedCommands queues;
    uint16_t stamp = 0;
    bool several = false;
    for (std::vector<CopyPath>& ways : work_) {
      queues.push_back(queues_of(ways, engines));
      several = several || queues.back().size() > 1;
      for (std::vector<Command>& commands : queues.back()) {
        if (!policy_.timed || policy_.captured) continue;
        commands.insert(commands.begin(), {.value = stamp++, .op = Op::timestamp});
        commands.push_back({.value = stamp++, .op = Op::timestamp});
      }
    }
    Moves header{.op = moves_.op, .ranks = moves_.ranks, .buffers = moves_.buffers};
    const Variant variant{.kind = several ? Variant::Shape::pcpy : Variant::Shape::b2b};
    auto program = std::make_shared<Program>(legalize(
        lower(header, variant, machine_, {.captured = policy_.captured}, std::move(queues)),
        machine_));
    if (moves_.ranks == 1 && swaps_.empty()) {
      verify_form(*program);  // the entries are apart, and so are the commands made of them
    } else {
      verify(*program);
    }
    batch_.program = std::move(program);
    return std::move(batch_);
  }

  const Moves& moves_;
  const BatchPolicy& policy_;
  const Machine& machine_;
  const Resources resources_;
  std::vector<Slice> memories_;              // by their number in positions
  size_t last_ = 0;                          // of them, that was asked for
  std::vector<Span> spans_;                  // by dst
  std::vector<Span> swaps_;                  // by dst
  std::vector<std::vector<CopyPath>> work_;  // by rank
  Batch batch_;
};

}  // namespace

Batch plan_batch(const Moves& moves, std::span<const uint32_t> swaps, const BatchPolicy& policy,
                 const Machine& machine, std::span<const Slice> seams) {
  return Planner(moves, swaps, policy, machine, seams).run();
}

}  // namespace offcore
