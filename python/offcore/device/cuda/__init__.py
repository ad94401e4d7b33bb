"""Kernels in CUDA C++, compiled at run time without CUDA's toolkit: docs/gpu-driven.md."""

from __future__ import annotations

import ctypes
from typing import Any

from offcore.device.cuda.driver import Driver
from offcore.device.cuda.nvrtc import compile_cubin
from offcore.errors import error

__all__ = ["Kernels", "compile_cubin"]

_CData: Any = ctypes.c_int.__mro__[-2]  # of all ctypes values


class Kernels:
    """CUDA C++ that NVRTC has compiled, loaded on a GPU. Also a context manager.

    source: its kernels are `extern "C"`; `#include <offcore/device.cuh>` is found.
    gpu: the CUDA ordinal.
    Raises `Error`: unavailable (no driver of CUDA 12.0 or later), unsupported (no NVRTC), driver,
    with the compiler's log if it does not compile.
    """

    def __init__(self, source: str, gpu: int) -> None:
        self._driver = Driver(gpu)
        self._functions: dict[str, tuple[ctypes.c_void_p, list[int] | None]] = {}
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
        args: ctypes values, as `ctypes.c_uint64(window.address(rank))`, one for each parameter and
            of its size: drivers older than CUDA 12.4 cannot check this, and read beyond fewer.
        cooperative: all blocks run at once, or the launch is refused.
        Raises `Error`: invalid (arguments of other types, number or sizes), driver.
        """
        if name not in self._functions:
            found = self._driver.function(name)
            self._functions[name] = found, self._driver.parameters(found)
        function, sizes = self._functions[name]
        given = [ctypes.sizeof(one) if isinstance(one, _CData) else -1 for one in args]
        if -1 in given or sizes not in (None, given):
            types = ", ".join(type(one).__name__ for one in args) or "none"
            wanted = "" if sizes is None else f" of {sizes} bytes"
            raise error("invalid", f"kernels: {name}: pass ctypes values{wanted}, not {types}")
        self._driver.launch(function, grid, threads, args, cooperative)

    def wait(self, timeout: float = 10.0) -> None:
        """Waits until all launched kernels have ended. Raises `Error`: timeout, in seconds; driver,
        if one of them failed."""
        self._driver.wait(timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Waits until all launched kernels have ended, and unloads the code. A second call does
        nothing. Raises `Error`: timeout, in seconds; the code then stays loaded."""
        self._driver.close(timeout)

    def __enter__(self) -> Kernels:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
