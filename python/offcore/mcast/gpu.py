"""offcore.mcast for arrays on a GPU: staged through pinned host memory, piece by piece.

    from offcore.mcast import gpu
    with gpu.Communicator(group, device=0) as comm:
        comm.all_gather(out, inp).wait()    # torch tensors on cuda:0

Copy engines copy a piece to pinned memory, multicast sends it to the other hosts, and copy engines
copy it to their GPUs; neighbouring pieces are pipelined. See docs/mcast.md.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from offcore import _core, batch, defaults, kv, mcast
from offcore.comm.reductions import named, typed
from offcore.errors import Error, error
from offcore.operands import OperandError, checked, counts_in_bytes, memory_of, same_dtype

__all__ = ["Communicator", "Handle"]

_BUFFERS = 4  # pieces: on the way from the GPU, two between hosts, on the way to the GPU
_GRACE_S = 2.0  # what copies get to end in, once their call has failed
_held: list[Any] = []  # memory of copies that have not: a GPU may still reach it
Entries = list[tuple[int, int, int]]  # to, from, bytes
# A piece's copies to pinned memory, its operation between hosts, its copies to the GPU.
Piece = tuple[Entries, Callable[[], mcast.Handle], Entries]
Cut = Callable[[Any, int], Piece]  # of a pinned buffer, and where the piece begins


class Handle:
    """An operation in progress. It proceeds whether or not `wait` is called."""

    def __init__(
        self, op: str, timeout: float, after: Any, places: range, cut: Cut, keep: Any
    ) -> None:
        self.after = after
        self.places = places
        self._op = op
        self._timeout = timeout
        self._kept: tuple[Cut, Any] | None = (cut, keep)
        self._ended = threading.Event()
        self._failure: Error | None = None
        self._results: list[mcast.Result] = []

    def done(self) -> bool:
        """Returns whether the operation has ended. Only `wait` reports errors."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> mcast.Result:
        """Waits until the output is complete for every stream. The result is the sum over pieces.

        timeout: seconds; None: the communicator's.
        Raises `Error`: timeout (the operation continues and can be waited for again), and as
        offcore.mcast.Handle.
        """
        seconds = self._timeout if timeout is None else timeout
        if not self._ended.wait(seconds):
            raise error("timeout", f"{self._op} has not ended within {seconds:g} s; wait again")
        if self._failure is not None:
            raise self._failure
        return _sum(self._op, self._results)

    def run(self, lane: _Lane) -> None:
        """In the lane's thread."""
        try:
            assert self._kept is not None
            self._results = lane.move(self._kept[0], self.places, self.after)
        except Exception as failure:
            if not isinstance(failure, Error):
                failure = error("driver", f"{self._op}: {failure!r}")
            self._failure = lane.failure = failure
            if not lane.settled:
                _held.append(self._kept)
        self._kept = None
        self._ended.set()


class _Lane:
    """A thread that makes the calls of a sequence, in their order, and its pinned memory. After a
    call that has failed ranks are not in step: it closes the communicator between the hosts."""

    def __init__(self, net: mcast.Communicator, device: int, nbytes: int, timeout: float) -> None:
        self.failure: Error | None = None
        self.settled = True  # no copy is under way
        self._net = net
        self._timeout = timeout
        self._pool = kv.HostPool(nbytes, _BUFFERS, backend="cuda", device=device)
        slots = self._pool.allocate(_BUFFERS, timeout=timeout)
        self._rows = [self._pool.row(int(slot)) for slot in slots]
        self._device = device
        self._streams: list[Any] = [None, None]  # torch's, from the GPU and to it
        self.calls: queue.SimpleQueue[Handle | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while (call := self.calls.get()) is not None:
            call.run(self)
            del call  # and what it holds, until the next comes
        if not self.settled:
            _held.append(self._pool)
            return
        self._rows = []
        with contextlib.suppress(Error):
            self._pool.close()

    def move(self, cut: Cut, places: range, after: Any) -> list[mcast.Result]:
        """Each step of a piece runs beside the other steps of its neighbours."""
        if after is not None:
            self._streams = [
                one or _cuda().Stream(self._device, priority=-1) for one in self._streams
            ]
            for stream in self._streams:
                stream.wait_event(after)
        pieces = [cut(self._rows[n % _BUFFERS], at) for n, at in enumerate(places)]
        leaves: list[batch.BatchHandle | None] = []
        crosses: list[mcast.Handle] = []
        enters: list[batch.BatchHandle | None] = []
        results: list[mcast.Result] = []
        try:
            for turn in range(len(pieces) + 2):
                if turn < len(pieces):
                    _settle(enters[turn - _BUFFERS : turn - _BUFFERS + 1])
                    leaves.append(self._copy(pieces[turn][0], 0))
                if 1 <= turn <= len(pieces):
                    _settle(leaves[turn - 1 : turn])
                    crosses.append(pieces[turn - 1][1]())
                if turn >= 2:
                    results.append(crosses[turn - 2].wait())
                    enters.append(self._copy(pieces[turn - 2][2], 1))
            _settle(enters)
        except Exception:
            self._net.close()  # before the buffers are anybody else's
            self.settled = self.settled and _ended([*leaves, *enters])
            raise
        return results

    def _copy(self, entries: Entries, direction: int) -> batch.BatchHandle | None:
        whole = [entry for entry in entries if entry[2]]
        if not whole:
            return None
        to, what, sizes = zip(*whole, strict=True)
        return batch.batch_copy(
            to,
            what,
            sizes,
            stream=self._streams[direction],
            backend="cuda",
            timeout=self._timeout,
        )

    def close(self) -> None:
        """The thread gives the memory back: later, where a copy is late."""
        self.calls.put(None)
        self._thread.join(_GRACE_S)


class Communicator:
    """offcore.mcast.Communicator for arrays on a GPU: torch tensors, or objects with CUDA's array
    interface. Collective: all ranks pass the same options.

    device: the GPU.
    piece_bytes: bytes of all ranks' blocks together that are staged at a time. Each of the two
    sequences allocates four times as much pinned memory at its first call.

    Other options: offcore.mcast.Communicator's. A call is ordered after the work in torch's current
    stream; without torch it is unordered. Raises `Error`: as offcore.mcast.Communicator, and
    unavailable without a driver.
    """

    def __init__(
        self,
        meeting: Any = None,
        *,
        device: int = 0,
        piece_bytes: int = 8 << 20,
        timeout: float | None = None,
        **options: Any,
    ) -> None:
        self._device = device
        self._timeout = defaults.seconds(timeout)
        self._net = mcast.Communicator(meeting, timeout=timeout, **options)
        self._width = checked("piece_bytes", piece_bytes) // self.ranks // 256 * 256
        if not self._width:
            self._net.close()
            raise error("invalid", f"piece_bytes is {piece_bytes}; a rank needs at least 256")
        self._lock = threading.Lock()  # of what follows
        self._lanes: dict[str, _Lane] | None = {}  # None: closed

    @property
    def rank(self) -> int:
        """This rank."""
        return self._net.rank

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self._net.ranks

    @property
    def counters(self) -> dict[str, int]:
        """As of offcore.mcast.Communicator."""
        return self._net.counters

    def broadcast(self, array: Any, root: int = 0) -> Handle:
        """Copies the root's array to all ranks."""
        root = checked("root", root, self.ranks - 1)
        start, size, _ = self._place("broadcast", array, self.rank != root)

        def cut(row: Any, at: int) -> Piece:
            part = row[: size - at]
            here, there = part.ctypes.data, start + at
            leave, enter = [(here, there, part.size)], [(there, here, part.size)]
            roots = self.rank == root
            cross = functools.partial(self._net.broadcast, part, root)
            return (leave if roots else []), cross, ([] if roots else enter)

        return self._submit("broadcast", size, self._width * self.ranks, cut, array)

    def all_gather(self, out: Any, inp: Any = None) -> Handle:
        """Concatenates every rank's `inp`, in rank order, in every rank's `out`. None: this rank's
        part is already in `out`."""
        blocks = [self._place("all_gather", out, True)[1] // self.ranks] * self.ranks
        return self._gather("all_gather", out, inp, blocks)

    def all_gather_v(self, out: Any, inp: Any, counts: Sequence[int]) -> Handle:
        """all_gather with `counts[r]` elements from rank r."""
        dtype = self._place("all_gather_v", out, True)[2]
        return self._gather("all_gather_v", out, inp, counts_in_bytes("all_gather", counts, dtype))

    def _gather(self, op: str, out: Any, inp: Any, blocks: list[int]) -> Handle:
        start, size, kind = self._place(op, out, True)
        own = start + sum(blocks[: self.rank])
        source, block = own, blocks[self.rank]
        if inp is not None:
            source, block, given_kind = self._place(op, inp, False)
            _check_apart(op, (start, size, kind), (source, block, given_kind), source == own)
        if len(blocks) != self.ranks or sum(blocks) != size or block != blocks[self.rank]:
            raise error("invalid", f"{op}: out has {size} bytes, inp {block}, of parts of {blocks}")

        def cut(row: Any, at: int) -> Piece:
            parts = [max(0, min(self._width, one - at)) for one in blocks]
            heres = [sum(parts[:rank]) for rank in range(self.ranks)]
            mine = row[heres[self.rank] :][: parts[self.rank]]
            leave = [(mine.ctypes.data, source + at, mine.size)]
            if source != own:
                leave.append((own + at, source + at, mine.size))
            enter = [
                (start + sum(blocks[:rank]) + at, row.ctypes.data + heres[rank], parts[rank])
                for rank in range(self.ranks)
                if rank != self.rank
            ]
            whole = row[: sum(parts)]
            return leave, functools.partial(self._net.all_gather_v, whole, mine, parts), enter

        return self._submit(op, max(blocks), self._width, cut, (out, inp))

    def reduce_scatter(
        self, out: Any, inp: Any, op: str = "sum", *, scale: float = 1.0, dtype: Any = None
    ) -> Handle:
        """Reduces part r of every rank's `inp` into rank r's `out`; arguments and numerics are
        offcore.mcast.Communicator's."""
        start, size, of_out = self._place("reduce_scatter", out, True)
        source, given, of_inp = self._place("reduce_scatter", inp, False)
        if given != size * self.ranks:
            raise error("invalid", f"reduce_scatter: out has {size} bytes, inp {given}")
        own = start == source + self.rank * size
        _check_apart("reduce_scatter", (start, size, of_out), (source, given, of_inp), own)
        reduction = typed("reduce_scatter", named("reduce_scatter", op, dtype, scale), of_out)
        _core.check_reduction(reduction)

        def cut(row: Any, at: int) -> Piece:
            part = min(self._width, size - at)
            bits = row[: part * self.ranks].view(f"u{of_out.itemsize}")
            mine = bits.reshape(self.ranks, -1)[self.rank]
            leave = [
                (row.ctypes.data + rank * part, source + rank * size + at, part)
                for rank in range(self.ranks)
            ]
            reduce = functools.partial(self._net.reduce_scatter, mine, bits, op, scale=scale)
            return (
                leave,
                functools.partial(reduce, dtype=reduction[1]),
                [(start + at, mine.ctypes.data, part)],
            )

        keep = (out, inp)
        return self._submit("reduce_scatter", size, self._width, cut, keep, "reductions")

    def barrier(self) -> Handle:
        """Completes when all ranks have called it."""
        return self._submit("barrier", 0, 1, lambda *_: ([], self._net.barrier, []), None)

    def _place(self, op: str, array: Any, writable: bool) -> tuple[int, int, Any]:
        """Address, bytes and dtype."""
        side = "out" if writable else "inp"
        try:
            (start, size), dtype = memory_of(array, writable, self._device)
        except OperandError as refusal:
            raise error("invalid", f"{op}: {side}{refusal}") from None
        if not getattr(array, "is_cuda", hasattr(array, "__cuda_array_interface__")):
            raise error("invalid", f"{op}: {side} lies in host memory: use mcast.Communicator")
        return start, size, dtype

    def _submit(
        self, op: str, size: int, width: int, cut: Cut, keep: Any, sequence: str = "gathers"
    ) -> Handle:
        _ = self._net.counters  # raises in a child of this process
        after = _event(op, self._device)
        with self._lock:
            if self._lanes is None:
                raise error("cancelled", f"{op}: the communicator was closed")
            for lane in self._lanes.values():
                if lane.failure is not None:
                    raise error(lane.failure.code, f"{op}: the group is dead since {lane.failure}")
            if sequence not in self._lanes:
                nbytes = self._width * self.ranks
                lane = _Lane(self._net, self._device, nbytes, self._timeout)
                weakref.finalize(self, lane.calls.put, None)
                self._lanes[sequence] = lane
            places = range(0, max(size, 1), width)
            handle = Handle(op, self._timeout + 1.0, after, places, cut, keep)
            self._lanes[sequence].calls.put(handle)
        return handle

    def close(self) -> None:
        """Unfinished operations fail as cancelled."""
        self._net.close()
        with self._lock:
            lanes, self._lanes = self._lanes, None
        for lane in (lanes or {}).values():
            lane.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _settle(copies: Iterable[batch.BatchHandle | None]) -> None:
    for one in copies:
        if one is not None:
            one.wait()


def _ended(copies: Iterable[batch.BatchHandle | None]) -> bool:
    """Whether all have, well or not, after a while."""
    end = time.monotonic() + _GRACE_S
    for one in copies:
        with contextlib.suppress(Error):
            if one is not None:
                one.wait(max(0.0, end - time.monotonic()))
    return all([one is None or one.done() for one in copies])


def _sum(op: str, results: Sequence[mcast.Result]) -> mcast.Result:
    total = dict(vars(results[0]))
    for one in results[1:]:
        for name, value in vars(one).items():
            if name not in ("op", "ranks"):
                total[name] += value if name != "path" else f"+{value}"
    ways = [way for way in ("multicast", "ring", "shares") if way in total["path"].split("+")]
    return mcast.Result(**{**total, "op": op, "path": "+".join(ways) or "none"})


def _cuda() -> Any:
    """torch.cuda, where this process uses it; else None."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def _event(op: str, device: int) -> Any:
    """Of torch's current stream, as it is now."""
    if (cuda := _cuda()) is None:
        return None
    if cuda.is_current_stream_capturing():
        raise error(
            "unsupported", f"{op}: a CUDA graph cannot hold it: call it outside the capture"
        )
    event = cuda.Event()
    event.record(cuda.current_stream(device))
    return event


Side = tuple[int, int, Any]  # address, bytes, dtype


def _check_apart(op: str, out: Side, inp: Side, own: bool) -> None:
    """Of one dtype, and without common memory; `own`: but for this rank's own part."""
    (start, size, kind), (source, given, other) = out, inp
    if not same_dtype(kind, other):
        raise error("invalid", f"{op}: out has dtype {kind}, inp {other}")
    if not own and start < source + given and source < start + size:
        raise error("invalid", f"{op}: out overlaps inp, and not only in this rank's part of it")
