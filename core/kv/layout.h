// Where the blocks of a paged KV cache lie, and how they lie in rows of host memory.
//
// A cache is a list of pieces: block b of a piece is the `bytes` bytes at address + b * block_step.
// A row of host memory holds a block's pieces side by side, in the order of the list, or of several
// blocks, which have places in it: the first piece of all of them, then the second. All layouts of
// caches are that: a tensor a layer, layers outermost, blocks contiguous over layers, K and V
// together or apart. Pieces at equal steps form a fold, which for one block is ONE strided copy
// (DMA-Latte sections 2.1.2 and 5.3 copy one piece at a time).
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/backend/backend.h"

namespace offcore::kv {

struct Piece {
  std::byte* address = nullptr;  // of block 0
  uint64_t block_step = 0;
  uint64_t bytes = 0;  // of a block
  uint32_t layer = 0;  // from 0 on, in the order of the list
  uint32_t tensor = 0;
};

// Pieces of equal size at equal steps, in the cache and in the row.
struct Fold {
  uint64_t at = 0;  // of the first one's block 0, from Layout::base() on
  uint64_t row_at = 0;
  uint64_t bytes = 0;  // of a piece
  uint64_t block_step = 0;
  uint32_t pieces = 1;
  uint64_t step = 0;  // from a piece to the next
  uint64_t row_step = 0;
  uint32_t tensor = 0;  // of the first
};

class Layout : public std::enable_shared_from_this<Layout> {
 public:
  // `row_blocks`: that share a row; several need pieces of equal size. Throws invalid for these,
  // and for pieces that are empty, out of order or overlap.
  Layout(std::vector<Piece> pieces, uint64_t blocks, uint32_t row_blocks = 1);

  uint64_t blocks() const { return blocks_; }
  uint32_t layers() const { return pieces_.back().layer + 1; }
  uint64_t block_bytes() const { return block_bytes_; }
  uint32_t row_blocks() const { return row_blocks_; }
  uint64_t row_bytes() const { return row_blocks_ * block_bytes_; }
  // From a block to the one in the next place of its row; of rows of one block, in the next row.
  uint64_t place_step() const { return row_blocks_ == 1 ? block_bytes_ : pieces_.front().bytes; }
  const std::vector<Piece>& pieces() const { return pieces_; }
  // The lowest address, and the bytes from there to the highest.
  std::byte* base() const { return base_; }
  uint64_t span() const { return span_; }
  // Of each tensor: its lowest byte, and the one behind its last.
  std::vector<MemoryExtent> extents() const;
  // Whether their blocks of one number may share memory. Throws invalid where others do, or where
  // it cannot tell.
  bool meets(const Layout& other) const;

  // The fewest folds found for the layers from `first` to before `last`. `memories`: what each
  // tensor lies in, which no fold leaves; empty: all are in one.
  std::vector<Fold> folds(uint32_t first, uint32_t last, std::span<const uint64_t> memories) const;

 private:
  std::vector<Piece> pieces_;
  uint64_t blocks_;
  uint32_t row_blocks_;
  uint64_t block_bytes_ = 0;
  std::byte* base_ = nullptr;
  uint64_t span_ = 0;
};

}  // namespace offcore::kv
