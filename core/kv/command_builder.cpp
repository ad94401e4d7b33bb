#include "core/kv/command_builder.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/plan/progression.h"

namespace offcore::kv {
namespace {

constexpr size_t kStridesFrom = 3;   // any two blocks are at some step
constexpr size_t kFencesAbout = 16;  // one for so many copies, for which there is to be room

void append(const Command& command, Part& part) {
  if (command.rows == 1 && part.calls.next_begins() && !part.commands.empty()) {
    part.commands.push_back({.op = Op::fence});
  }
  part.commands.push_back(command);
  ++part.copies;
  part.strided += command.rows > 1;
}

}  // namespace

std::string_view to_string(Direction direction) {
  return direction == Direction::load ? "load" : "store";
}

std::vector<LayerGroup> layer_groups_of(const Layout& layout, uint32_t layers_together,
                                        std::span<const uint64_t> memories) {
  std::vector<LayerGroup> layer_groups;
  for (uint32_t first = 0; first < layout.layers(); first += layers_together) {
    const uint32_t last = std::min(layout.layers(), first + layers_together);
    LayerGroup& layer_group = layer_groups.emplace_back();
    layer_group.folds = layout.folds(first, last, memories);
    for (const Piece& piece : layout.pieces()) {
      if (piece.layer < first) {
        ++layer_group.first_piece;
        layer_group.at += piece.bytes;
      }
      if (piece.layer < first || piece.layer >= last) continue;
      layer_group.bytes += piece.bytes;
      layer_group.piece_bytes = std::max(layer_group.piece_bytes, piece.bytes);
      ++layer_group.pieces;
    }
    for (const Fold& fold : layer_group.folds) {
      layer_group.apart += fold.pieces;
      for (uint64_t piece = 0; piece < fold.pieces; ++piece) {
        layer_group.pages.push_back(
            {.address = reinterpret_cast<uint64_t>(layout.base()) + fold.at + piece * fold.step,
             .block_step = fold.block_step,
             .bytes = fold.bytes,
             .at = (fold.row_at + piece * fold.row_step) / layout.row_blocks()});
      }
    }
  }
  return layer_groups;
}

CommandBuilder::CommandBuilder(Direction direction, const PageForms& forms,
                               std::shared_ptr<const Layout> layout,
                               std::shared_ptr<const std::vector<LayerGroup>> layer_groups,
                               std::span<const int64_t> blocks, std::span<const Row> rows,
                               Seams seams)
    : direction_(direction),
      forms_(forms),
      layout_(std::move(layout)),
      layer_groups_(std::move(layer_groups)),
      blocks_(blocks),
      rows_(rows),
      seams_(seams) {
  if (blocks_.empty()) stop();
}

uint64_t CommandBuilder::left_bytes() const {
  return ended() ? 0 : (blocks_.size() - next_) * block_bytes();
}

uint64_t CommandBuilder::block_bytes() const { return (*layer_groups_)[layer_group_].bytes; }

void CommandBuilder::push(const Command& command, Part& part) const {
  const bool host = command.dst.buffer == kRows || command.src.buffer == kRows;
  if (seams_.step == 0 || !host) return append(command, part);
  each_between(seams_, kRows, command, [&](const Command& one) { append(one, part); });
}

// The longest run from that block on.
CommandBuilder::BlockRun CommandBuilder::run(const RowSpan& rows, size_t first,
                                             size_t count_max) const {
  const auto step_of = [&](size_t i) -> std::optional<std::pair<int64_t, int64_t>> {
    const Row& row = rows.of(first + i);
    const Row& next = rows.of(first + i + 1);
    const int64_t step = blocks_[first + i + 1] - blocks_[first + i];
    const int64_t row_step = next.at - row.at;
    if (step < 1 || row_step < 1 || row.chunk != next.chunk) return std::nullopt;
    return std::pair(step, row_step);
  };
  const size_t count = run_of(std::min(blocks_.size() - first, count_max), step_of);
  if (count < 2) return {.first = first};
  const auto [step, row_step] = *step_of(0);
  const bool next_to = step == 1 && row_step == static_cast<int64_t>(layout_->place_step());
  if (count < (next_to ? 2 : kStridesFrom)) return {.first = first};
  return {.first = first, .count = count, .step = step, .row_step = row_step};
}

bool CommandBuilder::apart() const {
  const uint32_t pieces = (*layer_groups_)[layer_group_].folds.front().pieces;
  return run(host(), next_, pieces + size_t{1}).count <= pieces;
}

PageCopies CommandBuilder::page_copies() const {
  const LayerGroup& layers = (*layer_groups_)[layer_group_];
  PageCopies copies{.bytes = blocks_.size() * layers.bytes};
  for (size_t at = 0; at < blocks_.size();) {
    const BlockRun found = run(host(), at, blocks_.size() - at);
    at += found.count;
    if (found.count == 1) {  // of most
      copies.commands += layers.folds.size();
      copies.rows += layers.apart;
      continue;
    }
    for (const Fold& fold : layers.folds) {
      const bool one = together(found, fold);
      copies.commands += one ? 1 : std::min<uint64_t>(found.count, fold.pieces);
      copies.rows += (one ? 1 : found.count) * fold.pieces;
    }
  }
  return copies;
}

// Whether a run of blocks is contiguous in each piece, on both sides.
bool CommandBuilder::together(const BlockRun& run, const Fold& fold) const {
  return run.count > 1 && static_cast<uint64_t>(run.step) * fold.block_step == fold.bytes &&
         static_cast<uint64_t>(run.row_step) == fold.bytes;
}

// Whether each page of a run of blocks is a copy of its own; else there are few strided ones, of
// many rows.
bool CommandBuilder::apart(const BlockRun& run, const Fold& fold, bool submitted_soonest,
                           const Part& part) const {
  if (together(run, fold)) return false;
  const uint64_t rows_max = std::max<uint64_t>(run.count, fold.pieces);
  return (part.form.plain && run.count <= fold.pieces) ||
         !forms_.strided(rows_max, fold.bytes, submitted_soonest) || forms_.one_by_one(fold.bytes);
}

bool CommandBuilder::all_apart(const BlockRun& run, bool submitted_soonest,
                               const Part& part) const {
  const std::vector<Fold>& folds = (*layer_groups_)[layer_group_].folds;
  return std::all_of(folds.begin(), folds.end(),
                     [&](const Fold& fold) { return apart(run, fold, submitted_soonest, part); });
}

// What the layer group has of a block in its row.
Slice CommandBuilder::host_row(size_t block) const {
  const uint64_t at = layout_->row_blocks() * (*layer_groups_)[layer_group_].at;
  return {.offset = reinterpret_cast<uint64_t>(rows_[block].at) + at,
          .rank = kHostRank,
          .buffer = kRows};
}

// Whether what the layer group has of a block in its row lies on both sides of a seam.
bool CommandBuilder::over_seam(const BlockRun& run) const {
  if (seams_.step == 0) return false;
  const LayerGroup& layers = (*layer_groups_)[layer_group_];
  const uint64_t page = layers.piece_bytes;
  const uint64_t span = layout_->row_blocks() * (layers.bytes - page) + page;
  for (size_t block = run.first; block < run.first + run.count; ++block) {
    if (seams_.until(host_row(block).offset) < span) return true;
  }
  return false;
}

// The same of all folds, a command a block. `first`: block of the part.
void CommandBuilder::add_pages(const BlockRun& run, size_t first, Part& part) const {
  const LayerGroup& layers = (*layer_groups_)[layer_group_];
  const uint64_t shared = layout_->row_blocks();
  const uint64_t rows = shared == 1 ? 1 : layers.pieces;
  const uint64_t bytes = layers.bytes / rows;
  for (size_t i = run.first; i < run.first + run.count; ++i) {
    const Slice pages{.offset = (i - first) * layers.bytes, .rank = kOwner, .buffer = kPages};
    part.commands.push_back(copy(pages, host_row(i), bytes, rows, bytes, shared * bytes));
    part.copies += layers.apart;
  }
}

// Between memory of a GPU's and a row, wherever that lies.
Command CommandBuilder::copy(const Slice& gpu, const Slice& row, uint64_t bytes, uint64_t rows,
                             uint64_t step, uint64_t row_step) const {
  const bool load = direction_ == Direction::load;
  Command command{.dst = load ? gpu : row,
                  .src = load ? row : gpu,
                  .bytes = bytes,
                  .rows = static_cast<uint32_t>(rows),
                  .op = Op::copy};
  if (rows > 1) {
    command.dst_step = static_cast<int64_t>(load ? step : row_step);
    command.src_step = static_cast<int64_t>(load ? row_step : step);
  }
  return command;
}

// One fold of a run of blocks.
void CommandBuilder::add(const RowSpan& rows, const BlockRun& run, const Fold& fold,
                         bool submitted_soonest, Part& part) const {
  if (together(run, fold)) {  // as one block with larger pages
    Fold all = fold;
    all.bytes *= run.count;
    return add(rows, {.first = run.first}, all, submitted_soonest, part);
  }
  const auto at = [&](size_t block, size_t piece) {
    const auto number = static_cast<uint64_t>(blocks_[run.first + block]);
    return Slice{.offset = fold.at + number * fold.block_step + piece * fold.step,
                 .rank = kOwner,
                 .buffer = kCache};
  };
  const auto row = [&](size_t block, size_t piece) {
    Slice slice = rows.in;
    slice.offset = reinterpret_cast<uint64_t>(rows.of(run.first + block).at) + fold.row_at +
                   piece * fold.row_step;
    return slice;
  };
  const uint64_t block_step = static_cast<uint64_t>(run.step) * fold.block_step;
  const auto row_step = static_cast<uint64_t>(run.row_step);
  if (apart(run, fold, submitted_soonest, part)) {
    for (size_t block = 0; block < run.count; ++block) {
      for (size_t piece = 0; piece < fold.pieces; ++piece) {
        push(copy(at(block, piece), row(block, piece), fold.bytes, 1, 0, 0), part);
      }
    }
  } else if (run.count <= fold.pieces) {
    for (size_t block = 0; block < run.count; ++block) {
      push(copy(at(block, 0), row(block, 0), fold.bytes, fold.pieces, fold.step, fold.row_step),
           part);
    }
  } else {
    for (size_t piece = 0; piece < fold.pieces; ++piece) {
      push(copy(at(0, piece), row(0, piece), fold.bytes, run.count, block_step, row_step), part);
    }
  }
}

// How many blocks from that one on are in adjacent places.
size_t CommandBuilder::adjacent(size_t first, size_t count_max) const {
  const Row& row = rows_[first];
  size_t count = 1;
  while (count < count_max && rows_[first + count].chunk == row.chunk &&
         rows_[first + count].at == row.at + count * layout_->place_step()) {
    ++count;
  }
  return count;
}

// What the layer group has of rows between the host and the stage, where it lies side by side.
void CommandBuilder::add_rows(size_t first, size_t count, Rank stage, Part& part) const {
  const LayerGroup& layers = (*layer_groups_)[layer_group_];
  const size_t shared = layout_->row_blocks();
  for (size_t i = 0; i < count;) {
    const size_t place = (rows_[first].place + i) % shared;  // in the stage's row
    const size_t begin = i - std::min(i, place);
    const size_t end = std::min(count, i + shared - place);
    const size_t blocks = adjacent(first + i, end - i);
    Slice staged{.offset = begin * layers.bytes, .rank = stage, .buffer = kStage};
    if (blocks == shared) {
      i += add_whole_rows(first + i, count - i, staged, part);
      continue;
    }
    staged.offset += (i - begin) * layers.piece_bytes;
    add_places(first + i, blocks, staged, (end - begin) * layers.piece_bytes, part);
    i += blocks;
  }
}

// One copy for rows that follow each other, and one for those at equal steps. Returns of how many
// blocks.
size_t CommandBuilder::add_whole_rows(size_t first, size_t left, const Slice& staged,
                                      Part& part) const {
  const size_t shared = layout_->row_blocks();
  const uint64_t bytes = shared * (*layer_groups_)[layer_group_].bytes;
  const auto step_of = [&](size_t k) -> std::optional<uint64_t> {
    const size_t after = first + (k + 1) * shared;
    const Row& row = rows_[after - shared];
    const Row& next = rows_[after];
    const bool follows = next.chunk == row.chunk && next.at > row.at;
    const auto step = static_cast<uint64_t>(next.at - row.at);
    const bool one = step == bytes;
    if (!follows || adjacent(after, shared) < shared) return std::nullopt;
    if (!one && !forms_.strided(left / shared, bytes, true)) return std::nullopt;
    return step;
  };
  size_t together = run_of(left / shared, step_of);
  const uint64_t step = together > 1 ? *step_of(0) : bytes;
  const bool rows = step != bytes && together >= kStridesFrom;
  if (step != bytes && !rows) together = 1;
  push(copy(staged, host_row(first), rows ? bytes : together * bytes, rows ? together : 1, bytes,
            step),
       part);
  return together * shared;
}

// Blocks in adjacent places, fewer than a row has. `step`: from a piece to the next in the stage.
void CommandBuilder::add_places(size_t first, size_t count, const Slice& staged, uint64_t step,
                                Part& part) const {
  const LayerGroup& layers = (*layer_groups_)[layer_group_];
  const uint64_t bytes = count * layers.piece_bytes;
  const uint64_t row_step = layout_->row_blocks() * layers.piece_bytes;
  Slice row = host_row(first);
  if (forms_.strided(layers.pieces, bytes, true)) {
    return push(copy(staged, row, bytes, layers.pieces, step, row_step), part);
  }
  Slice from = staged;
  for (uint32_t piece = 0; piece < layers.pieces; ++piece) {
    push(copy(from, row, bytes, 1, 0, 0), part);
    from.offset += step;
    row.offset += row_step;
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

Part CommandBuilder::next(const PartBudget& budget) {
  const LayerGroup& layers = (*layer_groups_)[layer_group_];
  const auto strided = [&](const Fold& fold) {
    return forms_.strided(fold.pieces, fold.bytes, budget.submitted_soonest);
  };
  const PagesLeft left{
      .page_bytes = layers.bytes / layers.pieces,
      .block_bytes = layers.bytes,
      .block_pages = layers.apart,
      .blocks = blocks_.size() - next_,
      .folds = std::any_of(layers.folds.begin(), layers.folds.end(), strided),
      .begins = layer_group_ == 0 && next_ == 0,
      .from_host = direction_ == Direction::load,
  };
  Part part{.form = forms_.form(left, budget)};
  part.calls = part.form.calls();
  const PageForm& form = part.form;
  const size_t first = next_;
  bool listed = false;
  const bool singles = form.listed && all_apart({.first = first}, budget.submitted_soonest, part);
  const size_t about = left.blocks * (form.listed ? 1 : left.block_pages);
  const size_t room = std::min<size_t>(form.copies, about);
  part.commands.reserve(room + room / kFencesAbout + kFencesAbout);
  while (next_ < blocks_.size() && part.copies < form.copies && part.strided < form.strided_max) {
    uint64_t blocks = (budget.bytes - std::min(budget.bytes, part.bytes)) / layers.bytes;
    if (form.plain) blocks = std::min(blocks, (form.copies - part.copies) / layers.apart);
    if (blocks == 0 && part.bytes > 0) break;
    if (budget.apart) blocks = std::min<uint64_t>(blocks, layers.folds.front().pieces);
    const BlockRun found = run(host(), next_, std::max<uint64_t>(1, blocks));
    const bool pages = found.count == 1
                           ? singles
                           : form.listed && all_apart(found, budget.submitted_soonest, part);
    if (pages && !over_seam(found)) {
      add_pages(found, first, part);
      listed = true;
    } else {
      for (const Fold& fold : layers.folds) {
        add(host(), found, fold, budget.submitted_soonest, part);
      }
    }
    part.bytes += found.count * layers.bytes;
    part.pages += found.count * layers.pieces;
    next_ += found.count;
  }
  if (listed) {
    part.pages_at = PageTable{.pieces = layers.pages.data(),
                              .count = layers.apart,
                              .piece_bytes = layers.piece_bytes,
                              .first_at = layers.at,
                              .block_bytes = layers.bytes,
                              .row_blocks = layout_->row_blocks(),
                              .blocks = blocks_.subspan(first, next_ - first),
                              .call_pages = form.together,
                              .first_pages = form.first == 0 ? form.together : form.first};
  }
  end(part);
  return part;
}

template <typename Between>
Part CommandBuilder::staged(size_t blocks_max, Rank stage, const Between& between) {
  const LayerGroup& layers = (*layer_groups_)[layer_group_];
  const size_t first = next_;
  size_t count = std::min<size_t>(blocks_max, blocks_.size() - first);
  // Whole rows are a plain copy, which is worth a part that is a little smaller.
  const size_t over = (rows_[first].place + count) % layout_->row_blocks();
  if (first + count < blocks_.size() && 2 * over <= count) count -= over;
  Part part{.bytes = count * layers.bytes, .pages = count * layers.pieces, .form = forms_.form()};
  part.calls = part.form.calls();
  const bool load = direction_ == Direction::load;
  if (load) {
    add_rows(first, count, stage, part);
    part.commands.push_back({.op = Op::fence});
  }
  between(first, count, part);
  if (!load) {
    part.commands.push_back({.op = Op::fence});
    add_rows(first, count, stage, part);
  }
  next_ = first + count;
  end(part);
  return part;
}

Part CommandBuilder::next_staged(size_t blocks_max) {
  const LayerGroup& layers = (*layer_groups_)[layer_group_];
  return staged(blocks_max, kNeighbour, [&](size_t first, size_t count, Part& part) {
    std::vector<Row> rows(count);
    for (size_t i = 0; i < count; ++i) rows[i].at = reinterpret_cast<std::byte*>(i * layers.bytes);
    const RowSpan span{rows, first, {0, kNeighbour, kStage}};
    for (size_t at = first; at < first + count;) {
      const BlockRun found = run(span, at, first + count - at);
      for (const Fold& fold : layers.folds) add(span, found, fold, false, part);
      at += found.count;
    }
  });
}

Part CommandBuilder::next_packed(size_t blocks_max, const PagePiece* pieces) {
  const LayerGroup& layers = (*layer_groups_)[layer_group_];
  return staged(blocks_max, kOwner, [&](size_t first, size_t count, Part& part) {
    const Slice pages{.rank = kOwner, .buffer = kPages};
    const Slice stage{.rank = kOwner, .buffer = kStage};
    const bool load = direction_ == Direction::load;
    push({.dst = load ? pages : stage,
          .src = load ? stage : pages,
          .bytes = count * layers.bytes,
          .op = Op::copy},
         part);
    part.pages_at = PageTable{.pieces = pieces + layers.first_piece,
                              .count = layers.pieces,
                              .piece_bytes = layers.piece_bytes,
                              .first_at = layers.at,
                              .block_bytes = layers.bytes,
                              .row_blocks = layout_->row_blocks(),
                              .first_place = rows_[first].place,
                              .blocks = blocks_.subspan(first, count)};
  });
}

}  // namespace offcore::kv
