// The kernel of an all-to-all whose counts lie in GPU memory (core/proxy/exchange.h): block 0 tells
// the counts, pushes the requests and waits; all others copy the rank's own part.
#include "core/proxy/exchange.h"

#include "core/proxy/device.cuh"

namespace {

using offcore::proxy::ExchangeArgs;
using Memory = offcore::proxy::GpuMemory;
using Exchange = offcore::proxy::ExchangeCalls<Memory>;

constexpr unsigned kThreads = 512;
static_assert(kThreads >= offcore::proxy::kRanksMax);

// All threads: any one's fault.
__device__ unsigned shared_fault(unsigned* where, unsigned fault) {
  if (fault != 0) atomicMax(where, fault);
  __syncthreads();
  const unsigned found = *where;
  __syncthreads();
  return found;
}

__device__ unsigned exchange(const ExchangeArgs& args, unsigned* where) {
  const unsigned rank = threadIdx.x;
  const bool names = rank < args.port->ranks;
  const bool peer = names && rank != args.port->rank;
  if (blockIdx.x == 0 && names) Exchange::publish(args, rank);
  if (shared_fault(where, names ? Exchange::enter(args, rank) : 0)) return *where;
  const bool all_fit = __syncthreads_and(!names || Exchange::fits(args, rank)) != 0;
  if (blockIdx.x != 0 && all_fit) {
    const offcore::Word parts = offcore::Word{gridDim.x - 1} * kThreads;
    Exchange::copy_own(args, offcore::Word{blockIdx.x - 1} * kThreads + rank, parts);
  }
  if (blockIdx.x == 0) {
    offcore::PutTicket ticket{};
    if (peer) ticket = Exchange::send(args, rank, all_fit);
    if (shared_fault(where, peer ? Exchange::finish(args, rank, ticket) : 0)) return *where;
    if (names) Exchange::tell_received(args, rank);
  }
  return all_fit ? offcore::proxy::kNone : offcore::proxy::kInvalid;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) offcore_exchange(ExchangeArgs args) {
  __shared__ unsigned where;
  if (args.port == nullptr) return;
  if (threadIdx.x == 0) where = 0;
  __syncthreads();
  const unsigned fault = exchange(args, &where);
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (fault != 0) Memory::store(&args.told[1], offcore::Word{fault});
  __threadfence_system();
  if (Memory::add(args.ended, 1) + 1 == args.call * gridDim.x) {
    __threadfence_system();
    Memory::store(args.told, args.call);
  }
}
