"""What operations that reduce are given, and what they have to make of it.

Element i of rank r's array is entry x[i] of a table of rank r's own: x is a stream of bytes that a
seed determines. So the result's element i is entry x[i] of one table too, whatever the size, and a
share that comes from a wrong offset, from an earlier call or not at all is seen. Entries are whole
numbers that are exact in the dtype, and so are their sums: the order in which a library adds does
not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

import offcore
from offcore.errors import error

# Bits of a whole number that is exact, and as numpy stores it: it has no bfloat16.
_DTYPES = {
    "int8": (7, "int8"),
    "uint8": (8, "uint8"),
    "int16": (15, "int16"),
    "int32": (31, "int32"),
    "int64": (63, "int64"),
    "float16": (11, "float16"),
    "bfloat16": (8, "uint16"),
    "float32": (24, "float32"),
    "float64": (53, "float64"),
}
DTYPES = tuple(_DTYPES)
REDUCTIONS = ("sum", "avg", "min", "max", "premul_sum")
SCALE = 2.0  # of premul_sum

_ENTRIES = 256
_STEP = 1 << 20  # elements that are looked at together: some caches' worth
_TABLE_SEED = 0x0FFC

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Values:
    dtype: str
    reduction: str

    @cached_property
    def stored(self) -> np.dtype[Any]:
        return np.dtype(_DTYPES[self.dtype][1])

    @property
    def scale(self) -> float:
        return SCALE if self.reduction == "premul_sum" else 1.0

    @property
    def facts(self) -> dict[str, str]:
        """A row's fields."""
        return {"dtype": self.dtype, "reduction": self.reduction}

    def check_bytes(self, nbytes: int) -> None:
        """Raises invalid if that is not a whole number of elements."""
        if nbytes % self.stored.itemsize:
            raise error("invalid", f"{nbytes} bytes are not a whole number of {self.dtype}")

    def fill(self, array: Bytes, first: int, rank: int, ranks: int, seed: int) -> None:
        """Writes elements from `first` on of rank's array."""
        _look_up(self._tables(ranks)[rank], array.view(self.stored), first, seed)

    def wrong(self, array: Bytes, first: int, ranks: int, seed: int) -> int:
        """How many bytes differ from the result's, whose elements from `first` on these are."""
        table, elements, found = self._result(ranks), array.view(self.stored), 0
        right = np.empty(min(_STEP, len(elements)), self.stored)
        for start in range(0, len(elements), _STEP):
            seen = elements[start : start + _STEP]
            _look_up(table, right[: len(seen)], first + start, seed)
            differ = seen.view(np.uint8) != right[: len(seen)].view(np.uint8)
            found += int(np.count_nonzero(differ))
        return found

    def _tables(self, ranks: int) -> Sequence[Array]:
        return _tables(self.dtype, ranks)

    def _result(self, ranks: int) -> Array:
        return _reduced(self.dtype, self.reduction, ranks)


def _look_up(table: Array, elements: Array, first: int, seed: int) -> None:
    stream = np.empty(min(_STEP, len(elements)), np.uint8)
    for start in range(0, len(elements), _STEP):
        part = elements[start : start + _STEP]
        offcore.fill(stream[: len(part)], seed, first + start)
        np.take(table, stream[: len(part)], out=part, mode="clip")


@lru_cache
def _numbers(dtype: str, ranks: int) -> Array:
    """The ranks' tables, as whole numbers: a row a rank."""
    bits = min(_DTYPES[dtype][0], 16)
    random = np.random.default_rng(_TABLE_SEED)
    return random.integers(0, max(2, (1 << bits) // ranks), (ranks, _ENTRIES), np.int64)


@lru_cache
def _tables(dtype: str, ranks: int) -> list[Array]:
    return [_narrowed(row.astype(_wide(dtype)), dtype) for row in _numbers(dtype, ranks)]


@lru_cache
def _reduced(dtype: str, reduction: str, ranks: int) -> Array:
    numbers = _numbers(dtype, ranks).astype(_wide(dtype))
    if reduction == "min":
        return _narrowed(numbers.min(axis=0), dtype)
    if reduction == "max":
        return _narrowed(numbers.max(axis=0), dtype)
    total = numbers.sum(axis=0, dtype=numbers.dtype)
    if reduction == "premul_sum":
        total = total * numbers.dtype.type(SCALE)
    elif reduction == "avg":
        whole = numbers.dtype.kind == "i"
        total = total // ranks if whole else total / numbers.dtype.type(ranks)
    return _narrowed(total, dtype)


def _wide(dtype: str) -> str:
    """What is added in."""
    if "float" not in dtype:
        return "int64"
    return "float64" if dtype == "float64" else "float32"


def _narrowed(numbers: Array, dtype: str) -> Array:
    """Rounded to nearest even."""
    if dtype != "bfloat16":
        return numbers.astype(_DTYPES[dtype][1])
    bits = numbers.view(np.uint32)
    rounded: Array = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded
