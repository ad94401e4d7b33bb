"""Batches of strided copies, as the driver of CUDA 13 takes them."""

import ctypes
from ctypes import addressof, byref, c_int, c_size_t, c_uint, c_uint64

import cuda_driver as cu
from cuda_case import isolated, run_case
from cuda_driver import Driver

PATTERN = bytes(range(251)) * 64


class Operand(ctypes.Structure):
    """A side: a pointer, how far apart rows lie, and how many of these a slice is high."""

    _fields_ = (
        ("type", c_int),
        ("address", c_uint64),
        ("pitch", c_size_t),
        ("height", c_size_t),
        ("hint", c_int * 2),
    )


class Copy(ctypes.Structure):
    """One copy of the batch."""

    _fields_ = (
        ("src", Operand),
        ("dst", Operand),
        ("extent", c_size_t * 3),
        ("order", c_int),
        ("flags", c_uint),
    )


def copy_of(dst: tuple[int, ...], src: tuple[int, ...], *extent: int, order: int = 1) -> Copy:
    copy = Copy(order=order)
    for side, given in ((copy.dst, dst), (copy.src, src)):
        side.type, side.address, side.pitch, side.height = 1, *given
    copy.extent[:] = extent
    return copy


def push(d: Driver, stream: int, *copies: Copy, flags: int = 0) -> int:
    given = (Copy * len(copies))(*copies)
    return d.code("cuMemcpy3DBatchAsync", len(copies), given, flags, stream)


def settle(d: Driver, stream: int) -> None:
    d("cuStreamSynchronize", stream)


@isolated()
def test_rows_and_slices(d: Driver) -> None:
    d.start()
    assert ctypes.sizeof(Copy) == 112
    a, b, stream = d.memory(), d.memory(), d.stream()
    d.put(a, PATTERN)
    rows = copy_of((b, 100, 3), (a, 50, 3), 40, 3, 1)
    slices = copy_of((b + 4096, 64, 4), (a + 700, 30, 5), 20, 2, 3)
    dense = copy_of((b + 8192, 0, 0), (a + 2000, 60, 2), 10, 2, 2)
    assert push(d, stream, rows, slices, dense) == 0
    settle(d, stream)
    for row in range(3):
        assert d.read(b + 100 * row, 40) == PATTERN[50 * row : 50 * row + 40]
    for z in range(3):
        for y in range(2):
            start = 700 + z * 150 + y * 30
            assert d.read(b + 4096 + z * 256 + y * 64, 20) == PATTERN[start : start + 20]
    wanted = b"".join(PATTERN[at : at + 10] for at in (2000, 2060, 2120, 2180))
    assert d.read(b + 8192, 40) == wanted
    assert d.read(b + 40, 60) == bytes(60), "nothing between the rows"


@isolated()
def test_what_is_refused(d: Driver) -> None:
    d.start()
    a, b, stream = d.memory(), d.memory(), d.stream()
    d.put(a, PATTERN)
    good = ((b, 100, 3), (a, 50, 3), 40, 3, 1)
    assert push(d, 0, copy_of(*good)) == cu.INVALID_VALUE  # the default stream
    assert push(d, stream, copy_of(*good), flags=1) == cu.INVALID_VALUE
    assert push(d, stream, copy_of(*good, order=0)) == cu.INVALID_VALUE
    pageable = ctypes.create_string_buffer(4096)
    for dst, src, *extent in (
        ((b, 39, 3), (a, 50, 3), 40, 3, 1),  # rows closer than they are long
        ((b, 100, 3), (a, 1 << 31, 3), 40, 3, 1),
        ((b, 100, 2), (a, 50, 3), 40, 3, 1),  # a slice lower than its rows
        ((b, 100, 3), (a, 50, 3), 0, 3, 1),
        ((b, 100, 3), (a, 50, 3), 40, 3, 0),
        ((a + 60, 100, 3), (a, 50, 3), 40, 3, 1),  # onto what is read
        ((addressof(pageable), 100, 3), (a, 50, 3), 40, 3, 1),
    ):
        assert push(d, stream, copy_of(dst, src, *extent)) == cu.INVALID_VALUE, (dst, src, extent)
    other = copy_of((b + 130, 100, 3), (a, 50, 3), 40, 3, 1)
    assert push(d, stream, copy_of(*good), other) == cu.INVALID_VALUE  # onto what is written
    array = copy_of(*good)
    array.src.type = 2
    assert push(d, stream, array) == 801
    graphs: list[int] = []
    with d.capture(stream, graphs):
        assert push(d, stream, copy_of(*good)) == 900
        d("cuMemsetD8Async", b, 0, 16, stream)
    assert d.read(b, 4096) == bytes(4096)
    assert push(d, stream, copy_of(*good)) == 0
    settle(d, stream)
    assert d.read(b, 40) == PATTERN[:40]


@isolated(only_fake=True)
def test_the_form_before_cuda_13(d: Driver) -> None:
    d.start()
    d.version = 12080
    a, b, stream = d.memory(), d.memory(), d.stream()
    d.put(a, PATTERN)
    failed = c_size_t()
    copies = (Copy * 1)(copy_of((b, 100, 3), (a, 50, 3), 40, 3, 1))
    assert d.code("cuMemcpy3DBatchAsync", 1, copies, byref(failed), 0, stream) == 0
    settle(d, stream)
    assert d.read(b + 100, 40) == PATTERN[50:90]


if __name__ == "__main__":
    run_case(globals())
