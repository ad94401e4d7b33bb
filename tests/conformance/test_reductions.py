"""Programs that reduce, on every backend that has cores: each operation, dtype and form."""

from typing import Any

import numpy as np
import pytest
from targets import Target

import offcore
from offcore import _core, machines
from oracles import noise
from reductions import FLOATS, INTEGERS, OPS, Array, numbers, reduced, stored


def bytes_of(array: Array) -> Array:
    return np.ascontiguousarray(array).view(np.uint8)


def parts_of(counts: list[int], dtype: str) -> list[int]:
    return [count * stored(dtype).itemsize for count in counts]


@pytest.fixture
def reducing(target: Target) -> Target:
    if target.backend == "sdma":
        pytest.skip("sdma has engines only")
    return target


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
@pytest.mark.parametrize("op", OPS)
def test_one_command(reducing: Target, op: str, dtype: str) -> None:
    """dst alone, dst as a source, sources at odd places; 3 sources of 1,031 elements."""
    count, item = 1031, stored(dtype).itemsize
    scale = 3.0 if dtype in INTEGERS else 0.3
    scaled = f" scale={scale:g}" if op == "premul_sum" else ""
    size = count * item
    text = (
        "program reduce machine=m ranks=2 variant=v mode=eager protocol=promise native=yes "
        f"flags=0 span=0\nreduction {op} {dtype}{scaled}\n"
        f"buffer out local {size + item}\nbuffer slot window {3 * size}\n"
        f"buffer in local {2 * size}\n"
        "queue 0.caller\n"
        f"  reduce out[0]+{item} <- slot[0]+{size // 2 // item * item} bytes={size} rows=3 "
        f"src_step={size // 3 // item * item} own=1 in[0]+{size}\n"
        f"  reduce in[0]+0 <- slot[0]+0 bytes={size} rows=2 src_step=0 own=0 in[0]+0\n"
    )
    program = _core.Program.parse(text)
    assert str(program) == text
    slot = numbers(3 * count, dtype, 1)
    own = numbers(2 * count, dtype, 2)
    out = np.zeros(count + 1, stored(dtype))
    arrays = {
        "out": [bytes_of(out), noise(size + item, 0, 0)],
        "slot": [bytes_of(slot), noise(3 * size, 0, 1)],
        "in": [bytes_of(own.copy()), noise(2 * size, 0, 2)],
    }
    reducing.session(2).run(program, arrays)
    first, step = size // 2 // item, size // 3 // item
    wanted = reduced(
        [slot[first : first + count], own[count:], slot[first + step : first + step + count]],
        op,
        dtype,
        scale,
    )
    assert np.array_equal(arrays["out"][0].view(stored(dtype))[1:], wanted)
    wanted = reduced([own[:count], slot[:count]], op, dtype, scale)
    got = arrays["in"][0].view(stored(dtype))
    assert np.array_equal(got[:count], wanted)
    assert np.array_equal(got[count:], own[count:])


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("op", ["reduce_scatter", "all_reduce", "reduce"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("elements", [0, 1, 1000, 600_001])
def test_programs(reducing: Target, op: str, ranks: int, elements: int, staged: bool) -> None:
    session = reducing.session(ranks)
    machine = machines.load(reducing.name(ranks))
    form = _core.Protocol(entry=False, staged=staged)
    if op == "reduce_scatter":
        parts = parts_of([elements // (rank + 1) for rank in range(ranks)], "float32")
    else:
        parts = _core.equal_parts(4 * elements, ranks)
    variants = ["pipelined", "one_shot", "auto"] if op == "all_reduce" else ["auto"]
    for variant in variants:
        for in_place in [False, True] if op == "all_reduce" else [False]:
            program = _core.plan_reduction(
                op,
                parts,
                "sum",
                "float32",
                variant,
                machine,
                form,
                root=ranks - 1,
                in_place=in_place,
            )
            total = sum(parts) // 4
            inputs = [numbers(total, "float32", rank) for rank in range(ranks)]
            wanted = reduced(inputs, "sum", "float32")
            sizes = {name: nbytes for name, _, nbytes in program.buffers}
            arrays = {
                name: [noise(sizes[name], 1, rank) for rank in range(ranks)]
                for name in sizes
                if name != "slot"
            }
            for rank, array in enumerate(inputs):
                arrays["out" if in_place else "in"][rank][:] = bytes_of(array)
            session.run(program, arrays)
            begin = 0
            for rank, part in enumerate(parts):
                out = arrays["out"][rank].view(np.float32)
                if op == "reduce_scatter":
                    assert np.array_equal(out[: part // 4], wanted[begin : begin + part // 4])
                elif op == "all_reduce" or rank == ranks - 1:
                    assert np.array_equal(out, wanted)
                begin += part // 4


def test_engines_do_not_reduce(target: Target) -> None:
    if target.backend != "sdma":
        pytest.skip("backends with cores do")
    machine = machines.load(target.name(2))
    form = _core.Protocol(entry=False, staged=True)
    parts = _core.equal_parts(1 << 20, 2)
    program = _core.plan_reduction("all_reduce", parts, "sum", "float32", "auto", machine, form)
    with pytest.raises(_core.Error, match="use backend host or cuda") as caught:
        target.session(2).run(program, {})
    assert caught.value.code == "unsupported"


class Operands:
    """Arrays of every rank, in a window or outside, at an odd element, between guards."""

    def __init__(self, comm: offcore.Communicator, place: str, count: int, dtype: str) -> None:
        kind = stored(dtype)
        self.count = count
        if place == "window":
            made = comm.empty(count + 6, kind)
            self.whole = made if isinstance(made, list) else [made]
        else:
            self.whole = [comm.host_array(count + 6, kind) for _ in comm.local_ranks]
        for whole in self.whole:
            whole[:] = np.full(count + 6, 99, kind)

    @property
    def body(self) -> list[Any]:
        return [whole[3 : 3 + self.count] for whole in self.whole]

    def fill(self, arrays: list[Array]) -> None:
        for body, array in zip(self.body, arrays, strict=True):
            body[: len(array)] = array

    def assert_hold(self, rank: int, wanted: Array, what: object) -> None:
        whole = np.asarray(self.whole[rank])
        assert np.array_equal(whole[3 : 3 + len(wanted)], wanted), (what, rank)
        assert np.all(whole[:3] == 99), (what, rank)
        assert np.all(whole[3 + self.count :] == 99), (what, rank)


def run_one(comm: offcore.Communicator, rng: np.random.Generator, place: str) -> None:
    ranks = comm.ranks
    op = str(rng.choice(OPS))
    dtype = str(rng.choice(INTEGERS + FLOATS))
    name = str(rng.choice(["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_v"]))
    count = int(rng.choice([0, 1, 17, 4099, 70_001]))
    counts = [count] * ranks
    if name == "reduce_scatter_v":
        counts = [int(n) for n in rng.integers(0, count + 1, ranks)]
    whole = sum(counts) if name.startswith("reduce_scatter") else count
    scale = {"scale": 2.0 if dtype in INTEGERS else 0.7} if op == "premul_sum" else {}
    inputs = [numbers(whole, dtype, int(rng.integers(1 << 30))) for _ in range(ranks)]
    wanted = reduced(inputs, op, dtype, **scale)
    root = int(rng.integers(ranks))
    in_place = name == "all_reduce" and bool(rng.integers(2))
    inp = Operands(comm, place, whole, dtype)
    out = inp if in_place else Operands(comm, place, max(counts), dtype)
    inp.fill(inputs)
    what = (name, op, dtype, counts, place, in_place)
    outputs: list[Any] = [body[:n] for body, n in zip(out.body, counts, strict=True)]
    arguments: list[Any] = [outputs, None if in_place else inp.body]
    if name == "reduce_scatter_v":
        arguments.append(counts)
    rooted = {"root": root} if name == "reduce" else {}
    call = getattr(comm, name)(*arguments, op, dtype=dtype, **scale, **rooted)
    result = call.wait()
    assert result.op == name.removesuffix("_v")
    begin = 0
    for rank, n in enumerate(counts):
        if name.startswith("reduce_scatter"):
            out.assert_hold(rank, wanted[begin : begin + n], what)
            begin += n
        elif name == "all_reduce" or rank == root:
            out.assert_hold(rank, wanted, what)
        if not in_place:
            inp.assert_hold(rank, inputs[rank], what)
    if comm.backend == "cuda" and count > 0 and whole > 0:
        assert 0 < result.sms <= 12


@pytest.mark.parametrize("place", ["window", "array"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_operations(reducing: Target, ranks: int, place: str) -> None:
    """All operations, dtypes and forms, in one communicator, whose slots and words they share."""
    rng = np.random.default_rng(ranks)
    with reducing.communicator(ranks) as comm:
        for _ in range(25):
            run_one(comm, rng, place)
        assert sum(comm._core.kept) >= 1


def test_parts_of_the_input_as_outputs(reducing: Target) -> None:
    with reducing.communicator(2) as comm:
        inp = Operands(comm, "window", 2000, "float32")
        inputs = [numbers(2000, "float32", rank) for rank in range(2)]
        inp.fill(inputs)
        comm.reduce_scatter([inp.body[0][:1000], inp.body[1][1000:]], inp.body).wait()
        wanted = reduced(inputs, "sum", "float32")
        inp.assert_hold(0, np.concatenate([wanted[:1000], inputs[0][1000:]]), 0)
        inp.assert_hold(1, np.concatenate([inputs[1][:1000], wanted[1000:]]), 1)
        inp.fill(inputs)
        comm.reduce([inp.body[0], None], inp.body, root=0).wait()
        inp.assert_hold(0, wanted, "reduce onto the input")


def test_many_chunks(reducing: Target) -> None:
    """More chunks than a slot has, and slots that take turns."""
    if reducing.backend == "cuda" or reducing.backend == "toy":
        pytest.skip("takes too long on these stand-ins: only GPUs run it on cuda (gpu_reduce.py)")
    if reducing.name(2) in ("mi300x-8", "h200-8"):
        pytest.skip("two ranks run as on h200-4 there")
    with reducing.communicator(2) as comm:
        inp = Operands(comm, "array", 10 << 20, "float32")
        out = Operands(comm, "array", 10 << 20, "float32")
        for seed in range(3):
            inputs = [numbers(10 << 20, "float32", 2 * seed + rank) for rank in range(2)]
            inp.fill(inputs)
            comm.all_reduce(out.body, inp.body, dtype="float32").wait()
            for rank in range(2):
                out.assert_hold(rank, reduced(inputs, "sum", "float32"), seed)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ({"op": "median"}, "invalid", "known are sum, avg"),
        ({"op": "sum", "scale": 2.0}, "invalid", "scale is for premul_sum only"),
        ({"op": 3}, "invalid", "op is 3; pass its name"),
        ({"op": "premul_sum", "scale": float("nan")}, "invalid", "not finite"),
        ({"op": "premul_sum", "scale": 1.5, "dtype": "int32"}, "invalid", "arrays' float32"),
        ({"dtype": "float16"}, "invalid", "dtype is float16, the arrays' float32"),
        ({"protocol": "credits"}, "unsupported", "no protocol credits"),
        ({"variant": "bcst"}, "unsupported", "pipelined and one_shot"),
    ],
)
def test_refusals(target: Target, arguments: dict[str, Any], code: str, text: str) -> None:
    with target.communicator(2) as comm:
        arrays = [comm.host_array(64, "float32") for _ in range(2)]
        with pytest.raises(offcore.Error, match=text) as caught:
            comm.all_reduce(arrays, **arguments)
        assert caught.value.code == code
        with pytest.raises(offcore.Error, match="known are int8") as caught:
            comm.all_reduce([comm.host_array(64, "complex64") for _ in range(2)])
        assert caught.value.code == "invalid"
