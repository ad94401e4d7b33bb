"""Reductions in CUDA graphs, on the stand-in driver: every replay is right, and leaves the words as
the next one, or another graph, needs them."""

import textwrap
from pathlib import Path

import pytest
from test_cuda import run

HERE = Path(__file__).parent
PATHS = [str(HERE), str(HERE.parent), str(HERE.parent / "fakes")]

CODE = f"""
sys.path[:0] = {PATHS!r}
from graphs import *
from reductions import numbers, reduced
""" + textwrap.dedent("""
    op, ranks = sys.argv[1], int(sys.argv[2])
    with opened(ranks) as (comm, gpus):
        for count in (0, 5, 1003, 400_000):
            whole = count * ranks if op == "reduce_scatter" else count
            size = max(4 * whole, 1)
            window = comm.window(2 * size)
            for place in ("window", "array"):
                arrays = [comm.host_array(count, "float32") for _ in range(ranks)]
                out = window.region(0, 4 * count) if place == "window" else arrays
                extra = {"root": ranks - 1} if op == "reduce" else {}
                with gpus.graph(comm.given) as graph:
                    handle = getattr(comm, op)(
                        out, window.region(size, 4 * whole), dtype="float32", **extra
                    )
                result = handle.wait()
                assert (result.mode, result.protocol) == ("capture", "barrier"), result
                for turn in range(4):
                    inputs = [numbers(whole, "float32", 10 * turn + r) for r in range(ranks)]
                    for rank, array in enumerate(inputs):
                        window.write(array.view(np.uint8), size, rank)
                    graph.replay()
                    assert gpus.settle(comm.given), (op, count, place, turn)
                    wanted = reduced(inputs, "sum", "float32")
                    for rank in range(ranks):
                        got = arrays[rank]
                        if place == "window":
                            got = np.empty(count, np.float32)
                            window.read(got.view(np.uint8), 0, rank)
                        if op == "reduce_scatter":
                            part = wanted[rank * count : (rank + 1) * count]
                            assert np.array_equal(got, part), (count, place, turn)
                        elif op == "all_reduce" or rank == ranks - 1:
                            assert np.array_equal(got, wanted), (count, place, turn)
                graph.destroy()
""")


@pytest.mark.parametrize("ranks", ["1", "2", "3"])
@pytest.mark.parametrize("op", ["reduce_scatter", "all_reduce", "reduce"])
def test_replays(op: str, ranks: str) -> None:
    assert run(CODE, op, ranks) == ""
