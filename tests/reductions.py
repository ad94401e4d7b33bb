"""What reductions have to give, to the bit: sources in rank order, one rounding."""

import numpy as np
from numpy.typing import NDArray

INTEGERS = ["int8", "uint8", "int16", "int32", "int64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
OPS = ["sum", "avg", "premul_sum", "min", "max"]

Array = NDArray[np.generic]


def stored(dtype: str) -> np.dtype:
    """numpy has no bfloat16: its bits, as uint16."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def widened(array: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if dtype == "float16":
        return array.astype(np.float32)
    return array


def narrowed(array: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        bits = array.astype(np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(array), 0x7FFF, rounded).astype(np.uint16)
    with np.errstate(over="ignore"):
        return array.astype(stored(dtype))


def numbers(count: int, dtype: str, seed: int) -> Array:
    """Values whose sums neither overflow nor are exact, where the dtype has rounding."""
    rng = np.random.default_rng(seed)
    if dtype in INTEGERS:
        kind = np.iinfo(dtype)
        return rng.integers(kind.min, kind.max, count, dtype, endpoint=True)
    return narrowed(
        rng.standard_normal(count).astype(np.float64 if dtype == "float64" else np.float32), dtype
    )


def reduced(sources: list[Array], op: str, dtype: str, scale: float = 1.0) -> Array:
    values = [widened(source, dtype) for source in sources]
    if dtype in INTEGERS:
        values = [value.astype(np.int64) for value in values]
        scale = int(scale)
    factor = values[0].dtype.type(scale)
    total = values[0] * factor if op == "premul_sum" else values[0].copy()
    with np.errstate(all="ignore"):
        for value in values[1:]:
            if op == "min":
                total = np.minimum(total, value)
            elif op == "max":
                total = np.maximum(total, value)
            else:
                total = total + (value * factor if op == "premul_sum" else value)
        if op == "avg" and dtype in INTEGERS:
            quotient = np.abs(total) // len(values)
            total = np.where(total < 0, -quotient, quotient)
        elif op == "avg":
            total = total / total.dtype.type(len(values))
        return narrowed(total, dtype)
