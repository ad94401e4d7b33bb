// What a generated loop kernel stands on: instructions, counters, waits, and the operators' tiles.
//
// Before it: device.cuh for a GPU, or, for threads of the host, `kThreads` = 1, a `Memory` as ring.h
// wants it, and shims of what CUDA has. Every wait ends: by its limit, by the host's abort word, or
// by the fault of another block or of an engine. Counters only grow, over all launches.
#pragma once

namespace offcore::loop {

using proxy::PutTicket;
using proxy::RequestPort;
using proxy::Word;
using Port = proxy::RequestCalls<Memory>;

enum Kind : unsigned { kRun, kAwait, kArrived, kSent, kStamp };

struct Instruction {
  unsigned kind, a, b, lag, nth, each;
};

// Why a loop ended early: PortFault, or kAborted. The rest of a fault's word says where.
constexpr Word kAborted = 15;
constexpr unsigned kTimes = 4096;  // of the stopwatch: the last iterations
constexpr unsigned kTile = 64;
constexpr unsigned kDepth = 16;
constexpr unsigned kLookEvery = 256;  // iterations, where no wait looks for an abort or a fault

// In host memory.
struct Shared {
  Word abort;  // the host's: end now
  Word stop;   // the host's: begin no iteration that `end` does not have
  Word end;    // the host's answer, iterations of all launches + 1
  Word begun;  // iterations that block 0 has begun
};

struct Args {
  const Instruction* instructions;
  const unsigned* first;    // by block: where its instructions begin
  char* const* memory;      // by buffer
  const RequestPort* port;  // null: no operator needs it
  Shared* shared;
  Word* counters;  // by operator: tiles done
  Word* tickets;   // by operator: the position of its last put
  Word* times;     // by iteration, modulo kTimes: when block 0 began it; then its stamps
  Word* fault;     // what ended it early
  Word* until;     // iterations that may begin
  Word base;       // iterations of earlier launches
  Word end;        // free_running: until stopped
  Word limit_ns;
  unsigned stamps;
  unsigned free_running;
  unsigned blocks;
  unsigned unused;
};

struct Block {
  const Args& args;
  Word iteration;
  unsigned at;  // the instruction

  OFFCORE_INLINE void fail(Word code) {
    if (code == 0 || Memory::load(args.fault) != 0) return;
    Memory::store(args.fault, code | Word{blockIdx.x} << 8 | Word{at} << 24);
  }

  // By one thread. False: the loop ends.
  template <typename Ready>
  OFFCORE_INLINE bool spin(unsigned peer, const Ready& ready) {
    Word began_ns = 0;
    for (unsigned looks = 1;; ++looks) {
      if (ready()) return true;
      if (looks % 64 == 0) {
        if (Memory::load(args.fault) != 0) return false;
        Word code = 0;
        if (args.port != nullptr) {
          code = Memory::load(&args.port->fault[args.port->rank]);
          if (code == 0) code = Memory::load(&args.port->fault[peer]);
        }
        if (code == 0 && looks % 1024 == 0) {
          if (Memory::load(&args.shared->abort) != 0) code = kAborted;
          if (code == 0 && args.port != nullptr) code = Memory::load(args.port->fault_here);
        }
        const Word now_ns = Memory::now_ns();
        if (began_ns == 0) began_ns = now_ns;
        if (code == 0 && now_ns - began_ns > args.limit_ns) code = proxy::kTimeout;
        if (code != 0) {
          if (ready()) return true;
          fail(code);
          return false;
        }
      }
      Memory::pause(looks);
    }
  }

  OFFCORE_INLINE bool await(const Instruction& one) {
    const unsigned own = args.port == nullptr ? 0 : args.port->rank;
    if (one.kind == kAwait) {
      if (iteration < one.lag) return true;
      const Word count = (iteration + 1 - one.lag) * one.b;
      return spin(own, [&] { return Memory::load(&args.counters[one.a]) >= count; });
    }
    if (one.kind == kArrived) {
      if (iteration < one.lag) return true;
      const Word count = (iteration - one.lag) * one.each + one.nth + 1;
      return spin(one.a, [&] { return Port::received(*args.port, one.a, one.b) >= count; });
    }
    const PutTicket ticket{Memory::load(&args.tickets[one.a]), one.b, 0};
    return spin(one.b, [&] { return Port::test(*args.port, ticket); });
  }

  // Whether one more iteration begins.
  OFFCORE_INLINE bool begin() {
    if (iteration % kLookEvery == 0) {
      if (Memory::load(&args.shared->abort) != 0) fail(kAborted);
      if (Memory::load(args.fault) != 0) return false;
    }
    if (blockIdx.x != 0) {
      return spin(0, [&] { return Memory::load(args.until) > iteration || over(); }) && !over();
    }
    if (Memory::load(&args.fault[0]) != 0) return false;
    const Word now_ns = Memory::now_ns();  // before others begin
    Word* const began_ns = &args.times[iteration % kTimes * (args.stamps + 1)];
    if (args.free_running == 0) {
      if (iteration >= args.end) return false;
      *began_ns = now_ns;
      if (iteration == args.base) Memory::store(args.until, args.end);
      return true;
    }
    // Either this thread sees `stop`, or the host sees that the iteration has begun.
    Memory::store(&args.shared->begun, iteration + 1);
    __threadfence_system();
    if (Memory::load(&args.shared->abort) != 0) {
      fail(kAborted);
      return false;
    }
    if (Memory::load(&args.shared->stop) != 0) {
      if (!spin(0, [&] { return Memory::load(&args.shared->end) != 0; })) return false;
      if (iteration + 1 >= Memory::load(&args.shared->end)) {
        Memory::store(&args.until[1], iteration + 1);
        return false;
      }
    }
    *began_ns = now_ns;
    Memory::store(args.until, iteration + 1);
    return true;
  }

  // `until[1]`: where a launch without an end has ended, + 1.
  OFFCORE_INLINE bool over() {
    if (args.free_running == 0) return iteration >= args.end;
    const Word end = Memory::load(&args.until[1]);
    return end != 0 && iteration + 1 >= end;
  }

  OFFCORE_INLINE void pushed(unsigned op, const PutTicket& ticket) {
    fail(ticket.fault);
    Memory::store(&args.tickets[op], ticket.position);
  }

  // All threads: the tile is written.
  __device__ void done(unsigned op) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(&args.counters[op], Word{1});
  }

  // Behind the last iteration: sources may be written again.
  __device__ void finish() {
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    for (at = args.first[args.blocks]; at < args.first[args.blocks + 1]; ++at) {
      if (!await(args.instructions[at])) return;
    }
  }

  // All threads. Operate(op, tile) does one tile.
  template <typename Operate>
  __device__ void run(const Operate& operate) {
    __shared__ unsigned going;
    const unsigned begin_at = args.first[blockIdx.x], end_at = args.first[blockIdx.x + 1];
    for (iteration = args.base;; ++iteration) {
      if (threadIdx.x == 0) going = begin();
      __syncthreads();
      if (going == 0) return finish();
      __syncthreads();
      for (at = begin_at; at < end_at; ++at) {
        const Instruction one = args.instructions[at];
        if (one.kind == kRun) {
          operate(*this, one.a, one.b);
          done(one.a);
          continue;
        }
        if (threadIdx.x == 0) {
          if (one.kind == kStamp) {
            args.times[iteration % kTimes * (args.stamps + 1) + 1 + one.a] = Memory::now_ns();
            going = 1;
          } else {
            going = await(one);
          }
        }
        __syncthreads();
        if (going == 0) return;
        __syncthreads();
      }
    }
  }
};

template <typename T>
struct alignas(16) Pack {
  T at[16 / sizeof(T)];
};

// Elements [tile * part, tile * part + part) of count: call(i) for one, packs(i) for 16 bytes.
template <typename T, typename Packs, typename One>
OFFCORE_INLINE void each(Word count, Word part, unsigned tile, bool aligned, const Packs& packs,
                         const One& call) {
  constexpr Word kPack = 16 / sizeof(T);
  const Word begin = tile * part;
  const Word end = begin + part < count ? begin + part : count;
  const Word whole = aligned && begin < end ? begin + (end - begin) / kPack * kPack : begin;
  for (Word i = begin + threadIdx.x * kPack; i < whole; i += blockDim.x * kPack) packs(i);
  for (Word i = whole + threadIdx.x; i < end; i += blockDim.x) call(i);
}

template <typename... P>
OFFCORE_INLINE bool aligned(P*... at) {
  return ((reinterpret_cast<Word>(at) | ...) & 15) == 0;
}

// out[i] = the sum of in[j * count + i], in the order of j.
template <typename T>
OFFCORE_INLINE void reduce(T* out, const T* in, Word count, unsigned parts, Word part,
                           unsigned tile) {
  each<T>(
      count, part, tile, false, [](Word) {},
      [&](Word i) {
        T sum = in[i];
        for (unsigned j = 1; j < parts; ++j) sum += in[j * count + i];
        out[i] = sum;
      });
}

// One tile of out[m, n] = a[m, k] @ b[k, n]. The products are added in the order of k.
template <typename T>
__device__ void gemm(T* out, const T* a, const T* b, unsigned m, unsigned n, unsigned k,
                     unsigned tile) {
  constexpr unsigned kMicro = 4, kSide = kTile / kMicro, kUnits = kSide * kSide / kThreads;
  __shared__ T left[kDepth][kTile + 4];
  __shared__ T right[kDepth][kTile + 4];
  const unsigned wide = (n + kTile - 1) / kTile;
  const unsigned row = tile / wide * kTile, column = tile % wide * kTile;
  T sum[kUnits][kMicro][kMicro] = {};
  for (unsigned depth = 0; depth < k; depth += kDepth) {
    for (unsigned i = threadIdx.x; i < kDepth * kTile; i += kThreads) {
      const unsigned r = i / kDepth, d = i % kDepth, c = i % kTile, e = i / kTile;
      left[d][r] = row + r < m && depth + d < k ? a[Word{row + r} * k + depth + d] : T(0);
      right[e][c] = column + c < n && depth + e < k ? b[Word{depth + e} * n + column + c] : T(0);
    }
    __syncthreads();
    for (unsigned unit = 0; unit < kUnits; ++unit) {
      const unsigned at = unit * kThreads + threadIdx.x, r = at / kSide, c = at % kSide;
      for (unsigned d = 0; d < kDepth; ++d) {
        for (unsigned x = 0; x < kMicro; ++x) {
          for (unsigned y = 0; y < kMicro; ++y) {
            sum[unit][x][y] += left[d][r * kMicro + x] * right[d][c + y * kSide];
          }
        }
      }
    }
    __syncthreads();
  }
  for (unsigned unit = 0; unit < kUnits; ++unit) {
    const unsigned at = unit * kThreads + threadIdx.x, r = at / kSide, c = at % kSide;
    for (unsigned x = 0; x < kMicro; ++x) {
      for (unsigned y = 0; y < kMicro; ++y) {
        const unsigned i = row + r * kMicro + x, j = column + c + y * kSide;
        if (i < m && j < n) out[Word{i} * n + j] = sum[unit][x][y];
      }
    }
  }
}

}  // namespace offcore::loop
