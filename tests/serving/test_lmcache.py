"""LMCache's adapter against the interface that LMCache gives it, in host memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lmcache_worlds import FORMATS, HostMemory, World

import offcore
from offcore.serving import engines, lmcache

Direction = Enum("Direction", ["H2D", "D2H"])
CPU = SimpleNamespace(type="cpu")
LAYERS, BLOCKS, TOKENS, PAGE = 3, 8, 2, 24  # bytes of a page: 2 tokens of 3 heads of 4 bytes
CHUNK = 4  # blocks of an object
OWN = "LMCache's own copies"


class CudaDeviceOps:
    def __init__(self) -> None:
        self._native_bound = False

    def ensure_native(self) -> None:
        if self._native_bound:
            return
        self._native_bound = True
        self.told: list[Any] = []
        for name in ("DirectCopyGroupSpec", "DirectCopyObject"):
            setattr(self, name, lambda *given, name=name: (name, *given))
        self.execute_direct_copy_transfer = lambda *given: self.told.append(given)


class CudaDeviceSpec:
    device_type = "cuda"
    ops_cls = CudaDeviceOps

    def is_available(self) -> bool:
        return True


@pytest.fixture
def version() -> str:
    return "0.5.6"


@pytest.fixture(autouse=True)
def _one_lmcache(monkeypatch: pytest.MonkeyPatch, version: str) -> Iterator[None]:
    parts: dict[str, dict[str, Any]] = {
        "lmcache": {},
        "lmcache._version": {"__version__": version},
        "lmcache.v1": {},
        "lmcache.v1.platform": {},
        "lmcache.v1.platform.devices": {},
        "lmcache.v1.platform.devices.cuda": {"CudaDeviceSpec": CudaDeviceSpec},
    }
    for name, members in parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(engines, "_said", set())
    monkeypatch.setenv("LMCACHE_DEVICE_BACKEND", "offcore")
    yield
    vars(lmcache).pop(lmcache.NAME, None)


def ops() -> Any:
    made = lmcache.OffcoreDeviceSpec().ops_cls()
    made.ensure_native()
    made.ensure_native()  # as often as it is called
    return made


class Cache:
    """A cache of a format, and a view of it as (planes, layers, blocks, bytes)."""

    def __init__(self, form: str, planes: int = 2) -> None:
        order, outside = FORMATS[form]
        if form == "NL_X_NB_BS_NH_TWO_HS":
            planes = 1
        sizes = (planes, LAYERS, BLOCKS)
        shape = [0, 0, 0]
        for axis, at in enumerate(order):
            shape[at] = sizes[axis]
        rng = np.random.default_rng(1)
        self.whole = rng.integers(0, 256, (*shape, PAGE), np.uint8)
        self.view = self.whole.transpose(*order, 3)
        heads = self.whole.reshape(-1, *shape[outside:], PAGE)
        pointers = [int(head.ctypes.data) for head in heads]
        self.shape = SimpleNamespace(
            kv_size=planes,
            nl=LAYERS,
            nb=BLOCKS,
            bs=TOKENS,
            nh=3,
            hs=1,
            element_size=PAGE // TOKENS // 3,
            block_stride_elems=0,
        )
        self.made = (pointers, self.shape, SimpleNamespace(name=form), CHUNK * TOKENS)
        self.bytes = planes * LAYERS * CHUNK * PAGE

    def group(self, own: Any, blocks: list[int], offset: int = 0) -> Any:
        return own.DirectCopyGroupSpec(*self.made, offset, blocks)


@pytest.mark.parametrize("form", FORMATS)
def test_random_objects(form: str) -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        each, page = int(rng.integers(1, 5)), 8 * int(rng.integers(1, 9))
        world = World(rng, HostMemory(), form, each=each, piece=1 << 12, page=page)
        for _ in range(8):
            assert world.turn() == 0, seed


def test_engines_name_one_block_where_they_have_none() -> None:
    """A load's last one counts."""
    rng = np.random.default_rng(1)
    world = World(rng, HostMemory(), "NL_X_TWO_NB_BS_NH_HS", each=4, piece=1 << 12, page=64)
    item = lmcache.Object(world.base, 0, world.nbytes, 0, [0])
    group = world.group(np.array([0, 3, 0, 0]))
    world.cache[:, :, [3, 0]] = world.row(0)[:, :, [1, 3]]
    for load in (True, False):
        assert lmcache.copy(load, ("host", None), None, 1 << 12, [group], [item]) == ""
        assert (world.memory.read(world.image.shape) == world.image).all()
    assert (world.row(0) == world.cache[:, :, [0, 3, 0, 0]]).all()


def test_memory_that_is_registered_twice_over() -> None:
    """Objects of two buffers, whose pieces meet at other addresses."""
    rng = np.random.default_rng(2)
    worlds = [
        World(rng, HostMemory(), "NL_X_TWO_NB_BS_NH_HS", each=2, piece=1 << 12, page=64)
        for _ in range(2)
    ]
    one, other = worlds
    items = [
        lmcache.Object(one.base, 0, one.nbytes, 0, [0]),
        lmcache.Object(other.base + 96, 64, one.nbytes, 1, [0]),
    ]
    blocks = np.array([3, 0, 2, 1])
    assert lmcache.copy(False, ("host", None), None, 1 << 12, [one.group(blocks)], items) == ""
    for item, named in zip(items, (blocks[:2], blocks[2:]), strict=True):
        shape = one.row(0).shape
        begin = item.host_ptr + one.head
        memory = (ctypes.c_uint8 * int(np.prod(shape))).from_address(begin)
        assert (np.frombuffer(memory, np.uint8).reshape(shape) == one.cache[:, :, named]).all()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("most", [1 << 20, 64])  # no copy goes over a multiple of these bytes
def test_objects_come_back_elsewhere(form: str, most: int) -> None:
    own, cache = ops(), Cache(form)
    blocks, targets = [3, 0, 6, 1, 5, 2, 7, 4], [6, 7, 2, 0, 1, 3, 4, 5]
    head = 40  # of an object, which another group has
    memory = np.zeros((2, head + cache.bytes), np.uint8)
    objects = [
        own.DirectCopyObject(
            int(row.ctypes.data), 1000 + index * row.nbytes, row.nbytes, index, [0]
        )
        for index, row in enumerate(memory)
    ]
    group = cache.group(own, blocks, head)
    own.execute_direct_copy_transfer(Direction.D2H, CPU, most, [group], objects)
    planes = cache.shape.kv_size
    for row, chunk in zip(memory, (blocks[:CHUNK], blocks[CHUNK:]), strict=True):
        assert not row[:head].any()
        assert (row[head:].reshape(planes, LAYERS, CHUNK, PAGE) == cache.view[:, :, chunk]).all()
    wanted = cache.view.copy()
    wanted[:, :, targets[2:4] + targets[4:]] = cache.view[:, :, blocks[2:]]
    skipped = [objects[0]._replace(skip_prefix_n_blocks=[2]), objects[1]]
    group = cache.group(own, targets, head)
    own.execute_direct_copy_transfer(Direction.H2D, CPU, most, [group], skipped)
    assert (cache.view == wanted).all()
    assert own.told == []


def test_what_lmcache_names_wrongly() -> None:
    own, cache = ops(), Cache("NL_X_TWO_NB_BS_NH_HS")
    memory = np.zeros(cache.bytes, np.uint8)
    place = int(memory.ctypes.data)
    good = own.DirectCopyObject(place, 0, cache.bytes, 0, [0])
    for blocks, item in (
        ([0, 1, 2, BLOCKS], good),
        ([0, 1, 2, -1], good),
        ([0, 1, 2], good),
        ([0, 1, 2, 3], good._replace(chunk_idx=1)),
        ([0, 1, 2, 3], good._replace(nbytes=cache.bytes - 1)),
    ):
        group = cache.group(own, blocks)
        with pytest.raises(offcore.Error) as refused:
            own.execute_direct_copy_transfer(Direction.D2H, CPU, 64, [group], [item])
        assert refused.value.code == "invalid"
    assert not memory.any()


def test_the_log_says_that_it_copies(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "offcore.serving"):
        ops()
    assert caplog.messages == ["LMCache: offcore copies KV blocks"]


def test_what_stays_lmcaches(caplog: pytest.LogCaptureFixture) -> None:
    own, cache = ops(), Cache("NL_X_TWO_NB_BS_NH_HS")
    cache.made[2].name = "NL_X_NB_BSV_BSS"
    item = own.DirectCopyObject(0, 0, cache.bytes, 0, [0])
    for _ in range(2):
        group = cache.group(own, [0, 1, 2, 3])
        own.execute_direct_copy_transfer(Direction.D2H, CPU, 64, [group], [item])
    assert [call[0] for call in own.told] == [Direction.D2H] * 2
    (group,), (item,) = own.told[0][3:]
    assert (group[0], item[0]) == ("DirectCopyGroupSpec", "DirectCopyObject")
    assert caplog.text.count("LMCache keeps its own copies") == 1


@pytest.mark.parametrize("version", ["0.6.0"])
def test_another_version(caplog: pytest.LogCaptureFixture) -> None:
    assert type(ops()) is CudaDeviceOps
    assert "offcore supports LMCache 0.5.6, not 0.6.0" in caplog.text


def test_nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = lmcache.OffcoreDeviceSpec()
    assert (spec.backend_name, spec.device_type, spec.is_available()) == ("offcore", "cuda", True)
    monkeypatch.delenv("LMCACHE_DEVICE_BACKEND")
    assert not spec.is_available()
    with pytest.raises(AttributeError):
        _ = lmcache.nothing
