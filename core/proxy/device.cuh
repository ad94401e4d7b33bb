// Requests from GPU threads (docs/gpu-driven.md). Header-only: nvcc, NVRTC, cupy's RawKernel.
//
//   __global__ void exchange(const offcore::RequestPort* where, ...) {
//     const offcore::RequestPort& port = *where;
//     ...                                      // write what is to be sent
//     __threadfence();                         // every thread that wrote
//     __syncthreads();
//     if (threadIdx.x == 0) {
//       offcore::put_signal(port, peer, dst, src, chunk, chunks);
//       offcore::wait(port, peer, dst, count); // other than offcore::kNone: a fault
//     }
//     __syncthreads();
//   }
//
// Read what has come with ordinary loads behind wait() and a barrier, never through __ldg.
#pragma once

#include "ring.h"

namespace offcore {

namespace proxy {

struct GpuMemory {
  __device__ __forceinline__ static Word load(const Word* at) {
    Word value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
  }
  __device__ __forceinline__ static unsigned load(const unsigned* at) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
  }
  __device__ __forceinline__ static void store(Word* at, Word value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
  }
  __device__ __forceinline__ static void store(unsigned* at, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
  }
  __device__ __forceinline__ static void append(Word* at, Word value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
  }
  // The lanes of a warp that come together add as one.
  __device__ __forceinline__ static Word reserve(Word* at, unsigned count) {
    const unsigned lanes = __activemask();
    unsigned lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    unsigned same;
    asm volatile("match.any.sync.b64 %0, %1, %2;"
                 : "=r"(same)
                 : "l"(reinterpret_cast<Word>(at) + count), "r"(lanes));
    const unsigned leader = __ffs(int(same)) - 1;
    const unsigned before = __popc(same & ((1u << lane) - 1));
    Word first = 0;
    if (lane == leader) first = atomicAdd(at, Word{count} * __popc(same));
    first = __shfl_sync(same, first, int(leader));
    return first + Word{count} * before;
  }
  __device__ __forceinline__ static Word now_ns() {
    Word now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }
  __device__ __forceinline__ static void pause(unsigned) {}
};

using Gpu = RequestCalls<GpuMemory>;

}  // namespace proxy

using proxy::kNone;
using proxy::PutTicket;
using proxy::RequestPort;
using proxy::Word;

__device__ __forceinline__ PutTicket put(const RequestPort& port, unsigned peer, unsigned dst,
                                         unsigned src, Word chunk, Word chunks) {
  return proxy::Gpu::put(port, peer, dst, src, chunk, chunks);
}
__device__ __forceinline__ PutTicket put_signal(const RequestPort& port, unsigned peer,
                                                unsigned dst, unsigned src, Word chunk,
                                                Word chunks) {
  return proxy::Gpu::put_signal(port, peer, dst, src, chunk, chunks);
}
__device__ __forceinline__ PutTicket signal(const RequestPort& port, unsigned peer, unsigned dst) {
  return proxy::Gpu::signal(port, peer, dst);
}
__device__ __forceinline__ PutTicket put_bytes(const RequestPort& port, unsigned peer, unsigned dst,
                                               Word dst_offset, unsigned src, Word src_offset,
                                               Word bytes, bool signalled = false) {
  return proxy::Gpu::put_bytes(port, peer, dst, dst_offset, src, src_offset, bytes, signalled);
}
__device__ __forceinline__ bool test(const RequestPort& port, const PutTicket& ticket) {
  return proxy::Gpu::test(port, ticket);
}
__device__ __forceinline__ unsigned wait_sent(const RequestPort& port, const PutTicket& ticket,
                                              Word limit_ns = 0) {
  return proxy::Gpu::wait_sent(port, ticket, limit_ns);
}
__device__ __forceinline__ unsigned flush(const RequestPort& port, unsigned peer,
                                          Word limit_ns = 0) {
  return proxy::Gpu::flush(port, peer, limit_ns);
}
__device__ __forceinline__ Word received(const RequestPort& port, unsigned peer, unsigned buffer) {
  return proxy::Gpu::received(port, peer, buffer);
}
__device__ __forceinline__ unsigned wait(const RequestPort& port, unsigned peer, unsigned buffer,
                                         Word count, Word limit_ns = 0) {
  return proxy::Gpu::wait(port, peer, buffer, count, limit_ns);
}

}  // namespace offcore
