// Kernels of `offcore gpu bench`, compiled by NVRTC.
#include <soak.h>
#include <offcore/device.cuh>

using offcore::RequestPort;
using offcore::Word;

namespace {

constexpr unsigned kDst = 1;
constexpr unsigned kSrc = 0;

__device__ Word now_ns() { return offcore::proxy::GpuMemory::now_ns(); }

__device__ unsigned sm() {
  unsigned number;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  return number;
}

__device__ unsigned stamp(Word round, unsigned rank, unsigned at) {
  return unsigned(round) * 2654435761u + rank * 40503u + at;
}

}  // namespace

// One thread on either side: round trips, by the clock of the side that begins, and what its puts
// took of it.
extern "C" __global__ void ping(const RequestPort* where, unsigned peer, Word chunks, Word base,
                                unsigned rounds, unsigned begins, Word* times, Word* clocks,
                                unsigned* fault) {
  __shared__ RequestPort port;
  port = *where;
  for (unsigned k = 1; k <= rounds; ++k) {
    const Word began = now_ns();
    unsigned code = 0;
    if (!begins) code = offcore::wait(port, peer, kDst, base + k);
    const long long first = clock64();
    if (code == 0) code = offcore::put_signal(port, peer, kDst, kSrc, 0, chunks).fault;
    clocks[k - 1] = Word(clock64() - first);
    if (code == 0 && begins) code = offcore::wait(port, peer, kDst, base + k);
    if (code != 0) {
      *fault = code;
      return;
    }
    times[k - 1] = now_ns() - began;
  }
}

// The same by words alone, for streams that wait for `gate` and in the end raise the other side's
// `arrived`.
extern "C" __global__ void chase(Word* gate, const Word* arrived, unsigned rounds, unsigned begins,
                                 Word* times, unsigned* fault) {
  for (unsigned k = 1; k <= rounds; ++k) {
    const Word began = now_ns();
    for (unsigned turn = 0; turn < 2; ++turn) {
      if ((turn == 0) == (begins != 0)) {
        offcore::proxy::GpuMemory::store(gate, Word{k});
        continue;
      }
      while (offcore::proxy::GpuMemory::load(arrived) < k) {
        if (now_ns() - began > 2000000000ull) {
          *fault = offcore::proxy::kTimeout;
          return;
        }
      }
    }
    times[k - 1] = now_ns() - began;
  }
}

// The same by a block that fills what it sends anew each round, and looks at all that has come.
extern "C" __global__ void ping_checked(const RequestPort* where, unsigned peer, unsigned* send,
                                        unsigned* receive, unsigned words, Word chunks, Word base,
                                        unsigned rounds, unsigned begins, Word* wrong,
                                        unsigned* fault) {
  const RequestPort& port = *where;
  __shared__ unsigned code;
  const auto wait_and_look = [&](Word k) {
    if (threadIdx.x == 0) code = offcore::wait(port, peer, kDst, base + k);
    __syncthreads();
    if (code != 0) return;
    Word bad = 0;
    for (unsigned i = threadIdx.x; i < words; i += blockDim.x) {
      bad += receive[i] != stamp(base + k, peer, i);
    }
    if (bad > 0) atomicAdd(wrong, bad);
    __syncthreads();
  };
  for (unsigned k = 1; k <= rounds; ++k) {
    if (!begins) wait_and_look(k);
    if (!begins && code != 0) break;
    for (unsigned i = threadIdx.x; i < words; i += blockDim.x) {
      send[i] = stamp(base + k, port.rank, i);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) code = offcore::put_signal(port, peer, kDst, kSrc, 0, chunks).fault;
    __syncthreads();
    if (code != 0) break;
    if (begins) wait_and_look(k);
    if (code != 0) break;
  }
  if (threadIdx.x == 0 && code != 0) *fault = code;
}

// What a push costs its thread, and when the engine has taken it as this thread sees it: a store
// to host memory and a load from there.
extern "C" __global__ void push_cost(const RequestPort* where, unsigned peer, unsigned rounds,
                                     Word* pushed, Word* taken, unsigned* fault) {
  __shared__ RequestPort port;
  port = *where;
  for (unsigned k = 0; k < rounds; ++k) {
    const Word began = now_ns();
    const long long first = clock64();
    const offcore::PutTicket ticket = offcore::put(port, peer, kDst, kSrc, 0, 0);
    pushed[k] = Word(clock64() - first);
    if (ticket.fault != 0) {
      *fault = ticket.fault;
      return;
    }
    while (offcore::proxy::GpuMemory::load(port.taken) < ticket.position) {
      if (now_ns() - began > 1000000000ull) {
        *fault = 1;
        return;
      }
    }
    taken[k] = now_ns() - began;
    if (const unsigned code = offcore::wait_sent(port, ticket)) {
      *fault = code;
      return;
    }
  }
}

// Every thread pushes `each` requests of one chunk and waits for its last one.
extern "C" __global__ void push_many(const RequestPort* where, unsigned peer, unsigned each,
                                     Word chunks_of_buffer, unsigned* fault) {
  const RequestPort& port = *where;
  const Word id = Word(blockIdx.x) * blockDim.x + threadIdx.x;
  offcore::PutTicket ticket{};
  for (unsigned i = 0; i < each; ++i) {
    const Word chunk = (id + Word(i) * gridDim.x * blockDim.x) % chunks_of_buffer;
    ticket = offcore::put(port, peer, kDst, kSrc, chunk, 1);
    if (ticket.fault != 0) break;
  }
  const unsigned code = offcore::wait_sent(port, ticket);
  if (code != 0) *fault = code;
}

// Messages in flight: one warp pushes them all, `stride` chunks apart, round the buffer.
extern "C" __global__ void messages(const RequestPort* where, unsigned peer, unsigned count,
                                    Word chunks, Word stride, Word chunks_of_buffer,
                                    unsigned* fault) {
  const RequestPort& port = *where;
  const Word places = chunks_of_buffer / stride;
  offcore::PutTicket ticket{};
  for (unsigned m = threadIdx.x; m < count; m += blockDim.x) {
    ticket = offcore::put(port, peer, kDst, kSrc, (m % places) * stride, chunks);
    if (ticket.fault != 0) break;
  }
  unsigned code = ticket.fault;
  if (threadIdx.x < count && code == 0) code = offcore::wait_sent(port, ticket);
  if (code != 0) *fault = code;
}

// Every thread is a lane of a soak.
extern "C" __global__ void soak(const RequestPort* where, unsigned peer, unsigned each,
                                unsigned buffers, Word slots, unsigned* fault) {
  __shared__ RequestPort port;
  if (threadIdx.x == 0) port = *where;
  __syncthreads();
  const unsigned lanes = gridDim.x * blockDim.x;
  const unsigned lane = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned code =
      offcore::soak_lane<offcore::proxy::Gpu>(port, peer, {lanes, each, buffers, slots}, lane);
  if (code != 0) *fault = code;
}

// Of the other side: every thread watches the clock of a lane, and the first one the signals.
extern "C" __global__ void soak_watch(const RequestPort* where, unsigned peer, unsigned each,
                                      unsigned buffers, Word slots, const Word* clocks,
                                      unsigned* fault) {
  const unsigned lanes = gridDim.x * blockDim.x;
  const unsigned lane = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned code = offcore::soak_watch<offcore::proxy::GpuMemory>(
      clocks + 2 * lane, each / offcore::kSoakEvery, where->limit_ns);
  if (lane == 0 && code == 0) {
    code = offcore::soak_signals<offcore::proxy::Gpu>(*where, peer, {lanes, each, buffers, slots});
  }
  if (code != 0) *fault = code;
}

extern "C" __global__ void stamp_time(Word* at) { *at = now_ns(); }

extern "C" __global__ void tell_host(Word* at, Word value) {
  offcore::proxy::GpuMemory::store(at, value);
}

// Reads what lies in L2, past L1, again and again: `words` is a power of two.
extern "C" __global__ void read_l2(const uint4* data, unsigned words, unsigned passes,
                                   unsigned* sum) {
  unsigned at = (blockIdx.x * blockDim.x + threadIdx.x) & (words - 1);
  unsigned seen = 0;
  for (unsigned i = 0; i < passes; ++i) {
    uint4 value;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(data + at));
    seen ^= value.x ^ value.y ^ value.z ^ value.w;
    at = (at + 32 * 1021) & (words - 1);
  }
  if (seen == 1) *sum = seen;
}

// Multiplies and adds in registers, as many at once as a scheduler can issue.
extern "C" __global__ void multiply(const uint4*, unsigned words, unsigned passes, unsigned* sum) {
  float values[8];
  for (unsigned k = 0; k < 8; ++k) values[k] = float(threadIdx.x + k);
  const float by = float(words) * 1e-9f;
#pragma unroll 64
  for (unsigned i = 0; i < passes; ++i) {
    for (unsigned k = 0; k < 8; ++k) values[k] = fmaf(values[k], by, by);
  }
  float all = 0;
  for (unsigned k = 0; k < 8; ++k) all += values[k];
  if (all == 1.0f) *sum = 1;
}

// Stays until released, or for 10 s; counts blocks that have started, and ended.
extern "C" __global__ void hold(unsigned* started, const unsigned* release, unsigned* ended) {
  if (threadIdx.x == 0) atomicAdd(started, 1u);
  const Word began = now_ns();
  while (offcore::proxy::GpuMemory::load(release) == 0 && now_ns() - began < 10000000000ull) {
    __nanosleep(1000);
  }
  if (threadIdx.x == 0) atomicAdd(ended, 1u);
}

// The same with the blocks of each SM in `held`, before all have started.
extern "C" __global__ void hold_sms(unsigned* started, const unsigned* release, unsigned* ended,
                                    unsigned* held) {
  if (threadIdx.x == 0) {
    atomicAdd(&held[sm()], 1u);
    __threadfence();
    atomicAdd(started, 1u);
  }
  const Word began = now_ns();
  while (offcore::proxy::GpuMemory::load(release) == 0 && now_ns() - began < 10000000000ull) {
    __nanosleep(1000);
  }
  if (threadIdx.x == 0) atomicAdd(ended, 1u);
}

// Blocks that run wherever there is room, by SM.
extern "C" __global__ void roam(unsigned* ran) {
  if (threadIdx.x == 0) atomicAdd(&ran[sm()], 1u);
}
