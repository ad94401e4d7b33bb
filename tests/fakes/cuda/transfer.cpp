#include "tests/fakes/cuda/transfer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <thread>
#include <type_traits>

#include "tests/fakes/cuda/kernels.h"
#include "tests/fakes/cuda/settings.h"

namespace fakecuda {
namespace {

constexpr uint64_t kChunkBytes = 64 << 10;

struct Chunk {
  DevicePtr dst, src;
  uint64_t bytes;
  bool dst_host, src_host;
};

template <typename Word>
bool copy_word(std::byte* dst, const std::byte* src, uint64_t bytes) {
  const auto aligned = [](const void* at) {
    return reinterpret_cast<uintptr_t>(at) % sizeof(Word) == 0;
  };
  if (bytes != sizeof(Word) || !aligned(dst) || !aligned(src)) return false;
  const Word value = __atomic_load_n(reinterpret_cast<const Word*>(src), __ATOMIC_ACQUIRE);
  __atomic_store_n(reinterpret_cast<Word*>(dst), value, __ATOMIC_RELEASE);
  return true;
}

template <typename Word>
void copy_words(std::byte*& dst, const std::byte*& src, uint64_t& bytes) {
  while (bytes >= sizeof(Word) && reinterpret_cast<uintptr_t>(src) % sizeof(Word) == 0) {
    const Word word = __atomic_load_n(reinterpret_cast<const Word*>(src), __ATOMIC_RELAXED);
    std::memcpy(dst, &word, sizeof(Word));
    dst += sizeof(Word), src += sizeof(Word), bytes -= sizeof(Word);
  }
}

// A single word is a flag, and moves in one piece. A few are read one by one, whole: they may be
// counters, which are looked at while they are written.
void copy_bytes(std::byte* dst, const std::byte* src, uint64_t bytes) {
  if (copy_word<uint32_t>(dst, src, bytes) || copy_word<uint64_t>(dst, src, bytes)) return;
  if (bytes <= 4096) {
    copy_words<uint64_t>(dst, src, bytes);
    copy_words<uint32_t>(dst, src, bytes);
  }
  std::memmove(dst, src, bytes);
}

// Whole pages are given back to the kernel, which shows zeros there: a communicator clears more
// memory than most tests ever touch.
void clear(std::byte* start, uint64_t bytes) {
  const Shown shown;
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const auto at = reinterpret_cast<uintptr_t>(start);
  const uint64_t head = std::min(bytes, (page - at % page) % page);
  const uint64_t whole = (bytes - head) / page * page;
  if (whole == 0 || madvise(start + head, whole, MADV_REMOVE) != 0) {
    std::memset(start, 0, bytes);
    return;
  }
  std::memset(start, 0, head);
  std::memset(start + head + whole, 0, bytes - head - whole);
}

void tell_changed(const std::vector<Piece>& pieces) {
  for (const Piece& piece : pieces) {
    if (piece.allocation) piece.allocation->changed();
  }
}

// `made`: the allocations that there had been when the copy was enqueued. What it writes into later
// ones, mapped there instead, nobody reads.
Result copy_chunk(const Chunk& chunk, int device, uint64_t made) {
  std::vector<Piece> dst, src;
  const auto& space = addresses();
  if (!space.pieces(chunk.dst, chunk.bytes, device, true, chunk.dst_host, dst) ||
      !space.pieces(chunk.src, chunk.bytes, device, false, chunk.src_host, src)) {
    return kIllegalAddress;
  }
  uint64_t at_dst = 0, at_src = 0;
  for (size_t i = 0, j = 0; i < dst.size() && j < src.size();) {
    const uint64_t bytes = std::min(dst[i].bytes - at_dst, src[j].bytes - at_src);
    if (dst[i].allocation && dst[i].allocation->number() > made) {
      copy_bytes(dst[i].data + at_dst, src[j].data + at_src, bytes);
    } else {
      const Shown shown;
      copy_bytes(dst[i].data + at_dst, src[j].data + at_src, bytes);
    }
    at_dst += bytes;
    at_src += bytes;
    if (at_dst == dst[i].bytes) ++i, at_dst = 0;
    if (at_src == src[j].bytes) ++j, at_src = 0;
  }
  tell_changed(dst);
  return kSuccess;
}

void add_chunks(const Transfer& transfer, std::vector<Chunk>& out) {
  for (uint64_t slice = 0; slice < transfer.slices; ++slice) {
    for (uint64_t row = 0; row < transfer.rows; ++row) {
      const auto at = [&](const Side& side) {
        return side.address + slice * side.slice_pitch + row * side.pitch;
      };
      for (uint64_t done = 0; done < transfer.width; done += kChunkBytes) {
        const uint64_t bytes = std::min(kChunkBytes, transfer.width - done);
        out.push_back({at(transfer.dst) + done, at(transfer.src) + done, bytes, transfer.dst.host,
                       transfer.src.host});
      }
    }
  }
}

template <typename T>
bool meets(T word, T value, unsigned flags) {
  switch (flags & 3) {
    case kWaitGeq:
      return static_cast<std::make_signed_t<T>>(word - value) >= 0;
    case kWaitEq:
      return word == value;
    case kWaitAnd:
      return (word & value) != 0;
    default:
      return static_cast<T>(~(word | value)) != 0;
  }
}

// Only a value that ends the wait orders what comes after it behind who wrote that.
template <typename T>
bool condition_holds(const std::byte* data, uint64_t wanted, unsigned flags) {
  const Shown shown;
  const auto* const word = reinterpret_cast<const T*>(data);
  const auto value = static_cast<T>(wanted);
  return meets(__atomic_load_n(word, __ATOMIC_RELAXED), value, flags) &&
         meets(__atomic_load_n(word, __ATOMIC_ACQUIRE), value, flags);
}

// Looks the word up once: what is unmapped under a waiting stream stays readable to it, as the
// mapping is, on a GPU, until the stream is through.
Result wait_for_word(const MemOp& op, Engine& engine) {
  std::vector<Piece> found;
  const auto& space = addresses();
  const bool wide = op.operation == kOpWait64;
  if (!space.pieces(op.address, wide ? 8 : 4, engine.context.physical, false, false, found)) {
    return kIllegalAddress;
  }
  const Piece& piece = found.front();
  const auto holds = [&] {
    return wide ? condition_holds<uint64_t>(piece.data, op.value, op.flags)
                : condition_holds<uint32_t>(piece.data, op.value, op.flags);
  };
  int64_t nap_ns = kFirstNapNs;
  while (engine.context.error == kSuccess && !holds()) {
    wait_for_change(piece, holds, kChangeNs, nap_ns);
  }
  return kSuccess;
}

Result write_word(const MemOp& op, Engine& engine) {
  std::vector<Piece> found;
  const bool wide = op.operation == kOpWrite64;
  if (!addresses().pieces(op.address, wide ? 8 : 4, engine.context.physical, true, false, found)) {
    return kIllegalAddress;
  }
  std::byte* const word = found.front().data;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (const Shown shown; wide) {
    __atomic_store_n(reinterpret_cast<uint64_t*>(word), op.value, __ATOMIC_RELEASE);
  } else {
    __atomic_store_n(reinterpret_cast<uint32_t*>(word), static_cast<uint32_t>(op.value),
                     __ATOMIC_RELEASE);
  }
  tell_changed(found);
  return kSuccess;
}

// A copy within one GPU runs as a kernel there, in a batch too, whatever that prefers. The driver
// judges by the base addresses, and a copy of rows that leave the GPU is an engine's.
bool within_one_device(const Transfer& transfer) {
  const auto device = [](DevicePtr address) {
    const auto allocation = addresses().facts(address).allocation;
    return allocation ? allocation->device() : -1;
  };
  const Side& dst = transfer.dst;
  const int at = device(dst.base);
  const DevicePtr last =
      dst.address + (transfer.rows - 1) * dst.pitch + (transfer.slices - 1) * dst.slice_pitch;
  return at >= 0 && at == device(transfer.src.base) &&
         (transfer.rows * transfer.slices == 1 || device(last) == at);
}

bool of_host(DevicePtr address) {
  const PointerFacts facts = addresses().facts(address);
  return facts.kind != Kind::kMapped || (facts.allocation && facts.allocation->device() == kHost);
}

// Whether the bases are in the other order than the host and the GPU are.
bool is_crossed(const Transfer& transfer) {
  const Side& dst = transfer.dst;
  const Side& src = transfer.src;
  return dst.base != 0 && src.base != 0 && of_host(dst.address) != of_host(src.address) &&
         of_host(dst.base) == of_host(src.address) && of_host(src.base) == of_host(dst.address);
}

bool of_hosts_engine(const Transfer& transfer, const Side& side) {
  return side.base != 0 && of_host(side.base) && !of_host(transfer.dst.address) &&
         !of_host(transfer.src.address);
}

// Whether an engine for copies to or from the host makes it.
bool by_hosts_engine(const Transfer& transfer) {
  const auto host = [](const Side& side) {
    return of_host(side.base != 0 ? side.base : side.address);
  };
  return host(transfer.dst) || host(transfer.src);
}

std::atomic<bool> host_engines_held{false};

void wait_for_hosts_engine(const std::vector<Transfer>& batch, const Context& context) {
  if (!host_engines_held || std::ranges::none_of(batch, by_hosts_engine)) return;
  while (host_engines_held && context.error == kSuccess) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

bool takes_sms(const std::vector<Transfer>& batch) {
  return std::ranges::any_of(batch, within_one_device);
}

// Whether its rows begin and end in one allocation, where their base is.
bool within_one_allocation(const Transfer& transfer, const Side& side) {
  const auto allocation = [&](uint64_t row, uint64_t slice) {
    return addresses().facts(side.address + row * side.pitch + slice * side.slice_pitch).allocation;
  };
  return addresses().facts(side.base).allocation == allocation(0, 0) &&
         allocation(0, 0) == allocation(transfer.rows - 1, transfer.slices - 1);
}

// What a driver makes of the copy that does not do strided copies across allocations well.
Transfer as_done(const Transfer& transfer) {
  static std::atomic<uint64_t> done{0};
  if (transfer.rows * transfer.slices == 1) return transfer;
  if (within_one_allocation(transfer, transfer.dst) &&
      within_one_allocation(transfer, transfer.src)) {
    return transfer;
  }
  if (done++ < settings().strided_right) return transfer;
  Transfer first = transfer;
  first.rows = first.slices = 1;
  return first;
}

void count_copy(const std::vector<Transfer>& batch) {
  const bool strided = batch.size() == 1 && batch[0].rows * batch[0].slices > 1;
  if (batch.size() != 1) {
    ++tally().batched;
  } else {
    ++(strided ? tally().strided : tally().plain);
  }
  if (takes_sms(batch)) ++tally().same_device;
  tally().crossed += std::ranges::count_if(batch, is_crossed);
  for (const Transfer& transfer : batch) {
    tally().rows += transfer.rows * transfer.slices;
    const uint64_t bytes = transfer.rows * transfer.slices * transfer.width;
    tally().bytes += bytes;
    if (of_hosts_engine(transfer, transfer.dst)) tally().to_host_engine += bytes;
    if (of_hosts_engine(transfer, transfer.src)) tally().from_host_engine += bytes;
  }
}

}  // namespace

Work copy_work(std::vector<Transfer> batch) {
  return [batch = std::move(batch), made = Allocation::made()](Engine& engine) -> Result {
    std::vector<Chunk> chunks;
    for (const Transfer& transfer : batch) add_chunks(as_done(transfer), chunks);
    if (chunks.empty()) return kSuccess;
    if (settings().seed != 0) std::ranges::shuffle(chunks, engine.random);
    engine.pause();
    engine.copied = true;
    wait_for_hosts_engine(batch, engine.context);
    if (const Result code = planted_fault("copy")) return code;
    std::optional<Room> room;
    if (takes_sms(batch)) room.emplace(engine.context, 1024);
    const int device = engine.context.physical;
    const bool whole = !engine.loose || chunks.front().bytes == 4;
    const size_t now = whole ? chunks.size() : chunks.size() / 2;
    for (size_t i = 0; i < now; ++i) {
      if (i == chunks.size() / 2 && i > 0) engine.pause();
      if (const Result code = copy_chunk(chunks[i], device, made)) return code;
    }
    count_copy(batch);
    if (!engine.left.empty()) std::this_thread::sleep_for(std::chrono::microseconds(300));
    if (const Result code = engine.catch_up()) return code;
    for (size_t i = now; i < chunks.size(); ++i) {
      engine.left.push_back([=, chunk = chunks[i]] { return copy_chunk(chunk, device, made); });
    }
    return kSuccess;
  };
}

Work fill_work(DevicePtr dst, uint64_t count, uint32_t value, unsigned value_bytes) {
  return [=](Engine& engine) -> Result {
    engine.pause();
    const Room room(engine.context, 1024);  // a fill is a kernel
    std::vector<Piece> found;
    const uint64_t bytes = count * value_bytes;
    if (!addresses().pieces(dst, bytes, engine.context.physical, true, false, found)) {
      return kIllegalAddress;
    }
    for (const Piece& piece : found) {
      if (value_bytes == 1 && value == 0) {
        clear(piece.data, piece.bytes);
      } else if (const Shown shown; value_bytes == 1) {
        std::memset(piece.data, static_cast<int>(value), piece.bytes);
      } else {
        auto* words = reinterpret_cast<uint32_t*>(piece.data);
        for (uint64_t i = 0; i < piece.bytes / 4; ++i) {
          __atomic_store_n(words + i, value, __ATOMIC_RELEASE);
        }
      }
    }
    tell_changed(found);
    ++tally().fills;
    tally().bytes += bytes;
    return kSuccess;
  };
}

Work mem_op_work(std::vector<MemOp> ops) {
  return [ops = std::move(ops)](Engine& engine) -> Result {
    if (const Result code = engine.catch_up()) return code;
    for (const MemOp& op : ops) {
      Result code = kSuccess;
      if (op.operation == kOpWait32 || op.operation == kOpWait64) {
        ++tally().waits;
        code = wait_for_word(op, engine);
      } else if (op.operation == kOpWrite32 || op.operation == kOpWrite64) {
        ++tally().writes;
        if (engine.copied) ++tally().late_writes;
        code = write_word(op, engine);
      }
      if (code != kSuccess) return code;
    }
    return kSuccess;
  };
}

void hold_host_engines(bool held) { host_engines_held = held; }

Tally& tally() {
  static Tally* const value = new Tally;
  return *value;
}

}  // namespace fakecuda
