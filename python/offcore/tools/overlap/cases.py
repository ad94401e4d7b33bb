"""Tables I and II of ConCCL: GEMMs, and the sizes of collectives beside them.

A combination is a GEMM's tag and a size, `cb1_896M`. A size is the whole array.
"""

from __future__ import annotations

import re

OPS = ("all_gather", "all_to_all")
# Table I: m x n x k; the first letters are the paper's measured class.
GEMMS = {
    "cb1": (8192, 8192, 8192),
    "cb2": (16384, 8192, 16384),
    "cb3": (16384, 16384, 8192),
    "cb4": (18432, 8192, 16384),
    "cb5": (106496, 8192, 16384),
    "mb1": (8192, 57344, 8192),
    "mb2": (16384, 106496, 8192),
}
_MIB = 1 << 20
# Table II, by type. 1.63G and 3.25G are arrays of 16384 x 53248 and of 16384 x 106496.
KINDS = {
    "G-long": (
        *("mb1_896M", "mb2_3.25G", "mb1_4G", "mb1_6G"),
        *("cb3_512M", "cb4_512M", "cb5_1.63G", "cb4_1G"),
    ),
    "C-long": ("mb1_13G", "cb2_3.25G", "cb4_2.5G", "cb1_896M", "cb5_20G"),
    "GC-equal": ("mb2_26.5G", "cb5_13G"),
}
COMBINATIONS = {tag: kind for kind, tags in KINDS.items() for tag in tags}
_ROUNDED = {"1.63G": 1664 * _MIB}


def size_of(text: str) -> int:
    """`896M` or `3.25G` in bytes. Raises ValueError."""
    if text in _ROUNDED:
        return _ROUNDED[text]
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG])", text)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"'{text}' is not a size: write 896M or 3.25G")
    return int(float(match[1]) * {"K": 1 << 10, "M": _MIB, "G": 1 << 30}[match[2]])


def split_tag(tag: str) -> tuple[str, int]:
    """`cb1_896M` as a GEMM's tag and bytes. Raises ValueError."""
    gemm, _, size = tag.partition("_")
    if gemm not in GEMMS:
        raise ValueError(f"'{tag}': write GEMM_SIZE, where GEMM is one of {', '.join(GEMMS)}")
    return gemm, size_of(size)
