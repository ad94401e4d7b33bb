"""Windows: memory of equal size on every rank."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from offcore import _core
from offcore.comm.arrays import tensors_of
from offcore.errors import error
from offcore.operands import host_place_of


class Owner(Protocol):
    """What a window asks the communicator that made it."""

    local_ranks: list[int]


class Window:
    """Memory of `nbytes` on every rank that all ranks can write."""

    def __init__(self, comm: Owner, core: _core.Window) -> None:
        self._core = core
        self._local_ranks = comm.local_ranks
        self.whole = core.region(0, core.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of each rank's part."""
        return self._core.nbytes

    @property
    def host_visible(self) -> bool:
        """Whether `array` is available; for GPU memory use `tensor`, `read` and `write`."""
        return self._core.host_visible

    def array(self, rank: int | None = None, dtype: DTypeLike = "uint8") -> NDArray[Any]:
        """Returns a local rank's part as a one-dimensional numpy array, without a copy.

        `rank` is optional if one rank is local. Raises `Error`: invalid for a rank that is not
        local, unsupported for phantom memory and GPU memory.
        """
        view: Any = self._core.view(self._local(rank), 0, self.nbytes)
        array: NDArray[Any] = view.view(dtype)
        return array

    def tensor(self, rank: int | None = None) -> Any:
        """cuda: returns a local rank's part as a one-dimensional uint8 tensor, without a copy."""
        make = tensors_of(np.dtype("uint8"))
        return make(self._core, self._local(rank), 0, (self.nbytes,))

    def address(self, rank: int | None = None) -> int:
        """Returns the address of a local rank's part in this process."""
        return self._core.address(self._local(rank))

    def read(self, array: NDArray[Any], offset: int = 0, rank: int | None = None) -> None:
        """Copies a local rank's bytes, from `offset` on, to a contiguous array, and waits."""
        address, nbytes = host_place_of(array, writable=True)
        self._core.read(address, self._local(rank), offset, nbytes)

    def write(self, array: NDArray[Any], offset: int = 0, rank: int | None = None) -> None:
        """Copies a contiguous array to a local rank's bytes, from `offset` on, and waits."""
        address, nbytes = host_place_of(array, writable=False)
        self._core.write(self._local(rank), offset, address, nbytes)

    def _local(self, rank: int | None) -> int:
        if rank is None and len(self._local_ranks) == 1:
            rank = self._local_ranks[0]
        if rank is None or rank not in self._local_ranks:
            raise error("invalid", f"rank {rank} is not local; local ranks: {self._local_ranks}")
        return rank

    def region(self, offset: int, nbytes: int) -> _core.Region:
        """Returns bytes [offset, offset + nbytes) of every rank's part, for a collective."""
        return self._core.region(offset, nbytes)
