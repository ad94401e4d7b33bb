"""What a libcuda does with memory that one part of a program allocates and another one shares."""

import ctypes
import subprocess
from ctypes import byref, c_int, c_uint64
from typing import Any

import cuda_driver as cu
from cuda_case import isolated, run_case, start_peer
from cuda_driver import MIB, Driver

PATTERN = bytes(range(251)) * 40


class Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 64),)


def retain(d: Driver, address: int) -> int:
    return d.get(c_uint64, "cuMemRetainAllocationHandle", address)


def range_of(d: Driver, address: int) -> tuple[int, int]:
    start, size = c_uint64(), c_uint64()
    d("cuMemGetAddressRange", byref(start), byref(size), address)
    return start.value, size.value


def attribute(d: Driver, number: int, address: int) -> int:
    return d.get(c_uint64, "cuPointerGetAttribute", number, address)


@isolated()
def test_what_is_mapped_can_be_retained(d: Driver) -> None:
    d.start()
    s = 2 * MIB
    one, two = d.create(s), d.create(2 * s)
    room = d.reserve(4 * s)
    d("cuMemMap", room, s, 0, one, 0)
    d("cuMemMap", room + s, 2 * s, 0, two, 0)
    assert d.set_access(room, 3 * s, [0]) == 0
    assert [range_of(d, room + at) for at in (5, s, 3 * s - 1)] == [
        (room, s),
        (room + s, 2 * s),
        (room + s, 2 * s),
    ]
    d("cuMemRelease", two)
    held = [retain(d, room), retain(d, room + 7), retain(d, room + 3 * s - 1)]
    assert held == [one, one, two]  # the same handle, also where its maker has let go of it
    d.put(room + s, PATTERN)
    d("cuMemUnmap", room + s, 2 * s)
    assert d.code("cuMemRetainAllocationHandle", byref(c_uint64()), room + s) != 0
    other = d.reserve(2 * s)
    d("cuMemMap", other, 2 * s, 0, two, 0)  # what is retained stays
    assert d.set_access(other, 2 * s, [0]) == 0
    assert d.read(other, len(PATTERN)) == PATTERN
    d("cuMemRelease", two)
    assert d.code("cuMemRelease", two) != 0
    fresh = d.create(2 * s)
    d("cuMemMap", room + s, 2 * s, 0, fresh, 0)
    assert retain(d, room + s) == fresh != two
    assert d.code("cuMemGetAddressRange", byref(c_uint64()), byref(c_uint64()), 4096) != 0


@isolated()
def test_only_what_cumemalloc_gave_has_a_handle_of_ipc(d: Driver) -> None:
    d.start()
    start = d.get(c_uint64, "cuMemAlloc", 3 * MIB)
    handle = Handle()
    assert d.code("cuIpcGetMemHandle", byref(handle), start) == 0
    assert range_of(d, start + MIB)[0] == start
    assert attribute(d, 10, start) == 1
    assert d.code("cuMemRetainAllocationHandle", byref(c_uint64()), start) == cu.INVALID_VALUE
    assert d.code("cuIpcGetMemHandle", byref(handle), d.memory()) == cu.INVALID_VALUE
    mapped = c_uint64()
    assert d.code("cuIpcOpenMemHandle", byref(mapped), handle, 1) != 0  # not in its own process
    known = {attribute(d, 7, start)}
    for _ in range(4):  # whatever lies there next has another number
        d("cuMemFree", start)
        start = d.get(c_uint64, "cuMemAlloc", 3 * MIB)
        known.add(attribute(d, 7, start))
    assert len(known) == 5
    others = []
    for name, last in (("cuMemAllocAsync", d.stream()), ("cuMemAllocManaged", 1)):
        place = c_uint64()
        d(name, byref(place), MIB, last)
        others.append(place.value)
    for address in others:
        assert d.code("cuMemRetainAllocationHandle", byref(c_uint64()), address) != 0
        assert d.code("cuIpcGetMemHandle", byref(handle), address) == cu.INVALID_VALUE
        assert attribute(d, 10, address) == 0
    assert [attribute(d, 8, address) for address in (start, *others)] == [0, 0, 1]


def open_by_ipc(d: Driver, name: str) -> None:
    """The other process."""
    d.start(1)
    handle = Handle.from_buffer_copy(bytes.fromhex(name))
    place, again = c_uint64(), c_uint64()
    assert d.code("cuIpcOpenMemHandle", byref(place), handle, 0) == cu.INVALID_VALUE
    d("cuIpcOpenMemHandle", byref(place), handle, 1)
    d("cuIpcOpenMemHandle", byref(again), handle, 1)
    assert again.value == place.value
    assert d.read(place.value, len(PATTERN)) == PATTERN
    d.put(place.value + MIB, PATTERN[1:])
    d("cuIpcCloseMemHandle", place.value)
    d.read(place.value, 8)  # opened twice
    assert d.code("cuMemFree", place.value) != 0
    d("cuIpcCloseMemHandle", place.value)
    assert d.code("cuIpcCloseMemHandle", place.value) == cu.INVALID_VALUE
    assert d.code("cuPointerGetAttribute", byref(c_int()), 2, place.value) != 0


def open_what_is_gone(d: Driver, name: str) -> None:
    d.start(1)
    handle = Handle.from_buffer_copy(bytes.fromhex(name))
    assert d.code("cuIpcOpenMemHandle", byref(c_uint64()), handle, 1) != 0


def end(peer: subprocess.Popen[str]) -> Any:
    return peer.communicate(timeout=30)[0].strip(), peer.returncode


@isolated()
def test_memory_by_ipc(d: Driver) -> None:
    d.start()
    start = d.get(c_uint64, "cuMemAlloc", 3 * MIB)
    d.put(start, PATTERN)
    handle = Handle()
    d("cuIpcGetMemHandle", byref(handle), start)
    name = bytes(handle).hex()
    assert end(start_peer(d, __file__, "open_by_ipc", name)) == ("passed", 0)
    assert d.read(start + MIB, len(PATTERN) - 1) == PATTERN[1:]
    d("cuMemFree", start)
    assert end(start_peer(d, __file__, "open_what_is_gone", name)) == ("passed", 0)


if __name__ == "__main__":
    run_case(globals())
