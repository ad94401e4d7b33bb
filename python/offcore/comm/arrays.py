"""Window memory as arrays and tensors, without a copy."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from offcore._core import Lease
from offcore._core import Window as CoreWindow
from offcore.errors import error
from offcore.operands import checked, dtype_name

# DLPack's code and bits of the dtypes that every version of it knows, by name.
_FORMATS = {"bool": (6, 8), "bfloat16": (4, 16)} | {
    f"{name}{bits}": (code, bits)
    for name, code in {"int": 0, "uint": 1, "float": 2, "complex": 5}.items()
    for bits in (8, 16, 32, 64, 128)
}


Make = Callable[..., Any]


@functools.cache
def tensors_of(kind: Any) -> Make:
    """What makes tensors of that dtype, torch's or numpy's: of bytes of a local rank's window, from
    an offset on and in a shape, without a copy. They keep their memory mapped, and hold the lease
    that is passed."""
    torch: Any = importlib.import_module("torch")
    # Capsules need nothing of what torch.from_dlpack does for other objects.
    from_dlpack = getattr(torch._C, "_from_dlpack", torch.utils.dlpack.from_dlpack)
    wanted = getattr(torch, str(kind)) if isinstance(kind, np.dtype) else kind
    known = dtype_name(wanted) in _FORMATS
    code, bits = _FORMATS[dtype_name(wanted) if known else "uint8"]

    def make(
        window: CoreWindow,
        rank: int,
        offset: int,
        shape: tuple[int, ...],
        lease: Lease | None = None,
    ) -> Any:
        return from_dlpack(window.dlpack(rank, offset, shape, code, bits, lease))

    def view_bytes(
        window: CoreWindow,
        rank: int,
        offset: int,
        shape: tuple[int, ...],
        lease: Lease | None = None,
    ) -> Any:
        raw = make(window, rank, offset, (math.prod(shape) * wanted.itemsize,), lease)
        return raw.view(wanted).view(shape)

    return make if known else view_bytes


def dense(what: str, shape: Any, dtype: Any) -> tuple[tuple[int, ...], Any, int]:
    """The shape, the dtype (numpy's or torch's) and the bytes of an array that `what` makes.
    Raises `Error`: invalid for lengths below 0, and for a dtype of no fixed size or of objects."""
    given = shape if isinstance(shape, (list, tuple)) else (shape,)
    lengths = tuple(checked(f"{what}: a length of the shape", length) for length in given)
    try:
        kind = dtype if type(dtype).__module__ == "torch" else np.dtype(dtype)
        itemsize = int(kind.itemsize)
    except (TypeError, ValueError, AttributeError):
        raise error("invalid", f"{what}: {dtype!r} is not a dtype") from None
    if itemsize == 0 or getattr(kind, "hasobject", False):
        raise error("invalid", f"{what}: elements of dtype {kind} have no fixed number of bytes")
    return lengths, kind, checked(f"{what}: bytes", math.prod(lengths) * itemsize)
