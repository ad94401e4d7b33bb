#include "core/kv/cursor.h"

#include <algorithm>

namespace offcore::kv {
namespace {

constexpr size_t kStridesFrom = 3;  // any two blocks are at some step

}  // namespace

std::string_view to_string(Direction direction) {
  return direction == Direction::load ? "load" : "store";
}

std::vector<Stage> stages_of(const Layout& layout, uint32_t layers_together,
                             std::span<const uint64_t> memories) {
  std::vector<Stage> stages;
  for (uint32_t first = 0; first < layout.layers(); first += layers_together) {
    const uint32_t last = std::min(layout.layers(), first + layers_together);
    Stage& stage = stages.emplace_back();
    stage.folds = layout.folds(first, last, memories);
    for (const Piece& piece : layout.pieces()) {
      if (piece.layer < first || piece.layer >= last) continue;
      stage.bytes += piece.bytes;
      ++stage.pieces;
    }
  }
  return stages;
}

Cursor::Cursor(Direction direction, Manner manner, std::shared_ptr<const Layout> layout,
               std::shared_ptr<const std::vector<Stage>> stages, std::span<const int64_t> blocks,
               std::vector<Row> rows)
    : direction_(direction),
      manner_(manner),
      layout_(std::move(layout)),
      stages_(std::move(stages)),
      blocks_(blocks),
      rows_(std::move(rows)) {
  if (blocks_.empty()) stop();
}

// The longest run from the next block on.
Cursor::Run Cursor::run(size_t count_max) const {
  Run run{.first = next_};
  const size_t last = std::min(blocks_.size(), next_ + count_max);
  if (next_ + 1 >= last) return run;
  run.step = blocks_[next_ + 1] - blocks_[next_];
  run.row_step = rows_[next_ + 1].at - rows_[next_].at;
  const bool next_to = run.step == 1 && run.row_step == static_cast<int64_t>(layout_->row_bytes());
  if (run.step < 1 || run.row_step < 1) return run;
  size_t end = next_ + 1;
  while (end < last && rows_[end].chunk == rows_[next_].chunk &&
         blocks_[end] - blocks_[end - 1] == run.step &&
         rows_[end].at - rows_[end - 1].at == run.row_step) {
    ++end;
  }
  const size_t count = end - next_;
  if (count >= (next_to ? 2 : kStridesFrom)) run.count = count;
  return run;
}

void Cursor::copy(uint64_t at, std::byte* row, uint64_t bytes, uint64_t rows, uint64_t step,
                  uint64_t row_step, Part& part) const {
  const Slice cache{.offset = at, .rank = 0, .buffer = kCache};
  const Slice host{.offset = reinterpret_cast<uint64_t>(row), .rank = kHostRank, .buffer = kRows};
  const bool load = direction_ == Direction::load;
  Command command{.dst = load ? cache : host,
                  .src = load ? host : cache,
                  .bytes = bytes,
                  .rows = static_cast<uint32_t>(rows),
                  .op = Op::copy};
  if (rows > 1) {
    command.dst_step = static_cast<int64_t>(load ? step : row_step);
    command.src_step = static_cast<int64_t>(load ? row_step : step);
    ++part.strided;
  }
  part.commands.push_back(command);
  ++part.copies;
  if (rows == 1 && (part.copies - part.strided) % manner_.sub_batch == 0) {
    part.commands.push_back({.op = Op::fence});
  }
  if (part.rows == nullptr || row < part.rows) part.rows = row;
  part.rows_span = std::max<uint64_t>(
      part.rows_span, reinterpret_cast<uint64_t>(row) + (rows - 1) * row_step + bytes);
}

// One fold of a run of blocks.
void Cursor::add(const Run& run, const Fold& fold, Part& part) const {
  const auto at = [&](size_t block, size_t piece) {
    const auto number = static_cast<uint64_t>(blocks_[run.first + block]);
    return fold.at + number * fold.block_step + piece * fold.step;
  };
  const auto row = [&](size_t block, size_t piece) {
    return rows_[run.first + block].at + fold.row_at + piece * fold.row_step;
  };
  const uint64_t block_step = static_cast<uint64_t>(run.step) * fold.block_step;
  const auto row_step = static_cast<uint64_t>(run.row_step);
  if (run.count > 1 && fold.pieces == 1 && block_step == fold.bytes && row_step == fold.bytes) {
    return copy(at(0, 0), row(0, 0), run.count * fold.bytes, 1, 0, 0, part);
  }
  if (!manner_.strided || fold.bytes >= manner_.plain_from) {
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

Part Cursor::next(uint64_t bytes_max, uint32_t commands_max) {
  Part part;
  const Stage& stage = (*stages_)[stage_];
  while (next_ < blocks_.size() && part.copies < commands_max) {
    const uint64_t room = (bytes_max - std::min(bytes_max, part.bytes)) / stage.bytes;
    if (room == 0 && part.bytes > 0) break;
    const Run found = run(std::max<uint64_t>(1, room));
    for (const Fold& fold : stage.folds) add(found, fold, part);
    part.bytes += found.count * stage.bytes;
    part.pages += found.count * stage.pieces;
    next_ += found.count;
  }
  part.rows_span -= reinterpret_cast<uint64_t>(part.rows);
  for (Command& command : part.commands) {
    if (command.op != Op::copy) continue;
    Slice& host = direction_ == Direction::load ? command.src : command.dst;
    host.offset -= reinterpret_cast<uint64_t>(part.rows);
  }
  if (stage_ + 1 == stages_->size()) copied_ = next_;
  part.ends_stage = next_ == blocks_.size();
  if (part.ends_stage) {
    next_ = 0;
    ++stage_;
  }
  return part;
}

}  // namespace offcore::kv
