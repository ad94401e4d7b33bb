#include "core/kv/command_builder.h"

#include <algorithm>

namespace offcore::kv {
namespace {

constexpr size_t kStridesFrom = 3;       // any two blocks are at some step
constexpr uint32_t kTogetherMax = 128;   // of a call of 256 each takes twice as long (H100, 580)
constexpr uint32_t kTogetherFirst = 16;  // of a job, for which it surely does, of large pages
constexpr uint32_t kFirstPart = 64;      // of these, so that longer calls come soon
// Pages that take as long to copy as to submit. Smaller ones to a GPU whose stream is idle a driver
// (580) copies on the CPU: 64 of 16 KiB in one call take 350 us, 4 and then 60 take 75 (H100). So a
// first call is as small as keeps the engine busy until the next one.
constexpr uint64_t kShortFrom = uint64_t{32} << 10;
constexpr uint64_t kFirstCopies = 4;
constexpr uint64_t kFirstBytes = uint64_t{16} << 10;
constexpr uint64_t kBlocksPlain = 3;  // else strided copies are about as few calls
// Than is expected: a thread that has just woken, or shares its core, is slow for a while. Strided
// copies need none of that time.
constexpr double kSubmitSlower = 1.2;
// Of a part, so that the other direction's come between soon: to submit one takes as long as
// several plain ones.
constexpr uint32_t kStridedMax = 16;

}  // namespace

std::string_view to_string(Direction direction) {
  return direction == Direction::load ? "load" : "store";
}

bool CopyPolicy::folds(uint64_t rows, uint64_t bytes, bool submitted_soonest) const {
  if (!strided || !batches || plain_from) return strided && rows > 1;
  const auto count = static_cast<double>(rows);
  const double row_ns = submitted_soonest ? 0 : static_cast<double>(bytes) / host_gbps;
  return strided_ns + count * row_ns < count * std::max(plain_ns, row_ns);
}

std::vector<LayerGroup> layer_groups_of(const Layout& layout, uint32_t layers_together,
                                        std::span<const uint64_t> memories) {
  std::vector<LayerGroup> layer_groups;
  for (uint32_t first = 0; first < layout.layers(); first += layers_together) {
    const uint32_t last = std::min(layout.layers(), first + layers_together);
    LayerGroup& layer_group = layer_groups.emplace_back();
    layer_group.folds = layout.folds(first, last, memories);
    for (const Piece& piece : layout.pieces()) {
      if (piece.layer < first || piece.layer >= last) continue;
      layer_group.bytes += piece.bytes;
      ++layer_group.pieces;
    }
    for (const Fold& fold : layer_group.folds) layer_group.apart += fold.pieces;
  }
  return layer_groups;
}

CommandBuilder::CommandBuilder(Direction direction, CopyPolicy policy,
                               std::shared_ptr<const Layout> layout,
                               std::shared_ptr<const std::vector<LayerGroup>> layer_groups,
                               std::span<const int64_t> blocks, std::vector<Row> rows)
    : direction_(direction),
      policy_(policy),
      layout_(std::move(layout)),
      layer_groups_(std::move(layer_groups)),
      blocks_(blocks),
      rows_(std::move(rows)) {
  if (blocks_.empty()) stop();
}

uint64_t CommandBuilder::left_bytes() const {
  return ended() ? 0 : (blocks_.size() - next_) * (*layer_groups_)[layer_group_].bytes;
}

// The longest run from that block on.
CommandBuilder::BlockRun CommandBuilder::run(const RowSpan& rows, size_t first,
                                             size_t count_max) const {
  BlockRun run{.first = first};
  const size_t last = std::min(blocks_.size(), first + count_max);
  if (first + 1 >= last) return run;
  run.step = blocks_[first + 1] - blocks_[first];
  run.row_step = rows.of(first + 1).at - rows.of(first).at;
  const bool next_to = run.step == 1 && run.row_step == static_cast<int64_t>(layout_->row_bytes());
  if (run.step < 1 || run.row_step < 1) return run;
  size_t end = first + 1;
  while (end < last && rows.of(end).chunk == rows.of(first).chunk &&
         blocks_[end] - blocks_[end - 1] == run.step &&
         rows.of(end).at - rows.of(end - 1).at == run.row_step) {
    ++end;
  }
  const size_t count = end - first;
  if (count >= (next_to ? 2 : kStridesFrom)) run.count = count;
  return run;
}

bool CommandBuilder::apart() const {
  const uint32_t pieces = (*layer_groups_)[layer_group_].folds.front().pieces;
  return run(host(), next_, pieces + size_t{1}).count <= pieces;
}

void CommandBuilder::push(const Command& command, Part& part) const {
  part.commands.push_back(command);
  ++part.copies;
  part.strided += command.rows > 1;
  if (command.rows > 1 || !policy_.batches) return;
  const uint64_t plain = part.copies - part.strided;
  const bool first_ends = part.first > 0 && plain == part.first;
  const bool later_ends = plain > part.first && (plain - part.first) % part.together == 0;
  if (first_ends || later_ends) part.commands.push_back({.op = Op::fence});
}

// Between the cache and a row, wherever that lies.
void CommandBuilder::copy(uint64_t at, Slice row, uint64_t bytes, uint64_t rows, uint64_t step,
                          uint64_t row_step, Part& part) const {
  const Slice cache{.offset = at, .rank = kOwner, .buffer = kCache};
  const bool load = direction_ == Direction::load;
  Command command{.dst = load ? cache : row,
                  .src = load ? row : cache,
                  .bytes = bytes,
                  .rows = static_cast<uint32_t>(rows),
                  .op = Op::copy};
  if (rows > 1) {
    command.dst_step = static_cast<int64_t>(load ? step : row_step);
    command.src_step = static_cast<int64_t>(load ? row_step : step);
  }
  push(command, part);
}

// One fold of a run of blocks.
void CommandBuilder::add(const RowSpan& rows, const BlockRun& run, const Fold& fold, bool plain,
                         bool submitted_soonest, Part& part) const {
  const auto at = [&](size_t block, size_t piece) {
    const auto number = static_cast<uint64_t>(blocks_[run.first + block]);
    return fold.at + number * fold.block_step + piece * fold.step;
  };
  const auto row = [&](size_t block, size_t piece) {
    Slice slice = rows.in;
    slice.offset = reinterpret_cast<uint64_t>(rows.of(run.first + block).at) + fold.row_at +
                   piece * fold.row_step;
    return slice;
  };
  const uint64_t block_step = static_cast<uint64_t>(run.step) * fold.block_step;
  const auto row_step = static_cast<uint64_t>(run.row_step);
  if (run.count > 1 && fold.pieces == 1 && block_step == fold.bytes && row_step == fold.bytes) {
    return copy(at(0, 0), row(0, 0), run.count * fold.bytes, 1, 0, 0, part);
  }
  plain = plain && run.count <= fold.pieces;  // else there are few strided ones, of many rows
  const bool strided =
      policy_.folds(std::max<uint64_t>(run.count, fold.pieces), fold.bytes, submitted_soonest);
  if (plain || !strided || (policy_.plain_from && fold.bytes >= *policy_.plain_from)) {
    for (size_t block = 0; block < run.count; ++block) {
      for (size_t piece = 0; piece < fold.pieces; ++piece) {
        copy(at(block, piece), row(block, piece), fold.bytes, 1, 0, 0, part);
      }
    }
  } else if (run.count <= fold.pieces) {
    for (size_t block = 0; block < run.count; ++block) {
      copy(at(block, 0), row(block, 0), fold.bytes, fold.pieces, fold.step, fold.row_step, part);
    }
  } else {
    for (size_t piece = 0; piece < fold.pieces; ++piece) {
      copy(at(0, piece), row(0, piece), fold.bytes, run.count, block_step, row_step, part);
    }
  }
}

// Whole rows of the next blocks between the host and the stage: one copy for those side by side.
void CommandBuilder::add_rows(size_t count, Part& part) const {
  const uint64_t bytes = layout_->row_bytes();
  for (size_t i = 0; i < count;) {
    const Row& first = rows_[next_ + i];
    size_t together = 1;
    while (i + together < count && rows_[next_ + i + together].chunk == first.chunk &&
           rows_[next_ + i + together].at == first.at + together * bytes) {
      ++together;
    }
    const Slice stage{.offset = i * bytes, .rank = kNeighbour, .buffer = kStage};
    const Slice row{
        .offset = reinterpret_cast<uint64_t>(first.at), .rank = kHostRank, .buffer = kRows};
    const bool load = direction_ == Direction::load;
    push({.dst = load ? stage : row,
          .src = load ? row : stage,
          .bytes = together * bytes,
          .op = Op::copy},
         part);
    i += together;
  }
}

// What all parts end with: their place in the job, and rows that count from the lowest one.
void CommandBuilder::end(Part& part) {
  uint64_t first = UINT64_MAX;
  uint64_t last = 0;
  for (const Command& command : part.commands) {
    if (command.op != Op::copy) continue;
    const bool to = command.dst.buffer == kRows;
    if (!to && command.src.buffer != kRows) continue;
    const uint64_t at = to ? command.dst.offset : command.src.offset;
    const auto step = static_cast<uint64_t>(to ? command.dst_step : command.src_step);
    first = std::min(first, at);
    last = std::max(last, at + (command.rows - 1) * step + command.bytes);
  }
  part.rows = reinterpret_cast<std::byte*>(first);
  part.rows_span = last - first;
  for (Command& command : part.commands) {
    for (Slice* slice : {&command.dst, &command.src}) {
      if (command.op == Op::copy && slice->buffer == kRows) slice->offset -= first;
    }
  }
  part.ends_layer_group = next_ == blocks_.size();
  if (layer_group_ + 1 == layer_groups_->size()) copied_ = next_;
  if (part.ends_layer_group) {
    next_ = 0;
    ++layer_group_;
  }
}

Part CommandBuilder::next(const Budget& budget) {
  const LayerGroup& layers = (*layer_groups_)[layer_group_];
  const uint64_t left = (blocks_.size() - next_) * layers.apart;
  const uint64_t page = layers.bytes / layers.pieces;
  const uint32_t in_time = policy_.plain_from ? 0 : budget.in_time;
  const bool waits = in_time < policy_.together;  // the engine does
  const bool small = page < kShortFrom;
  const bool soon = waits && !small && layer_group_ == 0 && next_ == 0;
  const uint32_t submit_together = std::max(policy_.together, std::min(in_time, kTogetherMax));
  Part part{.together = soon ? kTogetherFirst : submit_together};
  if (waits && small && direction_ == Direction::load) {
    part.first = static_cast<uint32_t>(std::max(kFirstCopies, kFirstBytes / page));
  }
  const auto surely = static_cast<uint32_t>(in_time / kSubmitSlower);
  const uint64_t blocks_in_time = std::min<uint64_t>(
      {surely / layers.apart, budget.bytes / layers.bytes, blocks_.size() - next_});
  const bool folds = std::any_of(layers.folds.begin(), layers.folds.end(), [&](const Fold& fold) {
    return policy_.folds(fold.pieces, fold.bytes, budget.submitted_soonest);
  });
  const bool plain = policy_.batches && folds && blocks_in_time >= kBlocksPlain;
  const uint32_t commands = plain   ? surely
                            : folds ? budget.strided
                            : soon  ? std::min(budget.strided, kFirstPart)
                                    : budget.plain;
  const uint32_t strided_max = policy_.batches ? kStridedMax : UINT32_MAX;
  const size_t about = std::min<size_t>(commands, left) + policy_.together;
  part.commands.reserve(about + about / part.together + 2);  // and fences
  while (next_ < blocks_.size() && part.copies < commands && part.strided < strided_max) {
    uint64_t blocks = (budget.bytes - std::min(budget.bytes, part.bytes)) / layers.bytes;
    if (plain) blocks = std::min(blocks, (commands - part.copies) / layers.apart);
    if (blocks == 0 && part.bytes > 0) break;
    if (budget.apart) blocks = std::min<uint64_t>(blocks, layers.folds.front().pieces);
    const BlockRun found = run(host(), next_, std::max<uint64_t>(1, blocks));
    for (const Fold& fold : layers.folds)
      add(host(), found, fold, plain, budget.submitted_soonest, part);
    part.bytes += found.count * layers.bytes;
    part.pages += found.count * layers.pieces;
    next_ += found.count;
  }
  end(part);
  return part;
}

Part CommandBuilder::next_staged(size_t blocks_max) {
  const LayerGroup& layers = (*layer_groups_)[layer_group_];
  const size_t count = std::min<size_t>(blocks_max, blocks_.size() - next_);
  Part part{
      .bytes = count * layers.bytes, .pages = count * layers.pieces, .together = policy_.together};
  std::vector<Row> staged(count);
  for (size_t i = 0; i < count; ++i) {
    staged[i].at = reinterpret_cast<std::byte*>(i * layout_->row_bytes());
  }
  const bool load = direction_ == Direction::load;
  if (load) {
    add_rows(count, part);
    part.commands.push_back({.op = Op::fence});
  }
  const size_t first = next_;
  const RowSpan rows{staged, first, {0, kNeighbour, kStage}};
  while (next_ < first + count) {
    const BlockRun found = run(rows, next_, first + count - next_);
    for (const Fold& fold : layers.folds) add(rows, found, fold, false, false, part);
    next_ += found.count;
  }
  if (!load) {
    part.commands.push_back({.op = Op::fence});
    next_ = first;
    add_rows(count, part);
    next_ = first + count;
  }
  end(part);
  return part;
}

}  // namespace offcore::kv
