"""All-gather followed by a dependent GEMM, overlapped: each chunk is multiplied on arrival."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from offcore.comm.communicator import Communicator
from offcore.errors import error
from offcore.operands import NUMBER_MAX, checked


class _Place:
    """Window memory for the rows of all ranks: chunks, ranks, rows, columns."""

    def __init__(self, comm: Communicator, shape: tuple[int, ...], dtype: Any) -> None:
        count = dtype.itemsize
        for one in shape:
            count *= one
        memory = comm.empty(max(1, count), "uint8")
        self.memory = memory if isinstance(memory, torch.Tensor) else torch.from_numpy(memory)
        self.rows = self.memory[:count].view(dtype).view(shape)
        on_gpu = self.memory.is_cuda
        self.stream = torch.cuda.Stream(self.memory.device) if on_gpu else None


_places: weakref.WeakKeyDictionary[Communicator, dict[Any, _Place]] = weakref.WeakKeyDictionary()


def _place(comm: Communicator, shape: tuple[int, ...], dtype: Any, lane: int) -> _Place:
    kept = _places.setdefault(comm, {})
    key = (shape, dtype, lane)
    if key not in kept:
        kept[key] = _Place(comm, shape, dtype)
    return kept[key]


def matmul_shard(
    comm: Communicator, rows: int, columns: int, dtype: Any = torch.bfloat16, *, lane: int = 0
) -> Any:
    """Returns this rank's input buffer of all_gather_matmul with one chunk, which then needs no
    copy. Write it in the stream of the calls. The first call is collective."""
    shape = (1, comm.ranks, checked("rows", rows), checked("columns", columns))
    return _place(comm, shape, dtype, lane).rows[0, comm.local_ranks[0]]


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
    out = _checked(comm, shard, weight, out, chunks)
    m, k = shard.shape
    rank, ranks, rows = comm.local_ranks[0], comm.ranks, m // chunks
    place = _place(comm, (chunks, ranks, rows, k), shard.dtype, lane)
    arrived = _gather(comm, place, shard, lane)
    torch.mm(shard, weight, out=out[rank * m : (rank + 1) * m])
    for chunk, wait in enumerate(arrived):
        wait()
        for peer in (peer for peer in range(ranks) if peer != rank):
            begin = peer * m + chunk * rows
            torch.mm(place.rows[chunk, peer], weight, out=out[begin : begin + rows])
    return out


def _checked(comm: Communicator, shard: Any, weight: Any, out: Any, chunks: int) -> Any:
    if len(comm.local_ranks) != 1:
        raise error("invalid", "all_gather_matmul: needs one rank in each process")
    if shard.dim() != 2 or weight.dim() != 2 or shard.shape[1] != weight.shape[0]:
        raise error(
            "invalid",
            f"all_gather_matmul: shard is {tuple(shard.shape)}, weight {tuple(weight.shape)}; "
            "they must be (m, k) and (k, n)",
        )
    if shard.dtype != weight.dtype or not shard.is_contiguous():
        raise error("invalid", "all_gather_matmul: shard must be contiguous, of weight's dtype")
    m = shard.shape[0]
    if checked("chunks", chunks, NUMBER_MAX) < 1 or m % chunks:
        raise error("invalid", f"all_gather_matmul: {chunks} chunks do not divide {m} rows")
    wanted = (comm.ranks * m, weight.shape[1])
    if out is None:
        out = torch.empty(wanted, dtype=shard.dtype, device=shard.device)
    if tuple(out.shape) != wanted or out.dtype != shard.dtype or not out.is_contiguous():
        raise error("invalid", f"all_gather_matmul: out must be contiguous, of shape {wanted}")
    return out


def _gather(comm: Communicator, place: _Place, shard: Any, lane: int) -> list[Callable[[], Any]]:
    """Starts a gather for each chunk: what waits for them in turn, on the current stream."""
    own = place.rows[:, comm.local_ranks[0]]
    copied = own.data_ptr() != shard.data_ptr()
    if place.stream is None:
        if copied:
            own.copy_(shard.view(own.shape))
        return [comm.all_gather(chunk, lane=lane).wait for chunk in place.rows]
    waits: list[Callable[[], Any]] = []
    current = torch.cuda.current_stream(place.memory.device)
    place.stream.wait_stream(current)
    with torch.cuda.stream(place.stream):
        if copied:
            own.copy_(shard.view(own.shape))
        for chunk in place.rows:
            comm.all_gather(chunk, lane=lane)
            event = torch.cuda.Event()
            event.record()
            waits.append(partial(current.wait_event, event))
    return waits
