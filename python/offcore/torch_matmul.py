"""GEMMs overlapped with the all-gather of their input, or the reduce-scatter of their result."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from offcore.comm.communicator import Communicator
from offcore.comm.handle import Handle
from offcore.errors import error
from offcore.operands import NUMBER_MAX, checked


class _Place:
    """Window memory for the rows of all ranks: chunks, ranks, rows, columns; and a stream of its
    copies."""

    def __init__(self, comm: Communicator, shape: tuple[int, ...], dtype: Any) -> None:
        count = dtype.itemsize
        for one in shape:
            count *= one
        memory = comm.empty(max(1, count), "uint8")
        self.memory = memory if isinstance(memory, torch.Tensor) else torch.from_numpy(memory)
        self.rows = self.memory[:count].view(dtype).view(shape)
        on_gpu = self.memory.is_cuda
        self.stream = torch.cuda.Stream(self.memory.device) if on_gpu else None
        self._last: tuple[Any, Any] | None = None  # stream, and event of the end, of the last call

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """By a call, behind the one before, whatever stream that was made in. A graph's replays are
        in the order that its user gives them."""
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self.memory.device):
            current = torch.cuda.current_stream()
            if torch.cuda.is_current_stream_capturing():
                yield
                return
            if self._last is not None and self._last[0] != current:
                current.wait_event(self._last[1])
            try:
                yield
            finally:
                self._last = current, torch.cuda.Event()
                self._last[1].record(current)


_places: weakref.WeakKeyDictionary[Communicator, dict[Any, _Place]] = weakref.WeakKeyDictionary()


def _place(comm: Communicator, use: str, shape: tuple[int, ...], dtype: Any, lane: int) -> _Place:
    kept = _places.setdefault(comm, {})
    key = (use, shape, dtype, lane)
    if key not in kept:
        kept[key] = _Place(comm, shape, dtype)
    return kept[key]


def matmul_shard(
    comm: Communicator, rows: int, columns: int, dtype: Any = torch.bfloat16, *, lane: int = 0
) -> Any:
    """Returns this rank's input buffer of all_gather_matmul with one chunk, which then needs no
    copy. Write it in the stream of the calls. The first call is collective."""
    shape = (1, comm.ranks, checked("rows", rows), checked("columns", columns))
    return _place(comm, "gather", shape, dtype, lane).rows[0, comm.local_ranks[0]]


@torch.no_grad()  # type: ignore[untyped-decorator]
def all_gather_matmul(
    comm: Communicator,
    shard: Any,
    weight: Any,
    *,
    out: Any = None,
    chunks: int = 1,
    lane: int = 0,
) -> Any:
    """Multiplies the concatenated rows of all ranks by this rank's `weight`, and returns `out`.

    shard: (m, k), this rank's rows; the same shape on every rank.
    weight: (k, n), of this rank.
    out: (ranks x m, n), contiguous; by default allocated. No gradients are recorded.
    chunks: per rank, a divisor of m. Several pay off if the all-gather takes longer than the GEMM
        of one rank's rows (see offcore.overlap.chunks_of).

    This rank's rows are multiplied while engines copy those of the others; chunk k is copied while
    chunk k - 1 is multiplied.

    Ordered on the current CUDA stream; the copies run on a separate stream. On the host backend,
    with CPU tensors, it returns when the result is complete. Rows pass through window memory, which
    is allocated at the first call with a shape (collective) and kept with the communicator. SMs
    copy a rank's own rows there, unless they are there already (see matmul_shard). Raises `Error`:
    invalid (shapes, dtypes, several local ranks), and as all_gather does.
    """
    m, k = _checked(comm, "all_gather_matmul", "shard", shard, weight)
    rows = _rows_of("all_gather_matmul", m, chunks)
    rank, ranks = comm.local_ranks[0], comm.ranks
    out = _result("all_gather_matmul", out, shard, (ranks * m, weight.shape[1]))
    place = _place(comm, "gather", (chunks, ranks, rows, k), shard.dtype, lane)
    with place.used():
        arrived = _gather(comm, place, shard, lane)
        torch.mm(shard, weight, out=out[rank * m : (rank + 1) * m])
        for chunk, wait in enumerate(arrived):
            wait()
            for peer in (peer for peer in range(ranks) if peer != rank):
                begin = peer * m + chunk * rows
                torch.mm(place.rows[chunk, peer], weight, out=out[begin : begin + rows])
    return out


@torch.no_grad()  # type: ignore[untyped-decorator]
def matmul_reduce_scatter(
    comm: Communicator,
    inp: Any,
    weight: Any,
    *,
    out: Any = None,
    chunks: int = 1,
    lane: int = 0,
) -> Any:
    """Multiplies this rank's `inp` by its `weight`, adds up the products of all ranks, and returns
    this rank's part of the rows in `out`.

    inp: (ranks x m, k), contiguous; the same shape on every rank.
    weight: (k, n), of this rank.
    out: (m, n), contiguous; by default allocated. No gradients are recorded.
    chunks: per rank, a divisor of m. Several pay off if copying the products takes longer than the
        GEMM of one rank's rows.

    The rows of other ranks are multiplied first. Engines copy chunk k of their products while
    chunk k + 1, and then this rank's own rows, are multiplied; an elementwise kernel adds them up.
    Products are rounded to the dtype. Their sums are rounded once, and computed in float32, or
    float64 for float64.

    Streams, memory and errors as in all_gather_matmul.
    """
    op = "matmul_reduce_scatter"
    whole, k = _checked(comm, op, "inp", inp, weight)
    rank, ranks, n = comm.local_ranks[0], comm.ranks, weight.shape[1]
    if whole % ranks:
        raise error("invalid", f"{op}: {whole} rows of inp are no multiple of {ranks} ranks")
    rows = _rows_of(op, whole // ranks, chunks)
    out = _result(op, out, inp, (whole // ranks, n))
    place = _place(comm, "scatter", (chunks, ranks, rows, n), inp.dtype, lane)
    given = inp.view(ranks, chunks, rows, k)
    others = [peer for peer in range(ranks) if peer != rank]
    counts = [[rows * n * (peer != other) for other in range(ranks)] for peer in range(ranks)]
    sent = torch.empty(chunks, len(others), rows, n, dtype=inp.dtype, device=inp.device)
    with place.used():
        arrived = []
        for chunk in range(chunks):
            for slot, peer in enumerate(others):
                torch.mm(given[peer, chunk], weight, out=sent[chunk, slot])
            # Behind what others send, the slot of this rank's own product.
            came = place.rows[chunk, :-1].reshape(-1)
            arrived.append(_push(comm, place, came, sent[chunk].view(-1), counts, lane))
        for chunk in range(chunks):
            torch.mm(given[rank, chunk], weight, out=place.rows[chunk, -1])
        for wait in arrived:
            wait()
        return _added(place.rows, out)


def _added(rows: Any, out: Any) -> Any:
    """The sum over ranks."""
    into = out.view(rows.shape[0], *rows.shape[2:])
    if rows.shape[1] == 2:  # three times as fast as torch.sum, to the same bits
        torch.add(rows[:, 0], rows[:, 1], out=into)
    else:
        torch.sum(rows, 1, dtype=out.dtype, out=into)
    return out


def _push(
    comm: Communicator, place: _Place, came: Any, sent: Any, counts: list[list[int]], lane: int
) -> Callable[[], Any]:
    """Sends products to the other ranks, behind the current stream: what waits for theirs."""
    if place.stream is None:
        handle: Handle = comm.all_to_all_v(came, sent, counts, lane=lane)
        return handle.wait
    current = torch.cuda.current_stream()
    place.stream.wait_stream(current)
    with torch.cuda.stream(place.stream):
        comm.all_to_all_v(came, sent, counts, lane=lane)
        event = torch.cuda.Event()
        event.record()
    return partial(current.wait_event, event)


def _checked(comm: Communicator, op: str, name: str, inp: Any, weight: Any) -> tuple[int, int]:
    """The shape of `inp`."""
    if len(comm.local_ranks) != 1:
        raise error("invalid", f"{op}: needs one rank in each process")
    if inp.dim() != 2 or weight.dim() != 2 or inp.shape[1] != weight.shape[0]:
        raise error(
            "invalid",
            f"{op}: {name} is {tuple(inp.shape)}, weight {tuple(weight.shape)}; "
            "they must be (m, k) and (k, n)",
        )
    if inp.dtype != weight.dtype or not inp.is_contiguous():
        raise error("invalid", f"{op}: {name} must be contiguous, of weight's dtype")
    return inp.shape[0], inp.shape[1]


def _rows_of(op: str, m: int, chunks: int) -> int:
    """Of a chunk."""
    if checked("chunks", chunks, NUMBER_MAX) < 1 or m % chunks:
        raise error("invalid", f"{op}: {chunks} chunks do not divide {m} rows")
    return m // chunks


def _result(op: str, out: Any, like: Any, shape: tuple[int, int]) -> Any:
    if out is None:
        out = torch.empty(shape, dtype=like.dtype, device=like.device)
    if tuple(out.shape) != shape or out.dtype != like.dtype or not out.is_contiguous():
        raise error("invalid", f"{op}: out must be contiguous, of shape {shape}")
    return out


def _gather(comm: Communicator, place: _Place, shard: Any, lane: int) -> list[Callable[[], Any]]:
    """Starts a gather for each chunk: what waits for them in turn, on the current stream."""
    own = place.rows[:, comm.local_ranks[0]]
    if own.data_ptr() != shard.data_ptr():
        own.copy_(shard.view(own.shape))  # in another stream it might wait for a GEMM's SMs
    if place.stream is None:
        return [comm.all_gather(chunk, lane=lane).wait for chunk in place.rows]
    waits: list[Callable[[], Any]] = []
    current = torch.cuda.current_stream()
    place.stream.wait_stream(current)
    with torch.cuda.stream(place.stream):
        for chunk in place.rows:
            comm.all_gather(chunk, lane=lane)
            event = torch.cuda.Event()
            event.record()
            waits.append(partial(current.wait_event, event))
    return waits
