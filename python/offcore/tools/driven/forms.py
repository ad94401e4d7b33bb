"""What lies between a kernel's word and its peer's: section `forms` of `offcore gpu bench`.

A kernel on each of two GPUs raises a word of its own GPU. A stream that waits for it copies 4 KiB
to the other GPU and raises the word that the other kernel looks at. A form lists what a stream does
in a round, from left to right; operations in brackets are one batch:

wait        until the kernel has raised its word
copy        4 KiB, to the peer
flag        the peer's word, by a write-value
copy8       the same by a copy, from a table of values
word, word8 the same by a copy of one word, which `word` has written
told, host  another word of the own GPU, or of the host

All is enqueued before the kernels start. Microseconds one way: half of a round trip, median.
"""

from __future__ import annotations

import ctypes
import re
import time
from typing import Any

import cupy  # type: ignore[import-not-found]
import numpy as np

from offcore.tools.driven.rows import LIMIT_S

ROUNDS = 60
NBYTES = 4096
GATE, ARRIVED, TOLD, WORD, TABLE = 0, 128, 256, 384, 4096  # places in a rank's words
WAIT, WRITE = 4, 5
FORMS = (
    "[wait] flag",
    "wait copy flag",
    "[wait] copy flag",
    "[wait] copy [flag]",
    "[wait] copy [flag told]",
    "[wait] copy [flag told told]",
    "[wait] copy [flag told host]",
    "[told told wait] copy [flag told]",
    "[wait] copy copy8",
    "[wait] copy copy8 [told]",
    "[wait] copy copy8 [told told]",
    "[wait] copy copy8 [told host]",
    "[told told wait] copy copy8",
    "[word wait] copy word8",
    "[word wait] copy word8 [told]",
    "[told told word wait] copy word8",
    "[wait word] copy word8 [told]",
)


class MemOp(ctypes.Structure):
    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("unused", ctypes.c_uint64 * 2),
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
        name = "cuStreamWaitValue64_v2" if op == WAIT else "cuStreamWriteValue64_v2"
        where = ctypes.c_void_p(stream), ctypes.c_uint64(address)
        self.call(name, *where, ctypes.c_uint64(value), ctypes.c_uint(0))

    def copy(self, stream: int, dst: int, src: int, nbytes: int) -> None:
        where = ctypes.c_uint64(dst), ctypes.c_uint64(src)
        self.call("cuMemcpyAsync", *where, ctypes.c_size_t(nbytes), ctypes.c_void_p(stream))


def park(to: Streams, form: str, stream: int, places: dict[str, int]) -> None:
    """All rounds of one rank."""
    own, arrived = places["own"], places["other"] + ARRIVED
    words = {"wait": own + GATE, "flag": arrived, "word": own + WORD, "host": places["host"]}
    words["told"] = own + TOLD
    for k in range(1, ROUNDS + 1):
        for call in re.findall(r"\[[^]]*\]|\S+", form):
            names = call.strip("[]").split()
            ops = [(WAIT if one == "wait" else WRITE, words.get(one, 0), k) for one in names]
            if call.startswith("["):
                to.batch(stream, ops)
            elif call == "copy":
                to.copy(stream, places["dst"], places["src"], NBYTES)
            elif call == "copy8":
                to.copy(stream, arrived, own + TABLE + 8 * k, 8)
            elif call == "word8":
                to.copy(stream, arrived, own + WORD, 8)
            else:
                to.one(stream, *ops[0])


def drain(queues: list[Any], form: str) -> None:
    """Until the streams have done what is parked there. After a fault they wait in vain."""
    deadline = time.monotonic() + LIMIT_S
    while not all(queue.done for queue in queues):
        if time.monotonic() > deadline:
            raise RuntimeError(f"form {form}: {LIMIT_S:g} s later its streams still wait")
        time.sleep(1e-3)


def chases(bench: Any) -> None:
    to = Streams()
    send, receive = bench.windows
    lines = 1 << 20  # of the send window: a rank's words
    words = [send.address(rank) + lines for rank in range(2)]
    told = bench.comm.host_array(8, "uint64")
    table = np.zeros(TABLE // 8 + 1024, "uint64")
    table[TABLE // 8 :] = np.arange(1024)
    queues = []
    for rank in range(2):
        with cupy.cuda.Device(rank):
            queues.append(cupy.cuda.Stream(non_blocking=True))
    for form in FORMS:
        for rank in range(2):
            send.write(table.view("uint8"), lines, rank=rank)
        for rank in range(2):
            places = {"own": words[rank], "other": words[1 - rank], "host": told.ctypes.data}
            places |= {"dst": receive.address(1 - rank), "src": send.address(rank)}
            with cupy.cuda.Device(rank):
                park(to, form, queues[rank].ptr, places)
        for rank in (1, 0):
            args = np.uint64(words[rank] + GATE), np.uint64(words[rank] + ARRIVED)
            where = bench.address(rank, "times"), bench.address(rank, "fault")
            bench.launch(rank, "chase", (*args, np.uint32(ROUNDS), np.uint32(rank == 0), *where))
        bench.end(f"form {form}")
        drain(queues, form)
        us = bench.median("times", ROUNDS, 10) / 2e3
        bench.add("form", form, NBYTES if "copy" in form.split() else 0, us, "us one way")
