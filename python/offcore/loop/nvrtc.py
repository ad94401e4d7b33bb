"""NVRTC, CUDA's compiler as a library, as it is found at run time."""

from __future__ import annotations

import ctypes
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

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
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise error("unsupported", f"loop: libnvrtc was not found: {REMEDY}")


def compile_cubin(text: str, arch: str, include_paths: Sequence[str]) -> bytes:
    """arch: as "sm_90". Raises `Error`: unsupported, or driver with the compiler's log."""
    nvrtc, program, size = library(), ctypes.c_void_p(), ctypes.c_size_t()
    options = [f"--gpu-architecture={arch}", "-std=c++17", *(f"-I{one}" for one in include_paths)]
    given = (ctypes.c_char_p * len(options))(*(one.encode() for one in options))
    made = ctypes.byref(program)
    if nvrtc.nvrtcCreateProgram(made, text.encode(), b"offcore_loop.cu", 0, None, None):
        raise error("driver", "loop: nvrtcCreateProgram failed")
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise error("driver", f"loop: the kernel does not compile: {log.value.decode()[:4000]}")
        if nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)):
            raise error("unsupported", f"loop: this NVRTC makes no code for {arch}: {REMEDY}")
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(made)
