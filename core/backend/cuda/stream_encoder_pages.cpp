// Encodes copies to and from pages (backend/page_table.h), by cores and by engines.
#include <algorithm>
#include <array>
#include <span>

#include "core/backend/cuda/pack_kernel.h"
#include "core/backend/cuda/stream_encoder.h"

namespace offcore::cuda {
namespace {

// Whose pages are listed in turns: the driver looks an allocation up, and finds the last one again
// sooner. More make stores of large pages slower, by up to a tenth (one H100).
constexpr size_t kBlocksTogether = 4;

}  // namespace

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
  if (flags_ != 0 || &table != page_table_ || scatters != scatters_) flush_copies();
  flags_ = 0;
  page_table_ = &table;
  scatters_ = scatters;
  const Slice& at = scatters ? command.dst : command.src;
  CUdeviceptr row = address(scatters ? command.src : command.dst) - table.first_at;
  const size_t first = at.offset / table.block_bytes;
  const size_t last = first + command.bytes / table.block_bytes;
  for (size_t i = first; i < last; ++i, row += table.block_bytes) {
    paged_blocks_.push_back({static_cast<uint64_t>(table.blocks[i]), row});
    if (paged_blocks_.size() == kBlocksTogether) write_pages();
  }
}

void StreamEncoder::write_pages() {
  if (paged_blocks_.empty()) return;
  std::array<PagedBlock, kBlocksTogether> listed;
  const std::span blocks(listed.data(), paged_blocks_.size());
  std::copy(paged_blocks_.begin(), paged_blocks_.end(), blocks.begin());
  paged_blocks_.clear();  // flush_copies() would list them again
  if (!pages_left_) pages_left_ = page_table_->first_pages;
  for (const PagePiece& piece : std::span(page_table_->pieces, page_table_->count)) {
    for (const PagedBlock& block : blocks) {
      const CUdeviceptr page = piece.address + block.number * piece.block_step;
      dsts_.push_back(scatters_ ? page : block.row + piece.at);
      srcs_.push_back(scatters_ ? block.row + piece.at : page);
      sizes_.push_back(piece.bytes);
      if (--*pages_left_ > 0) continue;
      flush_copies();
      pages_left_ = page_table_->call_pages;
    }
  }
}

}  // namespace offcore::cuda
