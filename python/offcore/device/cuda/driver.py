"""What kernels compiled at run time ask of the CUDA driver, by ctypes: memory, code, launches in a
stream."""

from __future__ import annotations

import ctypes
import mmap
import time
from typing import Any

from offcore import _core
from offcore.errors import Error, error

INVALID_VALUE, NOT_READY = 1, 600
SM_COUNT, MAJOR, MINOR = 16, 75, 76
NON_BLOCKING, PORTABLE_MAPPED = 1, 3


class Driver:
    """A GPU's primary context, and what was made in it. Every call makes the context current, and
    leaves the caller's as it was."""

    def __init__(self, gpu: int) -> None:
        try:
            library = ctypes.CDLL(_core.env("OFFCORE_LIBCUDA") or "libcuda.so.1")
            self._find = library.cuGetProcAddress_v2
        except (OSError, AttributeError) as cause:
            raise error("unavailable", f"kernels: no driver of CUDA 12.0: {cause}") from cause
        self._device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._functions: dict[str, Any] = {}
        self._memory, self._host = list[int](), list[int]()
        self._pages: list[mmap.mmap] = []
        self._module, self._stream = ctypes.c_void_p(), ctypes.c_void_p()
        self._check("cuInit", self._function("cuInit")(0))
        self._check("cuDeviceGet", self._function("cuDeviceGet")(ctypes.byref(self._device), gpu))
        made = self._function("cuDevicePrimaryCtxRetain")(ctypes.byref(self._context), self._device)
        self._check("cuDevicePrimaryCtxRetain", made)
        self.sms = self._attribute(SM_COUNT)
        self.arch = f"sm_{self._attribute(MAJOR)}{self._attribute(MINOR)}"
        self._call("cuStreamCreateWithPriority", ctypes.byref(self._stream), NON_BLOCKING, 0)

    def load(self, cubin: bytes) -> None:
        self._call("cuModuleLoadData", ctypes.byref(self._module), cubin)

    def function(self, name: str) -> ctypes.c_void_p:
        """Of the code that was loaded."""
        found = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(found), self._module, name.encode())
        return found

    def parameters(self, function: ctypes.c_void_p) -> list[int] | None:
        """Their bytes; None: the driver cannot tell, before CUDA 12.4."""
        name, offset, size = "cuFuncGetParamInfo", ctypes.c_size_t(), ctypes.c_size_t()
        if self._found(name, 12040) is None:
            return None
        where, sizes = (ctypes.byref(offset), ctypes.byref(size)), list[int]()
        while (code := self._bound(name, function, ctypes.c_size_t(len(sizes)), *where)) == 0:
            sizes.append(size.value)
        if code != INVALID_VALUE:  # there are no more
            self._check(name, code)
        return sizes

    def co_resident(self, function: ctypes.c_void_p, threads: int) -> int:
        count = ctypes.c_int()
        name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        self._call(name, ctypes.byref(count), function, threads, ctypes.c_size_t(0))
        return count.value * self.sms

    def allocate(self, nbytes: int) -> int:
        """Zeroed."""
        at = ctypes.c_uint64()
        self._call("cuMemAlloc", ctypes.byref(at), ctypes.c_size_t(nbytes))
        self._memory.append(at.value)
        self.fill(at.value, nbytes)
        return at.value

    def place(self, data: bytes) -> int:
        at = self.allocate(max(len(data), 1))
        self.write(at, ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0, len(data))
        return at

    def host_words(self, nbytes: int) -> int:
        """Pinned memory of one address for host and GPU."""
        pages = mmap.mmap(-1, nbytes)
        at = ctypes.addressof(ctypes.c_ubyte.from_buffer(pages))
        size = ctypes.c_size_t(nbytes)
        self._call("cuMemHostRegister", ctypes.c_void_p(at), size, PORTABLE_MAPPED)
        self._host.append(at)
        self._pages.append(pages)
        return at

    def fill(self, at: int, nbytes: int) -> None:
        size = ctypes.c_size_t(nbytes)
        self._call("cuMemsetD8Async", ctypes.c_uint64(at), ctypes.c_ubyte(0), size, self._stream)

    def read(self, to: int, at: int, nbytes: int) -> None:
        host, size = ctypes.c_void_p(to), ctypes.c_size_t(nbytes)
        self._call("cuMemcpyDtoHAsync", host, ctypes.c_uint64(at), size, self._stream)
        self.wait(10.0)

    def write(self, to: int, at: int, nbytes: int) -> None:
        host, size = ctypes.c_void_p(at), ctypes.c_size_t(nbytes)
        self._call("cuMemcpyHtoDAsync", ctypes.c_uint64(to), host, size, self._stream)
        self.wait(10.0)

    def launch(self, function: Any, grid: int, threads: int, args: Any, cooperative: bool) -> None:
        """cooperative: all blocks run at once, or the driver refuses."""
        pointers = [ctypes.cast(ctypes.byref(one), ctypes.c_void_p) for one in args]
        given = (ctypes.c_void_p * len(args))(*pointers)
        shape = [ctypes.c_uint(one) for one in (grid, 1, 1, threads, 1, 1, 0)]
        if cooperative:
            self._call("cuLaunchCooperativeKernel", function, *shape, self._stream, given)
        else:
            self._call("cuLaunchKernel", function, *shape, self._stream, given, None)

    def idle(self) -> bool:
        code = self._bound("cuStreamQuery", self._stream)
        if code != NOT_READY:
            self._check("cuStreamQuery", code)
        return code != NOT_READY

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.idle():
            if time.monotonic() > deadline:
                raise error("timeout", f"kernels: they did not end within {seconds:g} s")

    def close(self, seconds: float = 10.0) -> None:
        """Waits until nothing runs; what failed is freed, too. A second call does nothing."""
        if not self._context:
            return
        try:
            self.wait(seconds)
        except Error as failure:
            if failure.code == "timeout":
                raise
        for at in self._memory:
            self._bound("cuMemFree", ctypes.c_uint64(at))
        for at in self._host:
            self._bound("cuMemHostUnregister", ctypes.c_void_p(at))
        if self._module:
            self._bound("cuModuleUnload", self._module)
        if self._stream:
            self._bound("cuStreamDestroy", self._stream)
        self._function("cuDevicePrimaryCtxRelease")(self._device)
        self._context = ctypes.c_void_p()

    def _function(self, name: str) -> Any:
        """By the driver's own table, in the form of CUDA 12.0."""
        if name not in self._functions and self._found(name, 12000) is None:
            raise error("driver", f"kernels: the driver has no {name}: it needs CUDA 12.0")
        return self._functions[name]

    def _found(self, name: str, version: int) -> Any:
        """None: it came later than this driver."""
        at, found = ctypes.c_void_p(), ctypes.c_int()
        given = (name.encode(), ctypes.byref(at), version, ctypes.c_uint64(0))
        if self._find(*given, ctypes.byref(found)) or not at.value:
            return None
        self._functions[name] = ctypes.CFUNCTYPE(ctypes.c_int)(at.value)
        return self._functions[name]

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        code = self._function("cuDeviceGetAttribute")(ctypes.byref(value), number, self._device)
        self._check("cuDeviceGetAttribute", code)
        return value.value

    def _bound(self, name: str, *args: Any) -> int:
        before = ctypes.c_void_p()
        self._check(name, self._function("cuCtxPushCurrent")(self._context))
        try:
            return int(self._function(name)(*args))
        finally:
            self._function("cuCtxPopCurrent")(ctypes.byref(before))

    def _call(self, name: str, *args: Any) -> None:
        self._check(name, self._bound(name, *args))

    def _check(self, name: str, code: int) -> None:
        if code == 0:
            return
        text = ctypes.c_char_p()
        self._function("cuGetErrorString")(code, ctypes.byref(text))
        raise error("driver", f"kernels: {name}: {(text.value or b'?').decode()} ({code})")
