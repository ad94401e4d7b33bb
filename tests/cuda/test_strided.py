"""A driver whose strided copies do not reach all GPUs: found when a window is made, and done
without. On the stand-in driver, told to be so."""

import pytest
from test_cuda import run, start

from stores import free_store

BAD = {"OFFCORE_FAKE_CUDA_STRIDED_RIGHT": "0"}
ALL = """
def checked(comm, ranks, native):
    out, inp = comm.window(ranks * 1000), comm.window(ranks * 1000)
    copies = done("strided")[0]
    for turn, variant in enumerate(("fan", "bcst", "pcpy", "b2b", "prelaunch_fan") * 2):
        for op in ("all_gather", "all_to_all"):
            if variant not in comm.variants(op):
                continue
            for rank in comm.local_ranks:
                data = np.repeat(np.arange(ranks) * 10 + rank + turn, 1000).astype(np.uint8)
                inp.write(data if op == "all_to_all" else data[:1000], 0, rank)
            comm.barrier()
            given = inp if op == "all_to_all" else inp.region(0, 1000)
            result = getattr(comm, op)(out, given, variant=variant).wait()
            assert result.native == native, (op, variant, result.native)
            for rank in comm.local_ranks:
                first = rank * 10 if op == "all_to_all" else 0
                wanted = [[first + sender + turn] for sender in range(ranks)]
                assert (look(out, rank).reshape(ranks, 1000) == wanted).all(), (op, variant)
            comm.barrier()
    assert (done("strided")[0] > copies) == native
"""


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("native", [True, False])
def test_rows_go_one_by_one_where_a_strided_copy_fails(ranks: int, native: bool) -> None:
    code = """
    ranks, native = int(sys.argv[1]), sys.argv[2] == "True"
    comm = opened(ranks)
    checked(comm, ranks, native)
    # What needs no such copy is what it is.
    assert comm.all_gather(comm.window(ranks * 8), variant="pcpy", protocol="promise").wait().native
    """
    env = {} if native else BAD
    assert run(code, str(ranks), str(native), prelude=ALL, **env) == ""


def test_each_rank_decides_for_itself() -> None:
    """Rows one by one and a strided copy are the same to the peers, so ranks may differ."""
    code = """
    comm = offcore.Communicator(backend="cuda", store=sys.argv[1], rank=int(sys.argv[2]),
                                world_size=3, timeout=20)
    checked(comm, 3, sys.argv[3] == "True")
    comm.barrier()
    """
    store = free_store()
    group = [
        start(code, store, str(rank), str(rank != 1), prelude=ALL, **(BAD if rank == 1 else {}))
        for rank in range(3)
    ]
    told = [process.communicate(timeout=60)[0] for process in group]
    assert [process.returncode for process in group] == [0, 0, 0], told


def test_a_window_is_zero_after_the_trial() -> None:
    code = """
    comm = opened(3)
    window = comm.window(64 << 10)
    assert not any(look(window, rank).any() for rank in range(3))
    """
    assert run(code) == ""
