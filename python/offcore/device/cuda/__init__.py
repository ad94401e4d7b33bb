"""Kernels in CUDA C++, compiled at run time without CUDA's toolkit: docs/gpu-driven.md."""

from __future__ import annotations

import ctypes
from typing import Any

from offcore.device.cuda.driver import Driver
from offcore.device.cuda.nvrtc import compile_cubin

__all__ = ["Kernels", "compile_cubin"]


class Kernels:
    """CUDA C++ that NVRTC has compiled, loaded on a GPU. Also a context manager.

    source: its kernels are `extern "C"`; `#include <offcore/device.cuh>` is found.
    gpu: the CUDA ordinal.
    Raises `Error`: unsupported (no NVRTC), driver, with the compiler's log if it does not compile.
    """

    def __init__(self, source: str, gpu: int) -> None:
        self._driver = Driver(gpu)
        self._functions: dict[str, ctypes.c_void_p] = {}
        try:
            self._driver.load(compile_cubin(source, self._driver.arch))
        except BaseException:
            self._driver.close()
            raise

    def launch(
        self, name: str, grid: int, threads: int, *args: Any, cooperative: bool = False
    ) -> None:
        """Launches a kernel in the stream of these kernels, which is not the default stream.

        grid, threads: blocks, and threads of each.
        args: ctypes values of the parameters' sizes, as `ctypes.c_uint64(window.address(rank))`.
        cooperative: all blocks run at once, or the launch is refused.
        Raises `Error`: driver.
        """
        if name not in self._functions:
            self._functions[name] = self._driver.function(name)
        self._driver.launch(self._functions[name], grid, threads, args, cooperative)

    def wait(self, timeout: float = 10.0) -> None:
        """Waits until all launched kernels have ended. Raises `Error`: timeout, in seconds; driver,
        if one of them failed."""
        self._driver.wait(timeout)

    def close(self) -> None:
        """Unloads the code, once the kernels have ended. A second call does nothing."""
        self._driver.close()

    def __enter__(self) -> Kernels:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
