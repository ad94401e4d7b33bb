"""Two CUDA C++ kernels that send each other data while they run, on two GPUs: docs/gpu-driven.md.

    CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER python examples/nvrtc_put.py

NVRTC compiles them, so CUDA's toolkit is not needed: `pip install nvidia-cuda-nvrtc`, or torch, has
it. A kernel fills a buffer, asks for its copy to the other GPU, waits for what the other has sent,
and looks at every word; 200 rounds in one launch. Without two GPUs it compiles them for an H100.
"""

from ctypes import c_uint32, c_uint64

import numpy as np

import offcore
from offcore.device.cuda import Kernels, compile_cubin

COUNT, ROUNDS, CHUNK = 4096, 200, 4096
SOURCE = r"""
#include <offcore/device.cuh>

// Halves of the buffers take turns: a round's is free once the peer's next round has come.
extern "C" __global__ void exchange(const offcore::RequestPort* where, unsigned peer,
                                    unsigned* send, unsigned* receive, unsigned count,
                                    unsigned long long chunks, unsigned rounds, unsigned* told) {
  __shared__ offcore::RequestPort port;
  __shared__ unsigned fault;
  if (threadIdx.x == 0) port = *where;
  __syncthreads();
  for (unsigned k = 1; k <= rounds; ++k) {
    const unsigned half = k % 2;
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
      send[half * count + i] = i * k + port.rank;
    }
    __threadfence();  // every thread that wrote, then one pushes
    __syncthreads();
    offcore::PutTicket ticket{};
    if (threadIdx.x == 0) {
      ticket = offcore::put_signal(port, peer, 1, 0, half * chunks, chunks);
      fault = ticket.fault;
      if (fault == offcore::kNone) fault = offcore::wait(port, peer, 1, k);
    }
    __syncthreads();
    if (fault != offcore::kNone) break;
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
      if (receive[half * count + i] != i * k + peer) atomicAdd(&told[1], 1u);
    }
    __syncthreads();  // all have looked before the next round's put says so to the peer
    if (threadIdx.x == 0) fault = offcore::wait_sent(port, ticket);
    __syncthreads();
    if (fault != offcore::kNone) break;
  }
  if (threadIdx.x == 0) told[0] = fault;
}
"""


def exchange(comm: offcore.Communicator) -> None:
    send, receive, told = (comm.window(one) for one in (8 * COUNT, 8 * COUNT, 4096))
    kernels = [Kernels(SOURCE, gpu) for gpu in range(2)]
    with comm.requests([send, receive], chunk=CHUNK) as requests:
        for rounds in (0, ROUNDS):  # the first loads them: nothing may be loaded while one waits
            for rank, one in enumerate(kernels):
                places = [c_uint64(window.address(rank)) for window in (send, receive)]
                args = [c_uint64(requests.port(rank)), c_uint32(1 - rank), *places]
                args += [c_uint32(COUNT), c_uint64(4 * COUNT // CHUNK), c_uint32(rounds)]
                one.launch("exchange", 1, 256, *args, c_uint64(told.address(rank)))
            for one in kernels:
                one.wait()
        requests.check()
    for rank, one in enumerate(kernels):
        one.close()
        words = np.empty(2, np.uint32)
        told.read(words.view(np.uint8), rank=rank)
        fault, wrong = words.tolist()
        print(f"rank {rank}: fault {fault}, {wrong} wrong words in {ROUNDS} rounds")
        assert fault == wrong == 0


def main() -> None:
    try:
        comm = offcore.Communicator(backend="cuda", ranks=2)
    except offcore.Error as error:
        print(f"no two GPUs here ({error})")
        try:
            print(f"compiled for sm_90: {len(compile_cubin(SOURCE, 'sm_90'))} bytes of code")
        except offcore.Error as missing:
            print(f"not compiled: {missing}")
        return
    with comm:
        exchange(comm)


if __name__ == "__main__":
    main()
