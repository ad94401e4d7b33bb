"""Window memory for a framework's allocator: the arena, and the functions that it calls."""

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import offcore
from offcore import _core

ALIGN = 512


@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.booleans(), st.integers(0, 6 * ALIGN)), max_size=60),
)
def test_arena_gives_aligned_parts_that_never_overlap(blocks: int, steps: list[tuple[bool, int]]):
    arena = _core.Arena(blocks * ALIGN + 7, ALIGN)
    parts: dict[int, int] = {}
    owner = np.zeros(blocks, bool)  # the oracle: which blocks are taken
    for take, number in steps:
        if take:
            wanted = max(1, -(-number // ALIGN))
            free = [at for at in range(blocks - wanted + 1) if not owner[at : at + wanted].any()]
            offset = arena.take(number)
            assert offset == (free[0] * ALIGN if free else None)
            if offset is not None:
                parts[offset] = wanted
                owner[offset // ALIGN : offset // ALIGN + wanted] = True
        elif parts:
            offset = sorted(parts)[number % len(parts)]
            wanted = parts.pop(offset)
            assert arena.give(offset)
            assert not arena.give(offset)
            owner[offset // ALIGN : offset // ALIGN + wanted] = False
        assert arena.taken_bytes == int(owner.sum()) * ALIGN


def door_functions(door: int):
    library = ctypes.CDLL(str(_core.__file__))
    take, give = library[f"offcore_pool_take_{door}"], library[f"offcore_pool_give_{door}"]
    take.restype, take.argtypes = ctypes.c_void_p, (ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    give.restype = None
    give.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    return take, give


def test_pool_gives_window_memory_that_peers_write_directly():
    with offcore.Communicator(backend="host", ranks=2) as comm:
        window = comm.window(1 << 20)
        doors = [_core.open_pool(window._core, rank) for rank in comm.local_ranks]
        outs = []
        for door in doors:
            take, _ = door_functions(door)
            assert take(3000, 0, None) is not None
            address = take(256, 0, None)
            outs.append(np.ctypeslib.as_array((ctypes.c_uint8 * 256).from_address(address)))
        inputs = [np.full(128, rank + 1, np.uint8) for rank in range(2)]
        result = comm.all_gather(outs, inputs).wait()
        assert not result.staged
        for out in outs:
            assert (out[:128] == 1).all()
            assert (out[128:] == 2).all()
        for door in doors:
            assert _core.pool_taken_bytes(door) == 3072 + 512
            _core.close_pool(door)
            take, give = door_functions(door)
            assert take(1, 0, None) is None
            give(window.address(doors.index(door)), 0, 0, None)
            give(window.address(doors.index(door)) + 3072, 0, 0, None)
            assert _core.pool_taken_bytes(door) == 0


def test_full_pool_gives_nothing_and_doors_come_back():
    with offcore.Communicator(backend="host", ranks=1) as comm:
        window = comm.window(4096)
        door = _core.open_pool(window._core, 0)
        take, give = door_functions(door)
        whole = take(4096, 0, None)
        assert whole == window.address(0)
        assert take(1, 0, None) is None
        give(whole, 4096, 0, None)
        assert take(1, 0, None) == whole
        give(whole, 1, 0, None)
        _core.close_pool(door)
        doors = [_core.open_pool(window._core, 0) for _ in range(8)]
        assert sorted(doors) == list(range(8))
        with pytest.raises(offcore.Error, match="8 memory pools") as caught:
            _core.open_pool(window._core, 0)
        assert caught.value.code == "unsupported"
        for each in doors:
            _core.close_pool(each)


@pytest.mark.parametrize("backend", ["host", "sim"])
def test_only_cuda_registers_memory_of_others(backend: str):
    with offcore.Communicator(backend=backend, ranks=2) as comm:
        own = [np.zeros(64, np.uint8) for _ in range(2)]
        with pytest.raises(offcore.Error, match=r"cuda.*empty\(\)") as caught:
            comm.register(own)
        assert caught.value.code == "unsupported"
        assert not comm.all_gather(comm.empty(64)).wait().registered
