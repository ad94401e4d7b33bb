"""Reductions that callers do without engines, on the stand-in driver: ranks are threads, so that a
kernel has all jobs of its rank's call, up to the 15 that one takes."""

import textwrap
from pathlib import Path

import pytest
from test_cuda import run

from stores import free_store

HERE = Path(__file__).parent
PATHS = [str(HERE.parent), str(HERE.parent / "conformance")]

CODE = f"""
sys.path[:0] = {PATHS!r}
import numpy as np
from concurrent.futures import ThreadPoolExecutor
from gpu import GpuCommunicator
from reductions import FLOATS, INTEGERS, numbers, reduced, stored
""" + textwrap.dedent("""
    store, machine, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3])

    def work(rank):
        given = {"backend": "cuda", "machine": machine, "store": store, "timeout": 30}
        with GpuCommunicator(rank=rank, world_size=ranks, **given) as comm:
            for turn, dtype in enumerate(INTEGERS + FLOATS):
                for count in (1, 4099, 70_001):
                    check(comm, rank, turn, dtype, count)

    def check(comm, rank, turn, dtype, count):
        op = ("sum", "avg", "premul_sum", "min", "max")[turn % 5]
        scale = {"scale": 2.0} if op == "premul_sum" else {}
        inputs = [numbers(count, dtype, 100 * turn + peer) for peer in range(ranks)]
        wanted = reduced(inputs, op, dtype, **scale)
        made = comm.empty if turn % 2 else comm.host_array
        for in_place in (False, True):
            inp = made(count + 5, stored(dtype))
            out = inp if in_place else made(count + 5, stored(dtype))
            out[:] = np.full(count + 5, 99, stored(dtype))
            inp[3 : 3 + count] = inputs[rank]
            ends = slice(3, 3 + count)
            given = None if in_place else inp[ends]
            result = comm.all_reduce(
                out[ends], given, op, dtype=dtype, variant="pipelined", **scale
            ).wait()
            assert result.variant == "pipelined"
            got = np.asarray(out)
            assert np.array_equal(got[ends], wanted), (rank, op, dtype, count, in_place)
            assert (got[:3] == 99).all() and (got[-2:] == 99).all(), (rank, dtype, count)

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(work, range(ranks)))
""")


@pytest.mark.parametrize(("machine", "ranks"), [("h200-4", 3), ("h200-4", 4), ("h200-8", 8)])
def test_every_dtype(machine: str, ranks: int) -> None:
    assert run(CODE, free_store(), machine, str(ranks), OFFCORE_FAKE_CUDA_DEVICES="8") == ""
