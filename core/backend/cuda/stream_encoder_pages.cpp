// Encodes copies to and from pages (backend/page_table.h), by cores and by engines.
#include <algorithm>

#include "core/backend/cuda/pack_kernel.h"
#include "core/backend/cuda/stream_encoder.h"

namespace offcore::cuda {

// A copy to or from pages; false: it is another one.
bool StreamEncoder::paged(const Command& command) {
  const auto in_pages = [&](const Slice& slice) {
    return program_.buffers[slice.buffer].kind == Buffer::Home::paged;
  };
  const bool scatters = in_pages(command.dst);
  if (!scatters && !in_pages(command.src)) return false;
  const Slice& at = scatters ? command.dst : command.src;
  const Slice& other = scatters ? command.src : command.dst;
  const auto& table = *reinterpret_cast<const PageTable*>(launch_.binding.base(at.buffer, at.rank));
  if (other.rank == kHostRank) {
    pages(command, table, scatters);
  } else {
    pack(command, table, scatters);
  }
  return true;
}

void StreamEncoder::pack(const Command& command, const PageTable& table, bool scatters) {
  flush();
  const PackKernel::Launched launched =
      device_.pack_kernel()->launch({.pages = table,
                                     .offset = (scatters ? command.dst : command.src).offset,
                                     .packed = address(scatters ? command.src : command.dst),
                                     .bytes = command.bytes,
                                     .scatters = scatters},
                                    options_.sms, stream_);
  stats_.calls.packs += launched.launches;
  stats_.sms = std::max(stats_.sms, launched.sms);
  stats_.submitted = true;
}

// What an engine is handed takes a page as long as to copy it: nothing else is to be done for one
// but to write its addresses down.
void StreamEncoder::pages(const Command& command, const PageTable& table, bool scatters) {
  flush_ops();
  if (flags_ != 0) flush_copies();
  flags_ = 0;
  if (!pages_left_) pages_left_ = table.first_pages;
  const std::span<const PagePiece> pieces(table.pieces, table.count);
  const Slice& at = scatters ? command.dst : command.src;
  CUdeviceptr row = address(scatters ? command.src : command.dst);
  const size_t first = at.offset / table.block_bytes;
  const size_t last = first + command.rows * command.bytes / table.block_bytes;
  for (size_t i = first; i < last; ++i, row += table.block_bytes) {
    const auto block = static_cast<uint64_t>(table.blocks[i]);
    for (const PagePiece& piece : pieces) {
      const CUdeviceptr page = piece.address + block * piece.block_step;
      const CUdeviceptr place = row + table.row_blocks * (piece.at - table.first_at);
      dsts_.push_back(scatters ? page : place);
      srcs_.push_back(scatters ? place : page);
      sizes_.push_back(piece.bytes);
      if (--*pages_left_ > 0) continue;
      flush_copies();
      pages_left_ = table.call_pages;
    }
  }
}

}  // namespace offcore::cuda
