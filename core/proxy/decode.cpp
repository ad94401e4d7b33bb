#include "core/proxy/decode.h"

#include "core/base/error.h"

namespace offcore::proxy {
namespace {

// Also of phantom memory, which has no addresses.
std::byte* address(const BufferPlace& buffer, Rank rank, uint64_t offset) {
  const auto base = reinterpret_cast<uintptr_t>(buffer.window->base(rank));
  return reinterpret_cast<std::byte*>(base + buffer.offset + offset);
}

}  // namespace

DecodedRequest decode(const Word (&words)[2], Rank rank, Rank ranks, uint64_t chunk_bytes,
                      const std::vector<BufferPlace>& buffers) {
  const unsigned op = op_of(words[0]);
  const auto field = [&](unsigned shift, unsigned bits) {
    return words[0] >> shift & ((Word{1} << bits) - 1);
  };
  const auto peer = static_cast<Rank>(field(54, 6));
  const auto dst = static_cast<unsigned>(field(48, 6));
  const auto src = static_cast<unsigned>(field(42, 6));
  uint64_t to = field(kChunkBits, kChunkBits) * chunk_bytes;
  uint64_t from = to;
  uint64_t bytes = field(0, kChunkBits) * chunk_bytes;
  if (words_of(op) == 2) {
    to = words[1] >> kLowBytesBits;
    from = field(4, kOffsetBits);
    bytes = field(0, 4) << kLowBytesBits | (words[1] & ((Word{1} << kLowBytesBits) - 1));
  }
  const auto within = [&](unsigned buffer, uint64_t offset) {
    return buffer < buffers.size() && offset <= buffers[buffer].bytes &&
           bytes <= buffers[buffer].bytes - offset;
  };
  if (op < kPut || op > kPutBytesSignal || peer >= ranks || peer == rank || !within(dst, to) ||
      !within(src, from)) {
    fail(Code::invalid, "rank ", rank, ": a request for rank ", peer, ", from ", from, "+", bytes,
         " of buffer ", src, " to ", to, "+", bytes, " of buffer ", dst, ", is none of these ",
         buffers.size(), " buffers'");
  }
  return {.op = op,
          .peer = peer,
          .dst = dst,
          .src = src,
          .copy = {address(buffers[dst], peer, to), address(buffers[src], rank, from), bytes}};
}

std::vector<Word> lay_table(RequestPort& port, const ProxyOptions& options,
                            const std::vector<BufferPlace>& buffers,
                            const std::function<void(const DecodedRequest&)>& planned) {
  const auto rank = static_cast<Rank>(port.rank);
  const auto ranks = static_cast<Rank>(port.ranks);
  std::vector<Word> table;
  for (Rank peer = 0; peer < ranks; ++peer) {
    port.first[peer] = static_cast<unsigned>(table.size());
    for (const PlannedRequest& one : options.schedule[rank]) {
      if (one.peer != peer) continue;
      const Word words[2] = {chunks_word(one.op, peer, one.dst, one.src, one.chunk, one.chunks)};
      planned(decode(words, rank, ranks, options.chunk_bytes, buffers));
      table.push_back(words[0]);
    }
    port.period[peer] = static_cast<unsigned>(table.size()) - port.first[peer];
  }
  return table;
}

bool extend(RequestCopy& last, const RequestCopy& next) {
  const auto follows = [&](const std::byte* at, const std::byte* behind) {
    return reinterpret_cast<uintptr_t>(at) + last.bytes == reinterpret_cast<uintptr_t>(behind);
  };
  if (!follows(last.dst, next.dst) || !follows(last.src, next.src)) return false;
  last.bytes += next.bytes;
  return true;
}

}  // namespace offcore::proxy
