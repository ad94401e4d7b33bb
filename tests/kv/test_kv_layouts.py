"""Random layouts, block lists and ways of copying against plain numpy, on every backend."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_caches import ROOM, Cache, Places, Tensor, place

import offcore
from offcore import kv

EXAMPLES = {"host": 80, "sim": 60, "cuda": 30}


@st.composite
def caches(draw: st.DrawFn, blocks: int, even: bool = False) -> Cache:
    """even: pages have one size."""
    layers = draw(st.integers(1, 6))
    dtype = draw(st.sampled_from(("uint8", "uint16", "float32")))
    pages = st.sampled_from(((1,), (3,), (4, 5), (2, 1, 8)))
    page = draw(pages)
    kind = draw(st.sampled_from(("each", "apart", "pairs", "outermost", "deep", "contiguous")))
    if kind in ("outermost", "deep", "contiguous"):
        shape, block_axis, layer_axis = {
            "outermost": ((layers, blocks, *page), 1, 0),
            "deep": ((layers, 2, blocks, *page), 2, 0),
            "contiguous": ((blocks, layers, *page), 0, 1),
        }[kind]
        return Cache([(Tensor(64, shape, dtype, block_axis, layer_axis),)], alone=True)
    shapes = {
        "each": [(blocks, *page)],
        "apart": [(2, blocks, *page)],
        "pairs": [(blocks, *page), (blocks, *(page if even else draw(pages)))],
    }[kind]
    gap = draw(st.sampled_from((None, 0, 48)))  # the same after each tensor, or any
    at = 0
    places = []
    for _ in range(layers * len(shapes)):
        places.append(at)
        shape = shapes[len(places) % len(shapes) - 1] if len(shapes) > 1 else shapes[0]
        largest = max(int(np.prod(shape)) for shape in shapes) * np.dtype(dtype).itemsize
        at += (largest + 7) // 8 * 8 + (8 * draw(st.integers(0, 5)) if gap is None else gap)
    if draw(st.booleans()):
        places = draw(st.permutations(places))
    tensors = iter(places)
    axis = 1 if kind == "apart" else 0
    return Cache(
        [tuple(Tensor(next(tensors), s, dtype, axis) for s in shapes) for _ in range(layers)]
    )


@st.composite
def numbers(draw: st.DrawFn, count: int, among: int) -> list[int]:
    """Distinct numbers: scattered, with runs, or at steps."""
    if draw(st.booleans()):
        return draw(st.permutations(range(among)))[:count]
    step = draw(st.integers(1, max(1, among // max(1, count))))
    first = draw(st.integers(0, among - 1 - step * max(0, count - 1)))
    found = list(range(first, first + step * count, step))
    return found[::-1] if draw(st.integers(0, 3)) == 0 else found


class Checked:
    """A cache, its pool and transfer, beside what they must hold."""

    def __init__(
        self,
        places: Places,
        cache: Cache,
        slots: int,
        chunk: int,
        row_blocks: int = 1,
        **options: Any,
    ) -> None:
        self.places, self.cache = places, cache
        self.image = np.random.default_rng(5).integers(0, 256, ROOM, dtype=np.uint8)
        places.write(self.image)
        self.layout = layout = cache.layout(places, row_blocks)
        rows = -(-slots // row_blocks)
        self.pool = places.pool(layout.row_bytes, rows, chunk_bytes=chunk * layout.row_bytes)
        self.pool.wait_ready(10)
        assert self.pool.allocate(rows).tolist() == list(range(rows))
        self.rows = [bytes([slot]) * layout.block_bytes for slot in range(rows * row_blocks)]
        for slot in range(len(self.rows)):
            place(self.pool, layout, slot)[:] = slot
        self.policy = options.get("policy", "auto")
        self.transfer = kv.BlockTransfer(layout, self.pool, verify=True, **options)

    def run(self, load: bool, blocks: list[int], slots: list[int], by_layer: int) -> None:
        call = self.transfer.load if load else self.transfer.store
        result = call(blocks, slots, by_layer=by_layer).wait(20)
        for block, slot in zip(blocks, slots, strict=True):
            if load:
                self.cache.load(self.image, block, self.rows[slot])
            else:
                self.rows[slot] = self.cache.store(self.image, block)
        assert (result.asked, result.blocks, result.layers) == (
            len(blocks),
            len(blocks),
            self.layout.layers,
        )
        assert result.bytes == len(blocks) * self.layout.block_bytes
        assert result.commands <= result.pages or result.path == "packed"
        assert (result.path == "none") == (not blocks)
        if self.policy == "pack":  # auto packs where it pays
            assert result.path == ("packed" if blocks else "none")
        assert (0 < result.sms <= 4) == (result.sm_ms > 0) == (result.path == "packed")
        self.check()

    def check(self) -> None:
        assert np.array_equal(self.places.read(), self.image)
        for slot, row in enumerate(self.rows):
            assert place(self.pool, self.layout, slot).tobytes() == row, slot

    def close(self) -> None:
        self.transfer.close()
        self.pool.close()


@pytest.mark.parametrize("row_blocks", [1, 2, 3, 16])
def test_any_layout_and_any_blocks(places: Places, row_blocks: int) -> None:
    @settings(
        max_examples=min(settings().max_examples, EXAMPLES[places.backend]),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def check_one(data: st.DataObject) -> None:
        most = 12 if row_blocks == 1 else 40
        blocks = data.draw(st.integers(1, most), "blocks")
        slots = data.draw(st.integers(blocks, most + 4), "slots")
        limit = st.sampled_from((None, 1, 8))
        pack = places.backend == "cuda" and data.draw(st.booleans(), "pack")
        plain = (None, None)
        if not pack:
            plain = (data.draw(limit, "plain load"), data.draw(limit, "plain store"))
        sms = data.draw(st.sampled_from((1, 2, 4)), "sms")
        checked = Checked(
            places,
            data.draw(caches(blocks, even=row_blocks > 1), "cache"),
            slots,
            data.draw(st.sampled_from((1, 3, 16)), "rows of a chunk"),
            row_blocks,
            ahead_bytes=data.draw(st.sampled_from((1, 400, 1 << 20)), "ahead_bytes"),
            ahead_commands=data.draw(st.sampled_from((1, 256)), "ahead_commands"),
            plain_from=plain,
            **({"policy": "pack", "pack_sms": sms, "pack_bytes": 8 << 10} if pack else {}),
        )
        for turn in range(data.draw(st.integers(1, 3), "turns")):
            count = data.draw(st.integers(0, blocks), "count")
            checked.run(
                load=data.draw(st.booleans(), f"load {turn}"),
                blocks=data.draw(numbers(count, blocks), "named blocks"),
                slots=data.draw(numbers(count, slots), "named slots"),
                by_layer=data.draw(st.integers(0, 3), "by_layer"),
            )
        checked.close()

    check_one()


SHAPES = [
    # shape, block_axis, layer_axis, copies of one block
    ((5, 9, 16), 1, 0, [(5, 16)]),
    ((5, 2, 9, 16), 2, 0, [(10, 16)]),
    ((9, 5, 16), 0, 1, [(1, 80)]),
    ((9, 80), 0, None, [(1, 80)]),
    ((2, 9, 80), 1, None, [(2, 80)]),
    ((9, 4, 2, 5), 0, 1, [(1, 40)]),
]


@pytest.mark.parametrize(("shape", "block_axis", "layer_axis", "copies"), SHAPES)
def test_a_block_takes_the_fewest_copies(
    shape: tuple[int, ...], block_axis: int, layer_axis: int | None, copies: list[tuple[int, int]]
) -> None:
    layout = kv.Layout(np.zeros(shape, np.uint8), block_axis=block_axis, layer_axis=layer_axis)
    assert layout.copies() == copies
    assert layout.blocks == shape[block_axis]
    assert layout.layers == (1 if layer_axis is None else shape[layer_axis])
    assert layout.block_bytes == sum(rows * bytes_ for rows, bytes_ in copies)


def test_tensors_at_equal_steps_fold_and_others_do_not() -> None:
    memory = np.zeros(10_000, np.uint8)
    even = [memory[at : at + 90].reshape(9, 10) for at in range(0, 1000, 100)]
    assert kv.Layout(even).copies() == [(10, 10)]
    pairs = list(zip(even[::2], even[1::2], strict=True))
    assert kv.Layout(pairs).copies() == [(10, 10)]
    mixed = [(tensor, memory[5000 + 50 * i :][:45].reshape(9, 5)) for i, tensor in enumerate(even)]
    assert kv.Layout(mixed).copies() == [(10, 10), (10, 5)]
    assert kv.Layout([even[0], even[1], even[3], even[4]]).copies() == [(2, 10), (2, 10)]
    down = kv.Layout(even[:3][::-1]).copies()
    assert down == [(1, 10)] * 3, "no pitch is negative"
    # Inner axes in any order are one page.
    turned = np.zeros((9, 3, 4, 5), np.uint8).transpose(0, 2, 1, 3)
    assert kv.Layout(turned).copies() == [(1, 60)]


@pytest.mark.needs("torch")
def test_torch_tensors_of_any_strides() -> None:
    import torch

    shape, blocks = (3, 2, 10, 4, 8), [7, 0, 3]
    tensors = [torch.randn(shape).bfloat16() for _ in range(2)]
    # As engines hand them out: views, permuted within a block.
    views = [tensor.transpose(3, 4)[:, :, 1:9] for tensor in tensors]
    layout = kv.Layout(views, block_axis=2)
    assert layout.copies() == [(6, 64), (6, 64)]
    pool = kv.HostPool(layout.block_bytes, 3, backend="host")
    with pool, kv.BlockTransfer(layout, pool) as transfer:
        slots = pool.allocate(3, timeout=10)
        transfer.store(torch.tensor(blocks), slots).wait()
        for slot, block in zip(slots, blocks, strict=True):
            wanted = torch.stack([tensor[:, :, block + 1] for tensor in tensors])
            assert pool.row(slot).tobytes() == wanted.view(torch.uint8).numpy().tobytes()
        with pytest.raises(offcore.Error) as raised:
            kv.Layout(torch.empty((2, 3), device="meta"))
        assert "lies on meta" in str(raised.value)


def commands(places: Places, cache: Cache, blocks: list[int], **options: Any) -> int:
    layout = cache.layout(places)
    with places.pool(layout.block_bytes, 16) as pool, kv.BlockTransfer(layout, pool) as transfer:
        slots = pool.allocate(len(blocks), timeout=10)
        return transfer.store(blocks, slots, **options).wait().commands


def test_a_job_takes_the_fewest_commands(places: Places) -> None:
    scattered, run, steps = [7, 1, 4, 0, 9], list(range(2, 10)), list(range(0, 10, 2))
    outermost = Cache([(Tensor(0, (4, 10, 16), "uint8", 1, 0),)], alone=True)
    assert commands(places, outermost, scattered) == 5, "one a block"
    assert commands(places, outermost, run) == 4, "one a layer"
    assert commands(places, outermost, run[:3]) == 3
    assert commands(places, outermost, steps) == 4
    assert commands(places, outermost, scattered, by_layer=True) == 20
    pairs = 20 if places.backend == "cuda" else 10  # a copy of two rows is slower than two of one
    assert commands(places, outermost, scattered, by_layer=2) == pairs
    assert commands(places, outermost, run, by_layer=True) == 4
    contiguous = Cache([(Tensor(0, (10, 4, 16), "uint8", 0, 1),)], alone=True)
    assert commands(places, contiguous, scattered) == 5
    assert commands(places, contiguous, run) == 1
    assert commands(places, contiguous, steps) == 1
    apart = Cache([(Tensor(i * 400, (2, 10, 16), "uint8", 1),) for i in range(4)])
    assert commands(places, apart, scattered) == 10, "K and V: two steps do not fit in one"
    assert commands(places, apart, run) == 8


@pytest.mark.parametrize(
    ("caches", "options", "says"),
    [
        ([], {}, "the same number of blocks"),
        ([np.zeros((3, 4)), np.zeros((5, 4))], {}, "[3, 5]"),
        (np.zeros((3, 4)), {"block_axis": 2}, "block_axis is 2"),
        (np.zeros((3, 4)), {"block_axis": 1, "layer_axis": -1}, "are both 1"),
        (np.zeros((3, 0)), {}, "empty"),
        (np.broadcast_to(np.zeros(4), (3, 4)).copy()[::-1], {}, "flipped"),
        (np.lib.stride_tricks.as_strided(np.zeros(4), (3, 4), (0, 8)), {}, "expanded"),
        (np.broadcast_to(np.zeros(4), (3, 4)), {}, "read-only"),
        ("tensor", {}, "is a str"),
        ((np.zeros((2, 3, 4)), np.zeros((5, 3, 4))), {"block_axis": 1, "layer_axis": 0}, "[2, 5]"),
        ([np.zeros((3, 4))] * 2, {}, "layers 0 and 1 of the cache share memory"),
    ],
)
def test_caches_that_are_none(caches: Any, options: dict[str, int], says: str) -> None:
    with pytest.raises(offcore.Error) as raised:
        kv.Layout(caches, **options)
    assert raised.value.code == "invalid"
    assert says in str(raised.value)


def test_groups_in_one_allocation(places: Places) -> None:
    """Layers that take turns share no memory; where bytes are shared, jobs are in order."""
    apart = [Tensor(2000 * k, (blocks, 64), "uint8", 0) for k, blocks in enumerate((10, 5) * 2)]
    first, second = Cache([(apart[0],), (apart[2],)]), Cache([(apart[1],), (apart[3],)])
    layouts = [first.layout(places), second.layout(places)]
    image = np.random.default_rng(1).integers(0, 256, ROOM, dtype=np.uint8)
    places.write(image)
    with places.pool(128, 16) as pool, kv.BlockTransfer(layouts, [pool] * 2) as transfer:
        slots = pool.allocate(16, timeout=10)
        jobs = [transfer.store([9, 4], slots[:2]), transfer.store([4, 0], slots[2:4], group=1)]
        for job in jobs:
            job.wait(10)
        wanted = [first.store(image, 9), first.store(image, 4)]
        wanted += [second.store(image, 4), second.store(image, 0)]
        assert [pool.row(slot).tobytes() for slot in slots[:4]] == wanted


def test_groups_that_share_layers(places: Places) -> None:
    """The first shares nothing with the last, but both do with the one between."""
    tensors = [Tensor(640 * k, (10, 64), "uint8", 0) for k in range(3)]
    groups = [Cache([(t,) for t in tensors[at : at + 2]]) for at in (0, 1)]
    groups.append(Cache([(tensors[2],), (Tensor(4000, (10, 64), "uint8", 0),)]))
    layouts = [group.layout(places) for group in groups]
    with places.pool(128, 8) as pool, kv.BlockTransfer(layouts, [pool] * 3) as transfer:
        slots = pool.allocate(8, timeout=10)
        for turn in range(20):
            for slot in slots:
                pool.row(slot)[:] = 8 * turn + slot
            jobs = [transfer.load([3], [k], group=k, priority=k) for k in range(3)]
            jobs.append(transfer.store([3], [7], group=1, priority=9))
            for job in jobs:
                job.wait(10)
            row = pool.row(7)
            assert (row[:64] == 8 * turn + 1).all()
            assert (row[64:] == 8 * turn + 2).all()
        moved = Cache([(Tensor(64, (9, 64), "uint8", 0),), (Tensor(8000, (9, 64), "uint8", 0),)])
        for other in (moved, Cache([(Tensor(0, (5, 128), "uint8", 0),)])):
            with pytest.raises(offcore.Error) as raised:
                kv.BlockTransfer([layouts[0], other.layout(places)], [pool] * 2)
            assert "but not block by block" in str(raised.value)
