// Walks over the blocks that a job copies and cuts them into parts: sub-batches of commands, few
// and short enough that another job can come between.
//
// Blocks at equal steps in the cache and among the slots form runs. A run is copied by whichever
// has fewer commands: a strided copy a block over the pieces of a fold, or one a piece over the
// blocks; by one of all where those of a piece are contiguous on both sides. No command leaves a
// chunk of the pool, or goes over a seam of the rows' memory.
//
// The order is that of the layer groups, and within one that of the given blocks.
//
// A staged part is two groups of commands: rows between the host and memory of a GPU's, where they
// lie side by side, and from there to or from the cache: a neighbour's memory, and engines, or the
// GPU's own, and cores (packing.h). Blocks that share a row lie there as in a row of so many
// (PageTable::row_blocks).
#pragma once
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/backend/page_table.h"
#include "core/ir/program.h"
#include "core/kv/layout.h"
#include "core/kv/rows.h"
#include "core/plan/pages.h"

namespace offcore::kv {

enum class Direction : uint8_t {
  load,   // from host rows into blocks
  store,  // from blocks into host rows
};

std::string_view to_string(Direction direction);

// What a part may have, about.
struct PartBudget : PageBudget {
  bool apart = false;              // no run for which a copy a layer would be fewer
  bool submitted_soonest = false;  // as PageForms::strided
};

// The layers that are copied together, so that they are there together.
struct LayerGroup {
  std::vector<Fold> folds;
  uint64_t bytes = 0;   // of a block
  uint32_t pieces = 0;  // of a block
  uint32_t apart = 0;   // copies of a block if none is strided
  uint64_t at = 0;      // of its bytes among a block's
  uint32_t first_piece = 0;
  uint64_t piece_bytes = 0;      // of the largest
  std::vector<PagePiece> pages;  // of a block if none is strided, in the order of the row
};

std::vector<LayerGroup> layer_groups_of(const Layout& layout, uint32_t layers_together,
                                        std::span<const uint64_t> memories);

// Commands enqueued at once, on buffers kCache, from Layout::base() on, kRows, from `rows` on,
// kStage, and kPages.
struct Part {
  std::vector<Command> commands;
  std::byte* rows = nullptr;
  uint64_t rows_span = 0;
  uint64_t bytes = 0;
  uint64_t pages = 0;    // what one descriptor each would copy
  uint64_t copies = 0;   // commands but fences
  uint64_t strided = 0;  // copies of several rows
  PageForm form;
  SubBatches calls;
  bool ends_layer_group = false;
  std::optional<PageTable> pages_at;  // what kPages is, where there are such
};

inline constexpr BufferId kCache = 1;
inline constexpr BufferId kRows = 2;
inline constexpr BufferId kStage = 3;
inline constexpr BufferId kPages = 4;  // the blocks of a part, one after the other
inline constexpr Rank kOwner = 0;      // of the cache
inline constexpr Rank kNeighbour = 1;

// A cache, and where its blocks go.
struct CacheGroup {
  std::shared_ptr<const Layout> layout;
  std::shared_ptr<HostRows> pool;

  RowPlaces places() const { return {layout->row_blocks(), layout->place_step()}; }
};

// What a job's blocks take if engines copy them page by page.
struct PageCopies {
  uint64_t commands = 0;
  uint64_t rows = 0;  // of all of them: contiguous pieces
  uint64_t bytes = 0;
};

class CommandBuilder {
 public:
  // `blocks` and `rows` have to live as long; there are as many.
  CommandBuilder(Direction direction, const PageForms& forms, std::shared_ptr<const Layout> layout,
                 std::shared_ptr<const std::vector<LayerGroup>> layer_groups,
                 std::span<const int64_t> blocks, std::span<const Row> rows, Seams seams = {});

  bool ended() const { return layer_group_ == layer_groups_->size(); }
  uint32_t layer_group() const { return static_cast<uint32_t>(layer_group_); }  // the next part's
  uint64_t copied() const { return copied_; }  // blocks, the first ones, with all their layers
  Part next(const PartBudget& budget);         // the next commands, of one layer group
  // The same by memory of the neighbour's, of so many blocks at most.
  Part next_staged(size_t blocks_max);
  // The same by memory of the owner's. `pieces`: the layout's, as cores read them.
  Part next_packed(size_t blocks_max, const PagePiece* pieces);
  PageCopies page_copies() const;  // of all blocks of the layer group
  // Whether the next block takes a copy of its own over the layers, because it begins no run for
  // which one a layer would be fewer.
  bool apart() const;
  uint64_t left_bytes() const;                           // of the layer group
  uint64_t block_bytes() const;                          // of a block of it
  void stop() { layer_group_ = layer_groups_->size(); }  // nothing comes any more

 private:
  struct BlockRun {
    size_t first = 0;
    size_t count = 1;
    int64_t step = 1;      // in blocks
    int64_t row_step = 0;  // in bytes
  };

  // The rows of blocks from `first` on, as a buffer has them.
  struct RowSpan {
    std::span<const Row> rows;
    size_t first = 0;
    Slice in;  // which buffer, and whose
    const Row& of(size_t block) const { return rows[block - first]; }
  };

  RowSpan host() const { return {rows_, 0, {0, kHostRank, kRows}}; }
  void push(const Command& command, Part& part) const;
  bool over_seam(const BlockRun& run) const;
  BlockRun run(const RowSpan& rows, size_t first, size_t count_max) const;
  bool together(const BlockRun& run, const Fold& fold) const;
  bool apart(const BlockRun& run, const Fold& fold, bool submitted_soonest, const Part& part) const;
  bool all_apart(const BlockRun& run, bool submitted_soonest, const Part& part) const;
  void add_pages(const BlockRun& run, size_t first, Part& part) const;
  void add(const RowSpan& rows, const BlockRun& run, const Fold& fold, bool submitted_soonest,
           Part& part) const;
  Slice host_row(size_t block) const;
  Command copy(const Slice& gpu, const Slice& row, uint64_t bytes, uint64_t rows, uint64_t step,
               uint64_t row_step) const;
  void add_rows(size_t first, size_t count, Rank stage, Part& part) const;
  size_t add_whole_rows(size_t first, size_t left, const Slice& staged, Part& part) const;
  void add_places(size_t first, size_t count, const Slice& staged, uint64_t step, Part& part) const;
  size_t adjacent(size_t first, size_t count_max) const;
  template <typename Between>
  Part staged(size_t blocks_max, Rank stage, const Between& between);
  void end(Part& part);

  const Direction direction_;
  const PageForms forms_;
  const std::shared_ptr<const Layout> layout_;
  const std::shared_ptr<const std::vector<LayerGroup>> layer_groups_;
  const std::span<const int64_t> blocks_;
  const std::span<const Row> rows_;
  const Seams seams_;
  size_t layer_group_ = 0;
  size_t next_ = 0;  // block of the layer group
  uint64_t copied_ = 0;
};

}  // namespace offcore::kv
