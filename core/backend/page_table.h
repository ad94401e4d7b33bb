// Where the bytes of a `paged` buffer lie (Buffer::Home): those of one block after the other, and
// of each block its pieces side by side; or of the blocks of a row their first pieces, then the
// second ones. A launch binds a table as the buffer's base. Cores copy them from and to the rank's
// memory, engines from and to the host's, so that nobody lists pages but who hands them over.
#pragma once
#include <cstdint>
#include <span>

namespace offcore {

// A part of every block that is contiguous. Cores read it as it is.
struct PagePiece {
  uint64_t address = 0;  // of block 0
  uint64_t block_step = 0;
  uint64_t bytes = 0;
  uint64_t at = 0;  // among the bytes of a block, from PageTable::first_at on
};
static_assert(sizeof(PagePiece) == 32);

struct PageTable {
  // Cores: in memory of the rank's, until the launch has ended. Engines: of the host's, until
  // launch() has returned.
  const PagePiece* pieces = nullptr;
  uint32_t count = 0;        // of pieces
  uint64_t piece_bytes = 0;  // of the largest
  uint64_t first_at = 0;     // PagePiece::at of the first
  uint64_t block_bytes = 0;
  // Blocks that share a row, whose pieces have one size. Cores copy `blocks` as they follow each
  // other in such rows, the first one from `first_place` on; a row has only those of the copy.
  // Engines copy one block, whose pieces have the others' between them.
  uint32_t row_blocks = 1;
  uint32_t first_place = 0;
  std::span<const int64_t> blocks;    // until launch() has returned; numbers of 32 bits
  uint32_t call_pages = UINT32_MAX;   // that an engine is handed at once
  uint32_t first_pages = UINT32_MAX;  // by the first call
  // Registered host memory, until the launch has ended: set to what each core took of the last
  // kernel, Report::sms of them. Null: nobody asks.
  uint32_t* spent_ns = nullptr;
};

}  // namespace offcore
