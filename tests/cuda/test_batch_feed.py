"""How programs of many copies are fed to the driver: in batches, as strided copies, one by one."""

import pytest
from test_cuda import run

BATCHES = """
import random
from offcore import _core

def planned(moves, machine="h200-2", room=1 << 20, **policy):
    buffers = [("device", "local", room), ("host", "host", room)]
    listed = _core.moves_listed(1, buffers, moves)
    return _core.plan_batch(listed, [], _core.BatchPolicy(**policy), offcore.machines.load(machine))

def checked(program, moves, room=1 << 20):
    session = _core.Session("cuda", offcore.machines.load("h200-2"), 1)
    rng = np.random.default_rng(1)
    memory = {name: rng.integers(0, 256, room, dtype=np.uint8) for name in ("device", "host")}
    wanted = {name: array.copy() for name, array in memory.items()}
    names = {1: "device", 2: "host"}
    for (dst, _, to), (src, _, at), nbytes in moves:
        wanted[names[dst]][to : to + nbytes] = memory[names[src]][at : at + nbytes]
    session.run(program, {name: [array] for name, array in memory.items()})
    for name, array in memory.items():
        assert np.array_equal(array, wanted[name]), name

def scattered(count, nbytes, seed=1, store=False):
    rng = random.Random(seed)
    spots = (1 << 20) // nbytes // 2
    ours, theirs = rng.sample(range(spots), count), rng.sample(range(spots), count)
    moves = [((1, 0, 2 * d * nbytes), (2, -1, 2 * s * nbytes), nbytes)
             for d, s in zip(ours, theirs)]
    return [(s, d, n) for d, s, n in moves] if store else moves
"""


@pytest.mark.parametrize("store", [False, True])
def test_many_copies_go_in_batches_of_32(store: bool) -> None:
    code = """
    moves = scattered(196, 256, store=eval(sys.argv[1]))
    checked(planned(moves).program, moves)
    assert calls("cuMemcpyBatchAsync") == 6, calls("cuMemcpyBatchAsync")
    plain = done("plain")[0]
    assert done("batched") == [6]
    assert 4 <= plain < 20  # what was left over is too few for a batch
    """
    assert run(code, str(store), prelude=BATCHES) == ""


@pytest.mark.parametrize(
    ("policy", "batches"), [({"sub_batch": 0}, 1), ({"sub_batch": 1}, 0), ({"sub_batch": 10}, 10)]
)
def test_the_policy_says_how_many(policy: dict[str, int], batches: int) -> None:
    code = """
    moves = scattered(100, 256)
    checked(planned(moves, **eval(sys.argv[1])).program, moves)
    print(calls("cuMemcpyBatchAsync"))
    """
    assert run(code, repr(policy), prelude=BATCHES) == f"{batches}\n"


def test_an_older_driver_has_no_batches() -> None:
    code = """
    moves = scattered(100, 256)
    checked(planned(moves).program, moves)
    assert calls("cuMemcpyBatchAsync") == 0
    assert calls("cuMemcpyAsync") >= 100
    """
    assert run(code, prelude=BATCHES, OFFCORE_FAKE_CUDA_DRIVER="12080") == ""


def test_blocks_of_many_layers_go_as_strided_copies() -> None:
    code = """
    layers, blocks, page = 28, 9, 64
    moves = [((1, 0, (layer * 32 + block) * page), (2, -1, (3 * block * layers + layer) * page),
              page) for layer in range(layers) for block in range(0, 2 * blocks, 2)]
    before = done("strided")[0]
    checked(planned(moves).program, moves)
    assert done("strided")[0] - before == blocks, done("strided")
    assert calls("cuMemcpyBatchAsync") == 0
    """
    assert run(code, prelude=BATCHES) == ""
