"""What the sdma backend does on stand-in runtimes; test_sdma_ways.py runs each in its own process.

As a program: the name of a function below; prints what it returns as JSON.
"""

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "conformance")]

import offcore
from offcore import _core
from oracles import noise

HEADER = """\
program case machine=m ranks=2 variant=v mode=eager protocol=eager native=yes flags=8 span=4
buffer w window {size}
buffer h host {size}
"""


def session() -> _core.Session:
    return _core.Session("sdma", offcore.machines.load("mi300x-8"), 2)


def run(on: _core.Session, body: str, size: int = 4096) -> dict[str, list[Any]]:
    """The buffers as they are after it; before, they are noise."""
    names = {"w": 2, "h": 1}
    arrays = {n: [noise(size, ord(n), r) for r in range(ranks)] for n, ranks in names.items()}
    on.run(_core.Program.parse(HEADER.format(size=size) + body), arrays, checked=False)
    return arrays


def failure(on: _core.Session, body: str, size: int = 4096) -> list[str]:
    try:
        run(on, body, size)
    except offcore.Error as error:
        return [error.code, str(error)]
    return []


def copies(count: int) -> str:
    """Rank 0 copies so many single bytes of its own to the same places of rank 1."""
    rows = f"rows={count} dst_step=3 src_step=3"
    return f"queue 0.0\n copy w[1]+0 <- w[0]+0 bytes=1 {rows}\n"


def right(arrays: dict[str, list[Any]], count: int) -> bool:
    """Whether just those copies were made."""
    expected = noise(arrays["w"][1].size, ord("w"), 1)
    expected[: 3 * count : 3] = arrays["w"][0][: 3 * count : 3]
    return bool(np.array_equal(arrays["w"][1], expected))


def told() -> Any:
    return next(row[1:] for row in offcore.probe_backends() if row[0] == "sdma")


def engines() -> Any:
    """On which engines queues were made: of copies to peers, within a GPU, with the host."""
    fake = ctypes.CDLL(os.environ["OFFCORE_LIBHSA"])
    fake.fakehsa_made_on.restype = ctypes.c_uint64

    def made(body: str) -> list[int]:
        before = [fake.fakehsa_made_on(engine) for engine in range(16)]
        arrays = run(on, body)
        assert np.array_equal(arrays["w"][1][:64], noise(4096, ord("w"), 0)[:64])
        after = [fake.fakehsa_made_on(engine) for engine in range(16)]
        return [engine for engine in range(16) for _ in range(after[engine] - before[engine])]

    on = session()
    copy = " copy w[1]+0 <- w[0]+0 bytes=64\n"
    host = " copy w[1]+128 <- h[host]+0 bytes=64\n"
    return [
        made(f"queue 0.0\n{copy}queue 0.1\n copy w[0]+64 <- w[0]+0 bytes=64\n"),
        made(f"queue 0.13\n{copy}queue 0.14\n copy w[1]+64 <- w[0]+0 bytes=64\n"),
        made(f"queue 0.0\n{copy}queue 1.0\n{host}queue 1.3\n copy h[host]+8 <- w[0]+0 bytes=8\n"),
    ]


def outside() -> Any:
    """Collectives of memory that is pinned for the call: the same twice, and two on one page."""
    with offcore.Communicator(backend="sdma", machine="mi300x-8", ranks=2) as comm:
        page = np.zeros(3 << 12, np.uint8)
        at = -page.ctypes.data % 4096
        inputs = [page[at + 100 : at + 200], page[at + 300 : at + 400]]
        inputs[0][:], inputs[1][:] = noise(100, 0), noise(100, 1)
        expected = np.concatenate(inputs)
        outs = [comm.empty(200) for _ in range(4)]
        handles = [comm.all_gather(out, inputs, protocol="promise") for out in outs]
        ways = {handle.wait().way for handle in handles}
        right = all(np.array_equal(array, expected) for out in outs for array in out)
        counts = []
        if ways == {"hip_batch"}:
            fake = ctypes.CDLL(os.environ["OFFCORE_LIBHIP"] + ".7")
            fake.fakehip_done.restype = ctypes.c_uint64
            counts = [fake.fakehip_done(name) for name in (b"registered", b"unregistered")]
        return [sorted(ways), right, counts]


def swaps() -> Any:
    """The way and whether it was native: swaps that are aligned, then ones that are not."""
    facts = []
    with offcore.Communicator(backend="sdma", machine="mi300x-8", ranks=2) as comm:
        for part in (64, 40, 64):
            data = comm.empty(2 * part)
            for rank in (0, 1):
                data[rank][:] = noise(2 * part, rank, part)
            result = comm.all_to_all(data, variant="swap").wait()
            halves = [noise(2 * part, rank, part).reshape(2, part) for rank in (0, 1)]
            for rank in (0, 1):
                expected = np.concatenate([halves[0][rank], halves[1][rank]])
                assert np.array_equal(data[rank], expected)
            facts.append([result.way, result.native])
    return facts


def many() -> Any:
    """A batch of more copies than one call may have, in how many calls, the largest of them."""
    arrays = run(session(), copies(20_000), 1 << 16)
    fake = ctypes.CDLL(os.environ["OFFCORE_LIBHIP"] + ".7")
    fake.fakehip_done.restype = ctypes.c_uint64
    return [right(arrays, 20_000), fake.fakehip_done(b"batches"), fake.fakehip_done(b"largest")]


def refused() -> Any:
    """A batch of which one copy is refused, and the next one."""
    on = session()
    return [failure(on, copies(500)), right(run(on, copies(500)), 500)]


def failed() -> Any:
    """A run whose engine stops, one on the same backend, and one on a backend of its own."""
    on = session()
    found = [failure(on, copies(500)), failure(on, copies(500))]
    del on  # its queues end; the runtime tells of them later
    return [*found, right(run(session(), copies(500)), 500)]


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
