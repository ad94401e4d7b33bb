"""torch.cuda on the stand-in driver, for torch without CUDA: what torch.distributed's backend
"offcore" asks of it. Tensors are the CPU's, at addresses of the stand-in, and say that they are on
a GPU; streams and events are the driver's. What torch does in C++ costs more here, in Python."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator
from typing import Any

import torch

own_empty = torch.empty


class Driver:
    """The stand-in, with a context current in this thread, as torch leaves it."""

    def __init__(self, library: str, device: int) -> None:
        self.calls = ctypes.CDLL(library)
        context = ctypes.c_void_p()
        if self.calls.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) != 0:
            raise SystemExit("the stand-in has no such device")
        self.calls.cuCtxSetCurrent(context)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.calls, name)

        def checked(*given: Any) -> None:
            if (code := call(*given)) != 0:
                raise SystemExit(f"{name}: {code}")

        setattr(self, name, checked)
        return checked


class Here:
    """What this process uses."""

    driver: Driver
    stream: Stream
    pool: MemPool | None = None


class Stream:
    def __init__(self, *_: Any, handle: int = 0, **__: Any) -> None:
        made = ctypes.c_void_p(handle)
        if handle == 0:
            Here.driver.cuStreamCreateWithPriority(ctypes.byref(made), 1, 0)
        self.cuda_stream = self.stream_id = made.value
        self.device_type = 1

    def wait_event(self, event: Event) -> None:
        Here.driver.cuStreamWaitEvent(ctypes.c_void_p(self.cuda_stream), event.made, 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.cuda_stream == other.cuda_stream


class Event:
    def __init__(self) -> None:
        self.made = ctypes.c_void_p()
        Here.driver.cuEventCreate(ctypes.byref(self.made), 2)

    def __del__(self) -> None:
        Here.driver.calls.cuEventDestroy_v2(self.made)

    def record(self, stream: Stream) -> None:
        Here.driver.cuEventRecord(self.made, ctypes.c_void_p(stream.cuda_stream))

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)


class Entered:
    """torch.Stream, which makes itself current."""

    def __init__(self, stream_id: int, **_: Any) -> None:
        self.stream = Stream(handle=stream_id)

    def __enter__(self) -> None:
        self.before, Here.stream = Here.stream, self.stream

    def __exit__(self, *_: object) -> None:
        Here.stream = self.before


class Allocator:
    """torch.cuda.memory.CUDAPluggableAllocator."""

    def __init__(self, library: str, take: str, give: str) -> None:
        calls = ctypes.CDLL(library)
        self.take, self.give = calls[take], calls[give]
        self.take.restype = ctypes.c_void_p
        self.take.argtypes = (ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        self.give.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)

    def allocator(self) -> Allocator:
        return self


class MemPool:
    """Without torch's cache: each tensor is a segment, given back at its end."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator


@contextlib.contextmanager
def within_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
    before, Here.pool = Here.pool, pool
    try:
        yield
    finally:
        Here.pool = before


def empty(*size: Any, **given: Any) -> Any:
    """torch.empty, in the pool of a `use_mem_pool`."""
    if Here.pool is None:
        return own_empty(*size, **{**given, "device": "cpu"})
    count = own_empty(*size, device="meta").numel()
    nbytes = count * given["dtype"].itemsize
    allocator, device = Here.pool.allocator, given["device"].index
    if (address := allocator.take(nbytes, device, None)) is None:
        raise torch.cuda.OutOfMemoryError
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(memory, allocator.give, address, nbytes, device, None)
    return torch.frombuffer(memory, dtype=given["dtype"])


class Future(torch._C.Future):
    """Marks the stream and looks for tensors in what it is given, as torch's own do."""

    def __init__(self, devices: Any = ()) -> None:
        super().__init__([])
        self.event = Event() if devices else None

    def set_result(self, value: Any) -> None:
        torch._jit_internal._extract_tensors(value)
        if self.event is not None:
            self.event.record(Here.stream)
        super().set_result(value)


@contextlib.contextmanager
def within(stream: Stream) -> Iterator[None]:
    with Entered(stream.cuda_stream):
        yield


def capturing() -> bool:
    status = ctypes.c_int()
    stream = ctypes.c_void_p(Here.stream.cuda_stream)
    Here.driver.cuStreamIsCapturing(stream, ctypes.byref(status))
    return status.value != 0


def use(driver: Driver, device: int) -> None:
    """Makes torch's names in this process stand for it."""
    Here.driver = driver
    Here.stream = Stream()
    for place, name, value in (
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "Event", Event),
        (torch.cuda, "stream", within),
        (torch.cuda, "current_stream", lambda _=None: Here.stream),
        (torch.cuda, "set_stream", lambda stream: setattr(Here, "stream", stream)),
        (torch.cuda, "current_device", lambda: device),
        (torch.cuda, "is_current_stream_capturing", capturing),
        (torch._C, "_cuda_getCurrentRawStream", lambda _: Here.stream.cuda_stream),
        (torch.cuda.memory, "CUDAPluggableAllocator", Allocator),
        (torch.cuda, "MemPool", MemPool),
        (torch.cuda, "use_mem_pool", within_pool),
        (torch, "empty", empty),
        (torch, "Stream", Entered),
        (torch._C, "Future", Future),
        (torch.futures, "Future", Future),
        (torch.Tensor, "is_cuda", True),
        (torch.Tensor, "is_cpu", False),
        (torch.Tensor, "get_device", lambda _: device),
    ):
        setattr(place, name, value)
