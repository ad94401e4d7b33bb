#include "tests/fakes/cuda/kernels.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstring>

#include "core/base/reduce.h"
#include "core/proxy/exchange.h"
#include "core/proxy/host_calls.h"
#include "tests/fakes/cuda/memory.h"

namespace fakecuda {
namespace {

constexpr uint32_t kBankStep = 2654435761u;
constexpr uint32_t kRankShift = 40503u;
constexpr uint64_t kWordBytes = 64;

class Memory {
 public:
  explicit Memory(Engine& engine) : engine_(engine) {}

  // A word that the device reaches; throws a failure where it does not.
  uint32_t* word(DevicePtr address, bool write) {
    std::vector<Piece> found;
    const int device = engine_.context.physical;
    require(addresses().pieces(address, 4, device, write, false, found), kIllegalAddress);
    piece_ = found.front();
    return reinterpret_cast<uint32_t*>(piece_.data);
  }
  uint32_t load(DevicePtr address) {
    const uint32_t* const at = word(address, false);
    const Shown shown;
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
  }
  void store(DevicePtr address, uint32_t value) {
    uint32_t* const at = word(address, true);
    if (const Shown shown; true) __atomic_store_n(at, value, __ATOMIC_RELEASE);
    if (piece_.allocation) piece_.allocation->changed();
  }
  const Piece& piece() const { return piece_; }  // the last word's

 private:
  Engine& engine_;
  Piece piece_;
};

// Whether the word came to hold before the limit. Sleeps until somebody writes: a nap costs some
// machines twenty microseconds of their processor.
template <typename Condition>
bool poll(Engine& engine, uint64_t limit_ns, DevicePtr address, Condition&& condition) {
  const int64_t began_ns = now_ns();
  int64_t nap_ns = kFirstNapNs;
  Memory memory(engine);
  const auto holds = [&] { return condition(memory.load(address)); };
  while (!holds()) {
    if (engine.context.error != kSuccess) return false;
    const int64_t left_ns = static_cast<int64_t>(limit_ns) - (now_ns() - began_ns);
    if (left_ns <= 0) return false;
    wait_for_change(memory.piece(), holds, std::min(left_ns, kChangeNs), nap_ns);
  }
  return true;
}

struct Reader {
  uint64_t chunks, flags, consumed, stride, outcome, limit_ns;
  uint32_t words, own, ranks, first, count, banks, fans;
};

uint64_t wrong_words(const Reader& r, uint32_t peer, uint32_t value, Engine& engine) {
  const uint32_t hop = (r.own + r.ranks - peer - 1) % r.ranks;
  const uint32_t base = (value % r.banks + hop * r.fans) * kBankStep + peer * kRankShift;
  uint64_t wrong = 0;
  std::vector<Piece> found;
  const uint64_t bytes = uint64_t{r.words} * 4;
  const int device = engine.context.physical;
  require(addresses().pieces(r.chunks + peer * bytes, bytes, device, false, false, found),
          kIllegalAddress);
  require(found.size() == 1, kIllegalAddress);
  const auto* chunk = reinterpret_cast<const uint32_t*>(found.front().data);
  const Shown shown;
  for (uint32_t at = r.words; at-- > 0;) {
    wrong += __atomic_load_n(chunk + at, __ATOMIC_RELAXED) != base + at;
  }
  return wrong;
}

void read_peers(const Reader& r, Engine& engine) {
  Memory memory(engine);
  uint64_t wrong = 0;
  for (uint32_t value = r.first; value != r.first + r.count; ++value) {
    for (uint32_t peer = 0; peer < r.ranks; ++peer) {
      if (peer == r.own) continue;
      const auto there = [&](uint32_t seen) { return static_cast<int32_t>(seen - value) >= 0; };
      const DevicePtr flag = r.flags + peer * kWordBytes;
      if (!poll(engine, r.limit_ns, flag, there)) return memory.store(r.outcome + 8, value);
      wrong += wrong_words(r, peer, value, engine);
      memory.store(r.consumed + peer * r.stride, value);
    }
  }
  if (wrong > 0) {  // one reader a device adds to it, and 32 bits will do
    memory.store(r.outcome, memory.load(r.outcome) + static_cast<uint32_t>(wrong));
  }
}

void spin(const std::vector<uint64_t>& arguments, unsigned blocks, Engine& engine) {
  Memory memory(engine);
  const auto [stop, state, limit_ns] = std::tuple(arguments[0], arguments[1], arguments[2]);
  for (unsigned block = 0; block < blocks; ++block) memory.store(state + 4 * block, 1);
  const bool told = poll(engine, limit_ns, stop, [](uint32_t seen) { return seen != 0; });
  for (unsigned block = 0; block < blocks; ++block) memory.store(state + 4 * block, told ? 2 : 3);
}

// Rows of 16-byte units, by pairs of places, as core/backend/cuda/copy_kernel.cpp says.
void gather(const std::vector<uint64_t>& a, Engine& engine) {
  const uint64_t dst_step = a[256];
  const uint64_t src_step = a[257];
  const uint64_t units = a[258];
  const uint64_t rows = a[259];
  const auto at = [&](uint64_t address, bool write) {
    std::vector<Piece> found;
    require(address % 16 == 0, kIllegalAddress);
    require(addresses().pieces(address, units * 16, engine.context.physical, write, false, found),
            kIllegalAddress);
    require(found.size() == 1, kIllegalAddress);
    return found.front().data;
  };
  for (uint64_t row = 0; row * units < a[260]; ++row) {
    const uint64_t* pair = &a[2 * (row / rows)];
    std::byte* const dst = at(pair[0] + row % rows * dst_step, true);
    const std::byte* const src = at(pair[1] + row % rows * src_step, false);
    const Shown shown;
    std::memcpy(dst, src, units * 16);
  }
}

// As core/backend/cuda/kernels/pack.cu has them.
struct PackPiece {
  uint64_t address, block_step, bytes, at;
};
struct PackArguments {
  uint64_t pieces, packed, spent, first_at, block_bytes;
  uint32_t count, slices, blocks, scatters;
  uint32_t row_blocks, from, to, at;
  uint32_t block[960];
};

// What the engine's device reads or writes there, which may lie in several allocations side by
// side; copied to or from `bytes`.
void move_bytes(Engine& engine, uint64_t address, std::byte* bytes, uint64_t count, bool write) {
  std::vector<Piece> found;
  require(addresses().pieces(address, count, engine.context.physical, write, false, found),
          kIllegalAddress);
  for (const Piece& piece : found) {
    if (const Shown shown; write) {
      std::memcpy(piece.data, bytes, piece.bytes);
    } else {
      std::memcpy(bytes, piece.data, piece.bytes);
    }
    bytes += piece.bytes;
  }
}

void pack(const std::vector<uint64_t>& words, unsigned grid, Engine& engine) {
  PackArguments a;
  std::memcpy(&a, words.data(), sizeof a);
  for (uint32_t i = 0; i < a.blocks * a.count; ++i) {
    const uint32_t block = i / a.count;
    PackPiece piece;
    move_bytes(engine, a.pieces + i % a.count * sizeof piece, reinterpret_cast<std::byte*>(&piece),
               sizeof piece, false);
    require(piece.bytes <= a.slices * uint64_t{4096}, kIllegalAddress);
    const uint64_t page = piece.address + a.block[block] * piece.block_step;
    const uint32_t place = a.at + block;
    const uint32_t begin = std::max(place / a.row_blocks * a.row_blocks, a.from);
    const uint32_t end = std::min((place / a.row_blocks + 1) * a.row_blocks, a.to);
    const uint64_t packed = a.packed + (begin - a.from) * a.block_bytes +
                            (end - begin) * (piece.at - a.first_at) + (place - begin) * piece.bytes;
    std::vector<std::byte> held(piece.bytes);
    move_bytes(engine, a.scatters != 0 ? packed : page, held.data(), held.size(), false);
    move_bytes(engine, a.scatters != 0 ? page : packed, held.data(), held.size(), true);
  }
  Memory memory(engine);
  for (unsigned i = 0; a.spent != 0 && i < grid; ++i) memory.store(a.spent + 4 * i, 1000);
}

// As core/backend/cuda/kernels/reduce.cu has them.
struct ReduceJob {
  uint64_t dst, src, step, own, bytes;
  uint64_t wait[8], signal[8];
  uint32_t wait_value[8], signal_value[8];
  uint32_t waits, signals, rows, at;
};
constexpr uint32_t kReduceJobs = 15;
struct ReduceArguments {
  double scale;
  uint64_t counters;
  uint32_t operation, averages, jobs, pad;
  ReduceJob job[kReduceJobs];
};

void reduce_job(const ReduceArguments& a, const ReduceJob& job, offcore::DType dtype,
                Engine& engine) {
  if (job.bytes == 0) return;
  // A row may go over allocations that are mapped side by side.
  const auto at = [&](uint64_t address, bool write) {
    std::vector<Piece> found;
    require(addresses().pieces(address, job.bytes, engine.context.physical, write, false, found),
            kIllegalAddress);
    return found;
  };
  std::vector<std::vector<std::byte>> rows;
  const auto load = [&](uint64_t address) {
    std::vector<std::byte>& row = rows.emplace_back();
    for (const Piece& piece : at(address, false)) {
      const Shown shown;
      row.insert(row.end(), piece.data, piece.data + piece.bytes);
    }
    return row.data();
  };
  using enum offcore::ReduceOp;
  offcore::Reduction reduction{
      .op = std::array{premul_sum, min, max}[a.operation % 3], .dtype = dtype, .scale = a.scale};
  if (a.averages != 0) reduction.op = avg;
  std::vector<const std::byte*> sources;
  for (uint32_t row = 0; row < job.rows; ++row) {
    const uint64_t step = row > job.at ? row - 1 : row;
    sources.push_back(load(row == job.at ? job.own : job.src + job.step * step));
  }
  std::vector<std::byte> result(rows[0]);
  if (job.rows > 1 || job.at < job.rows) {
    offcore::reduce(reduction, result.data(), sources, job.bytes);
  }
  const std::byte* from = result.data();
  for (const Piece& piece : at(job.dst, true)) {
    const Shown shown;
    std::memcpy(piece.data, from, piece.bytes);
    from += piece.bytes;
  }
}

// What that does.
void reduce(const std::string& name, const std::vector<uint64_t>& words, Engine& engine) {
  ReduceArguments a;
  std::memcpy(&a, words.data(), sizeof a);
  require(a.jobs <= kReduceJobs, kIllegalAddress);
  Memory memory(engine);
  for (uint32_t i = 0; i < a.jobs; ++i) {
    const ReduceJob& job = a.job[i];
    for (uint32_t k = 0; k < job.waits; ++k) {
      const auto there = [&](uint32_t seen) {
        return static_cast<int32_t>(seen - job.wait_value[k]) >= 0;
      };
      if (!poll(engine, UINT64_MAX >> 1, job.wait[k], there)) return;
    }
    reduce_job(a, job, offcore::parse_dtype(name.substr(15)), engine);
    for (uint32_t k = 0; k < job.signals; ++k) memory.store(job.signal[k], job.signal_value[k]);
  }
}

// Where that lies for the CPU: memory of one allocation, or the host's.
template <typename T>
T* seen(Engine& engine, T* address, uint64_t bytes) {
  if (address == nullptr) return nullptr;
  std::vector<Piece> found;
  require(addresses().pieces(reinterpret_cast<DevicePtr>(address), bytes, engine.context.physical,
                             false, false, found) &&
              found.size() == 1,
          kIllegalAddress);
  return reinterpret_cast<T*>(found.front().data);
}

// The kernel of kernels/exchange.cu, as one thread does it.
void exchange(const std::vector<uint64_t>& words, unsigned grid, Engine& engine) {
  using offcore::proxy::HostWords;
  using offcore::proxy::RequestPort;
  offcore::proxy::ExchangeArgs a{};
  std::memcpy(&a, words.data(), sizeof a);
  if (a.port == nullptr) return;
  RequestPort port = *seen(engine, a.port, sizeof port);
  const auto own = [&](auto& pointer) { pointer = seen(engine, pointer, 8); };
  own(port.tail), own(port.head), own(port.sent), own(port.received), own(port.fault);
  const uint64_t row = 8 * (uint64_t{port.ranks} + 1);
  for (unsigned rank = 0; rank < port.ranks; ++rank) a.rows[rank] = seen(engine, a.rows[rank], row);
  a.matrix = seen(engine, a.matrix, port.ranks * row);
  const uint64_t count_bytes = port.ranks * (a.wide != 0 ? 8 : 4);
  a.counts = seen(engine, static_cast<const char*>(a.counts), count_bytes);
  a.received = seen(engine, static_cast<char*>(a.received), count_bytes);
  a.out = seen(engine, a.out, a.out_units * a.unit);
  a.in = seen(engine, a.in, a.in_units * a.unit);
  own(a.ended);
  a.port = &port;
  const Shown shown;
  if (const unsigned fault = offcore::proxy::ExchangeCalls<HostWords>::run(a)) {
    HostWords::store(&a.told[1], fault);
  }
  if (HostWords::add(a.ended, grid) + grid == a.call * grid) HostWords::store(a.told, a.call);
}

void play(const std::string& name, const Launch& launch, Engine& engine) {
  const auto& a = launch.arguments;
  if (name == "gather") return gather(a, engine);
  if (name == "offcore_pack") return pack(a, launch.blocks, engine);
  if (name == "offcore_exchange") return exchange(a, launch.blocks, engine);
  if (name.starts_with("offcore_")) return reduce(name, a, engine);
  if (name == "spinner") return spin(a, launch.blocks, engine);
  if (name == "toucher") return Memory(engine).store(a[0], static_cast<uint32_t>(a[1]));
  const auto word = [&](size_t i) { return static_cast<uint32_t>(a[i]); };
  read_peers({a[0], a[1], a[2], a[3], a[4], a[5], word(6), word(7), word(8), word(9), word(10),
              word(11), word(12)},
             engine);
}

}  // namespace

Room::Room(Context& context, int64_t threads) : context_(context), threads_(threads) {
  std::unique_lock lock(context_.mutex);
  threads_ = std::min(threads_, Context::kThreads);
  while (context_.threads_free < threads_ && context_.error == kSuccess) {
    context_.room.wait_for(lock, std::chrono::milliseconds(20));
  }
  context_.threads_free -= threads_;
}

Room::~Room() {
  const std::lock_guard lock(context_.mutex);
  context_.threads_free += threads_;
  context_.room.notify_all();
}

std::vector<unsigned> kernel_arguments(const std::string& name) {
  static const std::map<std::string, std::vector<unsigned>> known = {
      {"gather", {2048, 8, 8, 4, 4, 4}},
      {"offcore_exchange", {sizeof(offcore::proxy::ExchangeArgs)}},
      {"offcore_pack", {3912}},
      {"offcore_reduce_bfloat16", {sizeof(ReduceArguments)}},
      {"offcore_reduce_float16", {sizeof(ReduceArguments)}},
      {"offcore_reduce_float32", {sizeof(ReduceArguments)}},
      {"offcore_reduce_float64", {sizeof(ReduceArguments)}},
      {"offcore_reduce_int16", {sizeof(ReduceArguments)}},
      {"offcore_reduce_int32", {sizeof(ReduceArguments)}},
      {"offcore_reduce_int64", {sizeof(ReduceArguments)}},
      {"offcore_reduce_int8", {sizeof(ReduceArguments)}},
      {"offcore_reduce_uint8", {sizeof(ReduceArguments)}},
      {"reader", {8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4}},
      {"spinner", {8, 8, 8}},
      {"toucher", {8, 4}},
  };
  const auto found = known.find(name);
  return found == known.end() ? std::vector<unsigned>() : found->second;
}

Work kernel_work(const std::string& name, Launch launch) {
  return [name, launch = std::move(launch)](Engine& engine) -> Result {
    engine.pause();
    const Room room(engine.context, int64_t{launch.blocks} * launch.threads);
    try {
      play(name, launch, engine);
      return kSuccess;
    } catch (const Failure& failure) {
      return failure.code;
    }
  };
}

}  // namespace fakecuda
