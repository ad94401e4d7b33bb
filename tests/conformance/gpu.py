"""GPU memory as the tests handle arrays: every look and every change is a copy."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import offcore
from offcore import _core

sys.path.append(str(Path(__file__).parents[1] / "fakes"))
from cuda_library import fake_cuda_library, fake_hsa_library, toy_library

# A process opens one HSA runtime: tests/sdma/test_sdma_ways.py runs tests of this suite in others.
SDMA_WAY = os.environ.get("OFFCORE_TEST_SDMA_WAY", "queues")
HSA_KINDS = {"queues": "", "batch_copy": "_batch", "hip_batch": "_old"}


def hsa_stand_in(way: str = SDMA_WAY) -> dict[str, str]:
    """The environment in which stand-ins are AMD's runtimes that have this way, with eight GPUs."""
    library = fake_hsa_library(HSA_KINDS[way])
    return {
        "OFFCORE_LIBHSA": str(library),
        "OFFCORE_LIBHIP": str(library.with_name("libamdhip64.so")),
    }


@functools.cache
def add_toy() -> None:
    """From now on the toy backend opens in this process."""
    _core.add_backend(str(toy_library()))


def stand_in() -> dict[str, str]:
    """The environment in which the stand-in libcuda is the driver, with eight GPUs."""
    library = fake_cuda_library()
    return {
        "OFFCORE_LIBCUDA": str(library),
        "OFFCORE_FAKE_CUDA_DEVICES": "8",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # programs may be parked
    }


class GpuArray:
    """A contiguous part of a window in GPU memory, shaped like a numpy array."""

    def __init__(
        self, window: offcore.Window, rank: int, offset: int, shape: tuple[int, ...], dtype: Any
    ) -> None:
        self._window = window
        self._rank = rank
        self._offset = offset
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.size = int(np.prod(shape))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self._window.address(self._rank) + self._offset, False),
            "strides": None,
            "version": 3,
        }

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        host = np.empty(self.shape, self.dtype)
        self._window.read(host, self._offset, self._rank)
        return host if dtype is None else host.astype(dtype)

    def copy(self) -> np.ndarray:
        return np.asarray(self)

    def sum(self) -> int:
        return int(np.asarray(self).sum())

    def tolist(self) -> list[Any]:
        values: list[Any] = np.asarray(self).tolist()
        return values

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: slice) -> GpuArray:
        start, stop, step = key.indices(self.shape[0])
        assert step == 1
        row = self.dtype.itemsize * int(np.prod(self.shape[1:]))
        shape = (max(0, stop - start), *self.shape[1:])
        return GpuArray(self._window, self._rank, self._offset + start * row, shape, self.dtype)

    def __setitem__(self, key: slice, value: Any) -> None:
        part = self[key]
        host = np.ascontiguousarray(np.broadcast_to(np.asarray(value, self.dtype), part.shape))
        self._window.write(host, part._offset, self._rank)

    def __eq__(self, other: object) -> Any:
        return np.asarray(self) == np.asarray(other)

    def __ne__(self, other: object) -> Any:
        return np.asarray(self) != np.asarray(other)

    __hash__ = None  # it is equal by elements


class GpuWindow(offcore.Window):
    def array(self, rank: int | None = None, dtype: Any = "uint8") -> Any:
        kind = np.dtype(dtype)
        shape = (self.nbytes // kind.itemsize,)
        return GpuArray(self, self._local(rank), 0, shape, kind)


class GpuCommunicator(offcore.Communicator):
    """Hands out windows as arrays that a test can look at."""

    def window(self, nbytes: int) -> offcore.Window:
        return GpuWindow(self, super().window(nbytes)._core)

    def _array(self, window: Any, rank: int, offset: int, shape: tuple[int, ...], kind: Any) -> Any:
        return GpuArray(GpuWindow(self, window), rank, offset, shape, kind)
