"""What a call costs the host where caches hold other things, as between the kernels of a training
step; and what it is made of: for submit.py.

A call's own part is hard to time on a busy machine, so its parts are counted too: calls of the
driver (by the stand-in), frames of Python, and allocations, of which the stand-in's own are some.
"""

from __future__ import annotations

import ast
import ctypes
import difflib
import email.message
import fractions
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

EVICTED = 64 << 20  # bytes that are touched
ROUNDS = 25
COUNTED = 8  # of its calls the least are told: threads of others allocate at times
ROOT = Path(__file__).parents[1]
DRIVER = ROOT / "core" / "backend" / "cuda" / "driver.h"
OWN = (str(ROOT / "benchmarks"), str(ROOT / "tests"))  # whose frames do not count
COUNTER = r"""
#include <stddef.h>
extern void *__libc_malloc(size_t);
static __thread unsigned long count __attribute__((tls_model("initial-exec")));
void *malloc(size_t size) { ++count; return __libc_malloc(size); }
unsigned long allocations(void) { return count; }
"""


def counter(folder: Path) -> Path:
    """A library to be loaded first, which counts a thread's allocations."""
    source, library = folder / "count.c", folder / "libcount.so"
    source.write_text(COUNTER, "utf-8")
    command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([*command, str(source)], check=True, timeout=60)
    return library


class Evictor:
    """Fills the caches with other data and other code."""

    def __init__(self) -> None:
        import numpy as np

        self.memory = np.zeros(EVICTED, np.uint8)
        self.source = Path(textwrap.__file__).read_text("utf-8")

    def __call__(self) -> None:
        self.memory[::64] += 1
        tree = ast.parse(self.source)
        compile(tree, "none", "exec")
        names = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})
        re.purge()
        re.findall(r"(\w+)\((.*?)\)", self.source[:4000])
        json.loads(json.dumps({name: [*name] for name in names}))
        difflib.get_close_matches("wrapped", names)
        message = email.message.EmailMessage()
        message["Subject"] = "none"
        message.set_content(self.source[:500])
        message.as_string()
        sum(fractions.Fraction(1, n) for n in range(1, 20))


class Counts:
    """Of one call each: the driver's, by name; Python's frames; allocations."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL(os.environ["OFFCORE_LIBCUDA"])
        self.driver.fakecuda_calls.restype = ctypes.c_uint64
        self.names = re.findall(r"X\((cu\w+),", DRIVER.read_text("utf-8"))
        self.heap = ctypes.CDLL(None).allocations
        self.heap.restype = ctypes.c_ulong

    def driver_calls(self) -> dict[str, int]:
        return {name: self.driver.fakecuda_calls(name.encode()) for name in self.names}

    def of(self, call: Callable[[], Any]) -> tuple[dict[str, int], int, int, Any]:
        before = self.driver_calls()
        allocated = self.heap()
        kept = call()
        allocated = self.heap() - allocated
        after = self.driver_calls()
        frames = 0

        def hear(frame: Any, event: str, _: Any) -> None:
            nonlocal frames
            frames += event == "call" and not frame.f_code.co_filename.startswith(OWN)

        sys.setprofile(hear)
        again = call()
        sys.setprofile(None)
        changed = {name: after[name] - count for name, count in before.items()}
        return {k: v for k, v in changed.items() if v}, frames, allocated, (kept, again)


def measure(
    calls: dict[str, Callable[[], Any]], together: Callable[[], None], told: bool
) -> dict[str, list[float]]:
    """Each call's least and median us of CPU time, driver calls, frames, allocations."""
    evict, counts = Evictor(), Counts()
    found: dict[str, list[float]] = {}
    for name, call in calls.items():
        times = []
        for _ in range(ROUNDS):
            together()
            evict()
            began = time.thread_time_ns()
            kept = call()
            times.append((time.thread_time_ns() - began) / 1e3)
            kept.wait()
        rows = []
        for _ in range(COUNTED):
            together()
            by_name, frames, allocated, handles = counts.of(call)
            for one in handles:
                one.wait()
            rows.append((by_name, frames, allocated))
        by_name, frames, _ = min(rows, key=lambda row: (sum(row[0].values()), row[2]))
        times.sort()
        found[name] = [times[0], times[len(times) // 2]]
        found[name] += [sum(by_name.values()), frames, min(row[2] for row in rows)]
        if told:
            listed = ", ".join(f"{name} {count}" for name, count in sorted(by_name.items()))
            print(f"# {name}: {listed}", file=sys.stderr, flush=True)
    return found
