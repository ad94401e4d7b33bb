"""What lies between a kernel's word and its peer's, form by form: gpu_driven.py's section `forms`.

A kernel on each of two GPUs raises a word of its own GPU. A stream that waits for it copies 4 KiB
(`-`: nothing) to the other GPU and raises the word that the other kernel looks at, by these:

wait    `32`, `64`: one stream wait; `batch`: a batch of operations, with the words that tell of the
        copy before and the value of the next signal
flag    `write32`, `write64`: one write-value; `batch`: the first of three, in a batch; `copy4`,
        `copy8`: a copy from a table of values; `word8`: from one word, written ahead of the wait
store   `sys`, `gpu`: the scope of the fence before the kernel's word

All is enqueued before the kernels start. Microseconds one way: half of a round trip, median.
"""

from __future__ import annotations

import ctypes
import statistics
from typing import Any, NamedTuple

import cupy  # type: ignore[import-not-found]
import numpy as np

ROUNDS = 60
NBYTES = 4096
GATE, ARRIVED, TOLD, WORD, TABLE = 0, 128, 256, 384, 4096  # places in a rank's words
WAIT32, WRITE32, WAIT64, WRITE64 = 1, 2, 4, 5


class MemOp(ctypes.Structure):
    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("unused", ctypes.c_uint64 * 2),
    )


class Form(NamedTuple):
    wait: str
    flag: str
    data: bool = True
    store: str = "sys"

    @property
    def wide(self) -> bool:
        return self.wait != "32"


FORMS = (
    Form("32", "write32", data=False),
    Form("32", "write32"),
    Form("32", "write32", store="gpu"),
    Form("32", "copy4"),
    Form("64", "write64", data=False),
    Form("64", "write64"),
    Form("64", "write64", store="gpu"),
    Form("64", "batch"),
    Form("64", "copy8", data=False),
    Form("64", "copy8"),
    Form("64", "word8"),
    Form("batch", "batch"),
    Form("batch", "copy8"),
    Form("batch", "word8"),
    Form("batch", "word8", store="gpu"),
)


class Streams:
    """The driver's calls, by addresses."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self.cuda, name)(*args)
        if code != 0:
            raise RuntimeError(f"{name}: {code}")

    def batch(self, stream: int, ops: list[tuple[int, int, int]]) -> None:
        made = (MemOp * len(ops))(*(MemOp(op, address, value) for op, address, value in ops))
        self.call(
            "cuStreamBatchMemOp_v2", ctypes.c_void_p(stream), len(ops), made, ctypes.c_uint(0)
        )

    def one(self, stream: int, op: int, address: int, value: int) -> None:
        name = {
            WAIT32: "cuStreamWaitValue32_v2",
            WRITE32: "cuStreamWriteValue32_v2",
            WAIT64: "cuStreamWaitValue64_v2",
            WRITE64: "cuStreamWriteValue64_v2",
        }[op]
        width = ctypes.c_uint32 if op in (WAIT32, WRITE32) else ctypes.c_uint64
        where = ctypes.c_void_p(stream), ctypes.c_uint64(address)
        self.call(name, *where, width(value), ctypes.c_uint(0))

    def copy(self, stream: int, dst: int, src: int, nbytes: int) -> None:
        where = ctypes.c_uint64(dst), ctypes.c_uint64(src)
        self.call("cuMemcpyAsync", *where, ctypes.c_size_t(nbytes), ctypes.c_void_p(stream))


def park(to: Streams, form: Form, stream: int, own: int, other: int, data: tuple[int, int]) -> None:
    """All rounds of one rank. `own`, `other`: the words of both; `data`: destination, source."""
    wait, write = (WAIT64, WRITE64) if form.wide else (WAIT32, WRITE32)
    width = 8 if form.wide else 4
    told: list[tuple[int, int, int]] = []
    for k in range(1, ROUNDS + 1):
        ahead = [(write, own + WORD, k)] if form.flag == "word8" else []
        if form.wait == "batch":
            to.batch(stream, [*told, *ahead, (wait, own + GATE, k)])
        else:
            for op in [*told, *ahead, (wait, own + GATE, k)]:
                to.one(stream, *op)
        told = [(write, own + TOLD + 64 * i, k) for i in range(2)] if form.wait == "batch" else []
        if form.data:
            to.copy(stream, *data, NBYTES)
        flag = (write, other + ARRIVED, k)
        if form.flag == "batch":
            to.batch(stream, [flag, *((write, own + TOLD + 64 * i, k) for i in range(2))])
            told = []
        elif form.flag.startswith("write"):
            to.one(stream, *flag)
        else:
            src = own + WORD if form.flag == "word8" else own + TABLE + width * k
            to.copy(stream, other + ARRIVED, src, width)


def chases(bench: Any, windows: list[Any]) -> None:
    to = Streams()
    send, receive = windows
    lines = 1 << 20  # of the send window: a rank's words
    queues = []
    for rank in range(2):
        with cupy.cuda.Device(rank):
            queues.append(cupy.cuda.Stream(non_blocking=True))
    for form in FORMS:
        kind = "uint64" if form.wide else "uint32"
        table = np.zeros(TABLE + 8 * 1024, "uint8")
        table[TABLE:].view(kind)[:1024] = np.arange(1024)
        for rank in range(2):
            send.write(table, lines, rank=rank)
        words = [send.address(rank) + lines for rank in range(2)]
        for rank in range(2):
            with cupy.cuda.Device(rank):
                data = receive.address(1 - rank), send.address(rank)
                park(to, form, queues[rank].ptr, words[rank], words[1 - rank], data)
        for rank in (1, 0):
            args = (words[rank] + GATE, words[rank] + ARRIVED, form.wide, ROUNDS, rank == 0)
            kinds = (np.uint64, np.uint64, np.uint32, np.uint32, np.uint32)
            numbers = tuple(kind(arg) for kind, arg in zip(kinds, args, strict=True))
            where = bench.address(rank, "times"), bench.address(rank, "fault")
            bench.launch(rank, "chase", (*numbers, np.uint32(form.store == "sys"), *where))
        what = f"{form.wait} {form.flag} {form.store}"
        bench.end(f"form {what}")
        for rank in range(2):
            with cupy.cuda.Device(rank):
                queues[rank].synchronize()
        times = bench.results[0]["times"].get()[10:ROUNDS]
        us = statistics.median(times.tolist()) / 2e3
        bench.add("form", what, NBYTES * form.data, us, "us one way")
