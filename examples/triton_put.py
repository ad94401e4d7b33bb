"""Two Triton kernels that send each other data while they run, on two GPUs: docs/gpu-driven.md.

    CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER python examples/triton_put.py

Each stores numbers, asks for their copy to the other GPU, waits for what the other has sent, and
looks at it; 200 rounds in one launch. Without two GPUs it compiles the kernel for an H100.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-any-return"
import importlib.util
import sys

import offcore

if importlib.util.find_spec("triton") is None:
    print("this example needs Triton: pip install torch triton")
    sys.exit()

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from offcore.device import triton as requests

COUNT, ROUNDS = 4096, 200
NAMES = ["port", "peer", "send", "receive", "rounds", "chunks", "told"]


@triton.jit(do_not_specialize=NAMES)  # so that all launches are of one binary, loaded once
def exchange(port, peer, send, receive, rounds, chunks, told, COUNT: tl.constexpr):  # noqa: N803
    """Halves take turns: a round's is free once the peer's next round has come."""
    at = tl.arange(0, COUNT)
    outs, ins = send.to(tl.pointer_type(tl.int32)), receive.to(tl.pointer_type(tl.int32))
    wrong, fault, k = 0, 0, 1
    while (k <= rounds) & (fault == 0):
        half = k % 2
        tl.store(outs + half * COUNT + at, at * k)
        ticket = requests.put_signal(port, peer, 1, 0, half * chunks, chunks)
        fault = requests.wait(port, peer, 1, k)
        if fault == 0:
            got = tl.load(ins + half * COUNT + at)
            wrong += tl.sum((got != at * k).to(tl.int32))
            fault = requests.wait_sent(port, peer, ticket)
        k += 1
    results = told.to(tl.pointer_type(tl.int32))
    tl.store(results, fault)
    tl.store(results + 1, wrong)


def compiled_for(capability: int) -> str:
    """The kernel's PTX, without a GPU."""
    types = {
        name: "i64" if name in ("port", "send", "receive", "told") else "i32" for name in NAMES
    }
    source = ASTSource(exchange, {**types, "COUNT": "constexpr"}, constexprs={"COUNT": COUNT})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]


def run() -> None:
    with offcore.Communicator(backend="cuda", ranks=2) as comm:
        windows = [comm.window(2 * 4 * COUNT) for _ in range(2)]
        told = [torch.zeros(2, dtype=torch.int32, device=f"cuda:{rank}") for rank in range(2)]
        streams = [torch.cuda.Stream(device=rank) for rank in range(2)]
        with comm.requests(windows, chunk=4096) as ports:
            for rounds in (0, ROUNDS):  # the first loads it: nothing may be loaded while one waits
                for rank in range(2):
                    places = [window.address(rank) for window in windows]
                    last = (rounds, 4 * COUNT // 4096, told[rank].data_ptr())
                    with torch.cuda.device(rank), torch.cuda.stream(streams[rank]):
                        exchange[(1,)](ports.port(rank), 1 - rank, *places, *last, COUNT=COUNT)
                for stream in streams:
                    stream.synchronize()
            ports.check()
        for rank in range(2):
            fault, wrong = told[rank].tolist()
            print(f"rank {rank}: fault {fault}, {wrong} wrong numbers in {ROUNDS} rounds")
            assert fault == wrong == 0


if __name__ == "__main__":
    if torch.cuda.is_available() and torch.cuda.device_count() > 1:
        run()
    else:
        print(f"no two GPUs here; compiled for sm_90: {len(compiled_for(90))} bytes of PTX")
