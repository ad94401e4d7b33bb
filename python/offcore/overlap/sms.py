"""How many SMs the GEMMs of torch take."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offcore.errors import error

_LIBRARY = r"\S*/libcublas\.so\S*"


@functools.cache  # but for failures
def _target() -> Any:
    """Of the cuBLAS that torch has loaded, which is the one that its handles belong to."""
    found = re.search(_LIBRARY, Path("/proc/self/maps").read_text("utf-8"))
    if found is None:
        raise error("unavailable", "no cuBLAS is loaded: install a CUDA build of torch")
    return ctypes.CDLL(found[0]).cublasSetSmCountTarget


@contextlib.contextmanager
def sms_for_gemms(torch: Any, sms: int | None) -> Iterator[None]:
    """Within it cuBLAS starts its kernels for so many SMs, in this thread; None: for all.

    Persistent kernels, as on Hopper, then have as many blocks; the rest of the SMs is free for
    others. Raises `Error`: unavailable where no cuBLAS is loaded, driver where it refuses.
    """
    if sms is None:
        yield
        return
    target = _target()
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    if status := target(handle, ctypes.c_int(sms)):
        raise error("driver", f"cublasSetSmCountTarget({sms}) returned status {status}")
    try:
        yield
    finally:
        target(handle, ctypes.c_int(0))
