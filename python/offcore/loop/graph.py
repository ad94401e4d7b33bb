"""Graphs of operators on slices of buffers, in the order of a plain program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from offcore.errors import error

C_TYPES = {"float32": "float", "float64": "double", "int32": "int", "uint32": "unsigned"}
EVERYTHING = "*"


@dataclass(frozen=True)
class Function:
    """Element-wise: a C expression of `a`, `b`, ... for kernels, and the same on numpy arrays."""

    cuda: str
    host: Callable[..., Any]


ADD = Function("a + b", np.add)
MUL = Function("a * b", np.multiply)
RELU = Function("a <= 0 ? 0 : a", lambda a: np.where(a <= 0, 0, a))  # of NaN it is NaN, as torch's
COPY = Function("a", lambda a: a)


@dataclass(frozen=True)
class Buffer:
    """A registered buffer. number: of the registration, from byte `offset` on; None: private."""

    name: str
    dtype: str
    count: int
    number: int | None = None
    offset: int = 0

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    def __getitem__(self, part: slice) -> Slice:
        first, last, step = part.indices(self.count)
        if step != 1 or last <= first:
            raise error("invalid", f"loop: {self.name}[{part}] has no elements, or a step")
        return Slice(self, first, last - first)


@dataclass(frozen=True)
class Slice:
    """Elements [first, first + count) of a buffer."""

    buffer: Buffer
    first: int
    count: int

    @property
    def place(self) -> tuple[str | int, int, int]:
        """Memory, first byte, last byte + 1."""
        at, size = self.buffer, self.buffer.itemsize
        begin = at.offset + self.first * size
        return at.name if at.number is None else at.number, begin, begin + self.count * size


@dataclass(frozen=True)
class Operator:
    """kind: map, reduce, gemm, put, signal, wait or stamp; sizes: what the kind needs."""

    kind: str
    out: Slice | None = None
    inputs: tuple[Slice, ...] = ()
    function: Function | None = None
    sizes: tuple[int, ...] = ()
    peer: int = -1
    buffer: int = -1
    everything: bool = False


class Graph:
    """The program of one rank, which the loop repeats. Operators run as if in call order;
    those that share no bytes may run concurrently.

    chunk: bytes; as in `comm.requests`.
    """

    def __init__(self, rank: int, ranks: int, *, chunk: int = 256) -> None:
        self.rank, self.ranks, self.chunk = rank, ranks, chunk
        self.buffers: dict[str, Buffer] = {}
        self.operators: list[Operator] = []

    def buffer(
        self,
        name: str,
        count: int,
        dtype: DTypeLike = "float32",
        *,
        number: int | None = None,
        offset: int = 0,
    ) -> Slice:
        """Declares `count` elements of registered buffer `number`, or of private, zeroed memory.
        dtype: float32, float64, int32 or uint32; others are `unsupported`."""
        kind = np.dtype(dtype).name
        if kind not in C_TYPES:
            raise error("unsupported", f"loop: dtype {kind}; there are {', '.join(C_TYPES)}")
        if name in self.buffers or not name.isidentifier() or count < 1:
            raise error(
                "invalid", f"loop: buffer {name!r} of {count}: give a new name and 1 or more"
            )
        if offset < 0 or offset % np.dtype(kind).itemsize:
            raise error(
                "invalid", f"loop: buffer {name}: offset {offset} must be whole elements from 0"
            )
        made = Buffer(name, kind, count, number, offset)
        self.buffers[name] = made
        return made[:]

    def map(self, function: Function, out: Slice, *inputs: Slice) -> None:
        """`out[i] = function(inputs[0][i], ...)`, with up to 8 inputs. In place is allowed at equal
        offsets only."""
        if len(inputs) > 8:
            raise error("invalid", f"loop: map of {len(inputs)} inputs: 8 at most have names")
        for one in inputs:
            _same(one.count == out.count and one.buffer.dtype == out.buffer.dtype, "map", out)
            _same(one.place == out.place or not _overlap(one, out), "map", out)
        self.operators.append(Operator("map", out, inputs, function))

    def copy(self, out: Slice, inp: Slice) -> None:
        """`out[i] = inp[i]`."""
        self.map(COPY, out, inp)

    def reduce(self, out: Slice, inp: Slice) -> None:
        """out[i] = the sum over j, in order, of inp[j * out.count + i]."""
        _same(inp.count % out.count == 0 and inp.buffer.dtype == out.buffer.dtype, "reduce", out)
        _same(not _overlap(inp, out), "reduce", out)
        self.operators.append(Operator("reduce", out, (inp,), None, (inp.count // out.count,)))

    def gemm(self, out: Slice, a: Slice, b: Slice, m: int, n: int, k: int) -> None:
        """out[m, n] = a[m, k] @ b[k, n], row-major, in tiles of 64 x 64."""
        counts = (out.count, a.count, b.count) == (m * n, m * k, k * n)
        same = out.buffer.dtype == a.buffer.dtype == b.buffer.dtype
        _same(counts and same and not _overlap(a, out) and not _overlap(b, out), "gemm", out)
        self.operators.append(Operator("gemm", out, (a, b), None, (m, n, k)))

    def put(self, peer: int, dst: Slice, src: Slice) -> None:
        """Copies `src` to the peer's `dst` on an engine, and signals. Both must be registered."""
        self._peer(peer)
        _same(dst.count == src.count and dst.buffer.dtype == src.buffer.dtype, "put", dst)
        if src.buffer.number is None or dst.buffer.number is None:
            raise error("invalid", "loop: put: both slices lie in registered buffers")
        self.operators.append(Operator("put", dst, (src,), peer=peer, buffer=dst.buffer.number))

    def wait(self, peer: int, dst: Slice) -> None:
        """Waits for the peer's put to `dst`: the k-th wait matches its k-th put here."""
        self._peer(peer)
        if dst.buffer.number is None:
            raise error("invalid", "loop: wait: the slice lies in a registered buffer")
        self.operators.append(Operator("wait", dst, peer=peer, buffer=dst.buffer.number))

    def barrier(self, number: int = 0) -> None:
        """A barrier of all ranks: all earlier operators end on every rank before later ones begin.
        number: of a registered buffer, whose signals it uses."""
        peers = [peer for peer in range(self.ranks) if peer != self.rank]
        for kind in ("signal", "wait"):
            for peer in peers:
                one = Operator(kind, peer=peer, buffer=number, everything=True)
                self.operators.append(one)

    def stamp(self) -> None:
        """Records the time at which all earlier operators have ended: `Loop.stamps`."""
        self.operators.append(Operator("stamp", everything=True))

    def _peer(self, peer: int) -> None:
        if not 0 <= peer < self.ranks or peer == self.rank:
            raise error("invalid", f"loop: rank {self.rank} of {self.ranks} has no peer {peer}")


def _overlap(a: Slice, b: Slice) -> bool:
    (memory, begin, end), (other, first, last) = a.place, b.place
    return memory == other and begin < last and first < end


def _same(fits: bool, what: str, out: Slice) -> None:
    if not fits:
        raise error(
            "invalid", f"loop: {what} into {out.buffer.name}: sizes or dtypes differ, or overlap"
        )


def conflict(a: Operator, b: Operator) -> bool:
    """Whether one writes what the other reads or writes. A put writes the peer's memory only."""
    if a.everything or b.everything:
        return True

    def writes(one: Operator) -> tuple[Slice, ...]:
        return () if one.out is None or one.kind == "put" else (one.out,)

    def touches(one: Operator) -> tuple[Slice, ...]:
        return (*one.inputs, *writes(one))

    pairs = [(w, t) for w in writes(a) for t in touches(b)]
    pairs += [(w, t) for w in writes(b) for t in touches(a)]
    return any(_overlap(*pair) for pair in pairs)
