"""The driver's entry points by ctypes, as tests call them: any libcuda, stood in for or real."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p, sizeof
from pathlib import Path
from typing import Any

MIB = 1 << 20
HOST, DEVICE, UNIFIED = 1, 2, 4  # kinds of memory in a strided copy
WAIT, WRITE = 1, 2  # stream memory operations
OF_THREAD = 2  # the handle of a thread's own default stream
GEQ, EQ, AND, NOR = 0, 1, 2, 3

# Result codes that tests name.
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 1, 2, 3
NO_DEVICE, INVALID_DEVICE, INVALID_CONTEXT = 100, 101, 201
INVALID_HANDLE, NOT_FOUND, NOT_READY, ILLEGAL_ADDRESS = 400, 500, 600, 700


class Prop(ctypes.Structure):
    """What an allocation is made of."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location_type", c_int),
        ("device", c_int),
        ("reserved", c_uint64 * 2),
    )


class Access(ctypes.Structure):
    """Who may touch a mapping."""

    _fields_ = (("location_type", c_int), ("device", c_int), ("flags", c_int))


class Side(ctypes.Structure):
    """One side of a strided copy in two dimensions."""

    _fields_ = (
        ("x", c_size_t),
        ("y", c_size_t),
        ("type", c_int),
        ("host", c_void_p),
        ("device", c_uint64),
        ("array", c_void_p),
        ("pitch", c_size_t),
    )


class Copy2D(ctypes.Structure):
    """A strided copy."""

    _fields_ = (("src", Side), ("dst", Side), ("width", c_size_t), ("height", c_size_t))


class Side3D(ctypes.Structure):
    """One side of a strided copy in three dimensions."""

    _fields_ = (
        ("x", c_size_t),
        ("y", c_size_t),
        ("z", c_size_t),
        ("lod", c_size_t),
        ("type", c_int),
        ("host", c_void_p),
        ("device", c_uint64),
        ("array", c_void_p),
        ("reserved", c_void_p),
        ("pitch", c_size_t),
        ("height", c_size_t),
    )


class Copy3D(ctypes.Structure):
    """A copy of slices of rows."""

    _fields_ = (
        ("src", Side3D),
        ("dst", Side3D),
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
    )


class MemOp(ctypes.Structure):
    """One operation of a batch on words."""

    _fields_ = (
        ("operation", c_int),
        ("address", c_uint64),
        ("value", c_uint64),
        ("flags", c_uint),
        ("alias", c_uint64),
        ("unused", c_uint64),
    )


class Attributes(ctypes.Structure):
    """How the copies of a batch are to be made."""

    _fields_ = (("order", c_int), ("hints", c_int * 4), ("flags", c_uint))


assert (sizeof(Prop), sizeof(Copy2D), sizeof(Copy3D)) == (32, 128, 200)
assert (sizeof(MemOp), sizeof(Attributes), sizeof(Access)) == (48, 24, 12)


class DriverError(Exception):
    """A call that did not return success."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name}: {code}")
        self.code = code


def mem_op(operation: int, address: int, value: int, flags: int = 0) -> MemOp:
    """A wait or a write, for a batch."""
    return MemOp(operation=operation, address=address, value=value, flags=flags)


class Driver:
    """A libcuda. Calls by name (the symbol found for a version) raise DriverError."""

    def __init__(self, path: Path | str, version: int = 13000) -> None:
        self.path = str(path)
        self.library = ctypes.CDLL(self.path)
        self.version = version
        self.functions: dict[str, Any] = {}

    def look_up(self, name: str, version: int | None = None) -> tuple[int, int, int | None]:
        """What cuGetProcAddress answers: result, status, address."""
        function, status = c_void_p(), c_int(-1)
        result = self.library.cuGetProcAddress_v2(
            name.encode(), byref(function), version or self.version, c_uint64(0), byref(status)
        )
        return result, status.value, function.value

    def code(self, name: str, *arguments: Any) -> int:
        """Calls an entry point; integers go as 64 bits, which fits every argument there is."""
        if name not in self.functions:
            result, status, address = self.look_up(name)
            if not address:
                raise LookupError(f"{name}: {result}, {status}")
            self.functions[name] = ctypes.CFUNCTYPE(c_int)(address)
        wide = [c_uint64(a & (1 << 64) - 1) if isinstance(a, int) else a for a in arguments]
        return self.functions[name](*wide)

    def __call__(self, name: str, *arguments: Any) -> None:
        if code := self.code(name, *arguments):
            raise DriverError(name, code)

    def get(self, kind: Any, name: str, *arguments: Any) -> Any:
        """The value that an entry point stores where its first argument points."""
        value = kind()
        self(name, byref(value), *arguments)
        return value.value

    def start(self, device: int = 0) -> None:
        """Makes the device's primary context current."""
        self("cuInit", 0)
        self("cuCtxSetCurrent", self.get(c_uint64, "cuDevicePrimaryCtxRetain", device))

    def stream(self, non_blocking: bool = True) -> int:
        return self.get(c_uint64, "cuStreamCreateWithPriority", int(non_blocking), 0)

    def event(self, flags: int = 0) -> int:
        return self.get(c_uint64, "cuEventCreate", flags)

    def create(self, bytes_: int, device: int = 0, handle_types: int = 1) -> int:
        prop = Prop(type=1, handle_types=handle_types, location_type=1, device=device)
        return self.get(c_uint64, "cuMemCreate", bytes_, byref(prop), 0)

    def reserve(self, bytes_: int, hint: int = 0) -> int:
        return self.get(c_uint64, "cuMemAddressReserve", bytes_, 0, hint, 0)

    def set_access(self, start: int, bytes_: int, devices: Sequence[int], flags: int = 3) -> int:
        rights = (Access * len(devices))(*(Access(1, device, flags) for device in devices))
        return self.code("cuMemSetAccess", start, bytes_, rights, len(devices))

    def map(self, handles: Sequence[int], stride: int, devices: Sequence[int] = (0,)) -> int:
        """Allocations side by side at a constant stride."""
        start = self.reserve(stride * len(handles))
        for i, handle in enumerate(handles):
            self("cuMemMap", start + i * stride, stride, 0, handle, 0)
        if code := self.set_access(start, stride * len(handles), devices):
            raise DriverError("cuMemSetAccess", code)
        return start

    def memory(self, bytes_: int = 2 * MIB, devices: Sequence[int] = (0,)) -> int:
        """Memory of the first of the devices."""
        handle = self.create(bytes_, devices[0])
        start = self.map([handle], bytes_, devices)
        self("cuMemRelease", handle)
        return start

    def put(self, address: int, data: bytes) -> None:
        self("cuMemcpyHtoD", address, data, len(data))

    def read(self, address: int, bytes_: int) -> bytes:
        data = ctypes.create_string_buffer(bytes_)
        self("cuMemcpyDtoH", data, address, bytes_)
        return data.raw

    def word(self, address: int) -> int:
        return int.from_bytes(self.read(address, 4), "little")

    def copy_2d(self, stream: int, dst: int, dst_pitch: int, src: int, src_pitch: int, *shape: int):
        copy = Copy2D(width=shape[0], height=shape[1])
        copy.dst.type, copy.dst.device, copy.dst.pitch = UNIFIED, dst, dst_pitch
        copy.src.type, copy.src.device, copy.src.pitch = UNIFIED, src, src_pitch
        return self.code("cuMemcpy2DAsync", byref(copy), stream)

    def mem_ops(self, stream: int, *ops: MemOp) -> int:
        return self.code("cuStreamBatchMemOp", stream, len(ops), (MemOp * len(ops))(*ops), 0)

    def batch(self, stream: int, copies: Sequence[tuple[int, int, int]], order: int = 1) -> int:
        """Copies (dst, src, bytes) in one batch."""
        columns = [(c_uint64 * len(copies))(*column) for column in zip(*copies, strict=True)]
        attributes, first = Attributes(order=order), c_size_t(0)
        return self.code(
            "cuMemcpyBatchAsync",
            *columns,
            len(copies),
            byref(attributes),
            byref(first),
            1,
            stream,
        )

    @contextmanager
    def capture(self, stream: int, graph: list[int], mode: int = 1) -> Iterator[None]:
        """What is enqueued inside becomes a graph, appended to `graph` ready for launching."""
        self("cuStreamBeginCapture", stream, mode)
        yield
        captured = c_uint64()
        self("cuStreamEndCapture", stream, byref(captured))
        graph.append(self.get(c_uint64, "cuGraphInstantiateWithFlags", captured.value, 0))
        self("cuGraphDestroy", captured.value)
