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
  __device__ __forceinline__ static Word peek(const Word* at) {
    Word value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
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
  __device__ __forceinline__ static Word add(Word* at, Word count) { return atomicAdd(at, count); }
  __device__ __forceinline__ static Word swap(Word* at, Word expected, Word value) {
    Word found;
    asm volatile("atom.release.sys.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(found)
                 : "l"(at), "l"(expected), "l"(value)
                 : "memory");
    return found;
  }
  __device__ __forceinline__ static Word now_ns() {
    Word now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }
  // Thousands of threads that wait long would be in the way of those that they wait for.
  __device__ __forceinline__ static void pause(unsigned looks) {
    if (looks > 512) __nanosleep(128);
  }
  __device__ __forceinline__ static void rest(unsigned looks) {
    __nanosleep(looks < 6 ? 32u << looks : 1024u);
  }

  class Lanes {
   public:
    __device__ __forceinline__ explicit Lanes(Word key) {
      unsigned lane;
      asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
      asm volatile("match.any.sync.b64 %0, %1, %2;" : "=r"(lanes_) : "l"(key), "r"(__activemask()));
      place_ = __popc(lanes_ & ((1u << lane) - 1));
    }
    __device__ __forceinline__ unsigned size() const { return __popc(lanes_); }
    __device__ __forceinline__ unsigned place() const { return place_; }
    __device__ __forceinline__ bool leads() const { return place_ == 0; }
    template <typename T>
    __device__ __forceinline__ T tell(T value) const {
      return __shfl_sync(lanes_, value, __ffs(int(lanes_)) - 1);
    }
    __device__ __forceinline__ bool all(bool one) const {
      __syncwarp(lanes_);  // what the lanes wrote is the leader's to release
      return __all_sync(lanes_, one) != 0;
    }
    __device__ __forceinline__ void meet() const { __syncwarp(lanes_); }

   private:
    unsigned lanes_;
    unsigned place_;
  };
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
