"""Pinned host memory for KV blocks."""

from __future__ import annotations

import weakref
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offcore import _core, defaults, machines
from offcore.errors import Error, error
from offcore.operands import OperandError, checked, keep_alive, memory_of

Slots = NDArray[np.int64]
open_pools: weakref.WeakSet[HostPool] = weakref.WeakSet()


def numbers_of(name: str, given: ArrayLike) -> Slots:
    numbers = np.asarray(given)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise error(
            "invalid",
            f"{name} must be a list of whole numbers, not {numbers.dtype} of "
            f"{numbers.ndim} dimensions",
        )
    return np.ascontiguousarray(numbers, np.int64)


class HostPool:
    """Pinned host memory for KV blocks: rows of `block_bytes`, one block with all its layers each.

    block_bytes: of a row: `Layout.block_bytes`.
    blocks: how many rows. They are registered with the driver in the background, which takes about
        0.1 s/GB, in chunks of `chunk_bytes` that no row and no copy spans; see `progress`.
    backend: "cuda", "host", "sim" or "auto": cuda where it is available, else host.
    device: cuda: the GPU near which the memory lies; all GPUs of the process can use it.
    machine: sim: the machine that is simulated.
    memory: host memory that the rows are to lie in, instead of the pool's own: a writable numpy
        array, mmap, torch CPU tensor or buffer, contiguous. It is registered as it is, in chunks
        that begin with a page (one chunk if it does not), and kept until the pool has let go of it.
        One process may register shared memory beside another.
    row_stride: bytes from a row of `memory` to the next; by default `block_bytes`. What lies
        between rows is never touched.
    timeout: seconds that a wait lasts which names none.

    A slot is the number of a row, from 0 on. All methods may be called by any thread. Raises
    `Error`: invalid, unavailable; a chunk that cannot be had is reported by `wait_ready`.
    """

    def __init__(
        self,
        block_bytes: int,
        blocks: int,
        *,
        backend: str = "auto",
        machine: str | None = None,
        device: int | None = None,
        chunk_bytes: int = 1 << 30,
        memory: Any = None,
        row_stride: int | None = None,
        timeout: float | None = None,
    ) -> None:
        self.timeout = defaults.seconds(timeout)
        self.backend = defaults.backend(None) if backend == "auto" else backend
        traits = defaults.traits(self.backend)
        if device is not None and not traits.gpus:
            raise error("unsupported", f"device= is for GPUs: backend {backend} has none")
        self.device = (device or 0) if traits.gpus else -1
        self.machine = traits.machine_of_pages(1) if machine is None else machine
        self.block_bytes = checked("block_bytes", block_bytes)
        self._core = _core.open_host_pool(
            self.backend,
            machines.load(self.machine),
            self.device,
            self.block_bytes,
            checked("blocks", blocks),
            checked("chunk_bytes", chunk_bytes),
            *self._place(memory, row_stride),
        )
        open_pools.add(self)

    def _place(self, memory: Any, row_stride: int | None) -> tuple[tuple[int, int], int, Any]:
        if memory is None:
            if row_stride is not None:
                raise error("invalid", "row_stride needs memory=: a pool's own rows are adjacent")
            return (0, 0), 0, None
        try:
            place, _ = memory_of(memory, True)
        except OperandError as refusal:
            raise error("invalid", f"memory{refusal}") from None
        stride = self.block_bytes if row_stride is None else checked("row_stride", row_stride)
        return place, stride, keep_alive(memory)

    @property
    def blocks(self) -> int:
        """How many rows there are, or will be once all are registered."""
        return self._core.counts[0]

    @property
    def progress(self) -> tuple[int, int]:
        """(rows that are registered, all rows)."""
        rows, ready, _, _ = self._core.counts
        return ready, rows

    @property
    def free_blocks(self) -> int:
        """Rows that `allocate` can give out now."""
        return self._core.counts[2]

    @property
    def leaving_blocks(self) -> int:
        """Rows that were freed while jobs used them: free again when those have ended."""
        return self._core.counts[3]

    def wait_ready(self, timeout: float | None = None) -> None:
        """Until all rows are registered. Raises `Error`: timeout; memory or driver where a chunk
        could not be had: the pool then goes on with the rows before it."""
        self._core.wait_ready(self.timeout if timeout is None else timeout)

    def allocate(self, count: int, *, timeout: float | None = None) -> Slots:
        """Slots for `count` blocks, sorted, in as few runs of consecutive ones as can be.

        timeout: seconds to wait for rows to be registered, or freed by others; 0: no wait; None:
        the pool's, counted from when the last rows were registered. Raises `Error`: memory, with
        how many are free, not registered yet, and about to be free; at once where the pool has
        fewer rows.
        """
        wanted = checked("count", count)
        while True:
            ready, _ = self.progress
            try:
                wait = self.timeout if timeout is None else timeout
                return cast(Slots, self._core.allocate(wanted, wait))
            except Error as failure:
                over = timeout is not None or self.progress[0] == ready or wanted > self.blocks
                if failure.code != "memory" or over:
                    raise

    def free(self, slots: ArrayLike) -> None:
        """Gives slots back: all, or none where it raises.

        Those that jobs still use cannot be named by anybody any more, and are free when the last
        such job has ended. Raises `Error`: invalid for slots that are not allocated (freed twice,
        another pool's) or named twice.
        """
        self._core.free(numbers_of("slots", slots))

    def row(self, slot: int) -> NDArray[np.uint8]:
        """An allocated slot's memory, uint8 of `block_bytes`, without a copy. The memory stays
        while the array does, but is another block's once the slot is freed."""
        row: Any = self._core.row(checked("slot", slot))
        return cast(NDArray[np.uint8], row)

    def grow(self, blocks: int) -> None:
        """Adds rows at the end, usable once they are registered."""
        self._core.grow(checked("blocks", blocks))

    def shrink(self, blocks: int = 0) -> int:
        """Gives memory back: whole chunks at the end that have no slot in use, while at least
        `blocks` rows are left. Returns how many are."""
        return self._core.shrink(checked("blocks", blocks))

    def close(self, timeout: float | None = None) -> None:
        """Gives the memory back, what arrays of `row` still show excepted. Raises `Error`: timeout
        while jobs use slots; close their `BlockTransfer` first."""
        self._core.close(self.timeout if timeout is None else timeout)

    def __enter__(self) -> HostPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
