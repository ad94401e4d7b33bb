"""NVRTC, CUDA's compiler as a library, as it is found at run time."""

from __future__ import annotations

import ctypes
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from offcore.device import include_path
from offcore.errors import error

REMEDY = "install CUDA's toolkit, or `pip install nvidia-cuda-nvrtc`, of the driver's version"


def _candidates() -> list[str]:
    nvcc = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    places = [one.parent.parent / "lib64" for one in (nvcc, nvcc.resolve())]
    for folder in map(Path, sys.path):
        places += sorted((folder / "nvidia").glob("cu*/lib"), reverse=True)
    found = [str(one) for place in places for one in sorted(place.glob("libnvrtc.so.*[0-9]"))]
    return ["libnvrtc.so.13", "libnvrtc.so.12", *found]


@cache
def library() -> ctypes.CDLL:
    """Raises `Error`: unsupported."""
    for name in _candidates():
        try:
            if "/" in name:  # it asks for these by name alone, and finds them once they are loaded
                for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*[0-9]"):
                    ctypes.CDLL(str(builtins))
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise error("unsupported", f"kernels: libnvrtc was not found: {REMEDY}")


def compile_cubin(source: str, arch: str, include_paths: Sequence[str] = ()) -> bytes:
    """Compiles CUDA C++ for a kind of GPU, of which none need be here. `#include
    <offcore/device.cuh>` is found. arch: as "sm_90". Raises `Error`: unsupported (no NVRTC, or not
    for `arch`), driver with the compiler's log."""
    nvrtc, program, size = library(), ctypes.c_void_p(), ctypes.c_size_t()
    paths = (include_path(), *include_paths)
    options = [f"--gpu-architecture={arch}", "-std=c++17", *(f"-I{one}" for one in paths)]
    given = (ctypes.c_char_p * len(options))(*(one.encode() for one in options))
    made = ctypes.byref(program)
    if nvrtc.nvrtcCreateProgram(made, source.encode(), b"kernels.cu", 0, None, None):
        raise error("driver", "kernels: nvrtcCreateProgram failed")
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise error("driver", f"kernels: NVRTC: {log.value.decode()[:4000]}")
        if nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)):
            raise error("unsupported", f"kernels: this NVRTC makes no code for {arch}: {REMEDY}")
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(made)
