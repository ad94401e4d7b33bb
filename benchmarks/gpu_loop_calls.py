"""What the CPU calls while loop kernels run: a step of gpu_proof.py, which says what it proves.

Both ranks' loops, all-reduces of 64 KiB without an end, run in this process. CUPTI's recorder
(cupti_channels.cpp) notes every call of CUDA's functions by any of its threads, and every kernel.
Marks are times by its clock, since nothing can wait for the GPUs meanwhile.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gpu_loop import all_reduce, expected

import offcore
from offcore import loop

NBYTES = 64 << 10
SECONDS = 0.3
LAUNCHED = 20  # iterations of the control
CONTROL = "control: launched"


@dataclass
class Span:
    """A time, and the iterations of each rank in it. ns by the recorder's clock."""

    engine: str
    began: int
    ended: int
    iterations: list[int]


def spans(library: ctypes.CDLL) -> Iterator[tuple[Span, bool]]:
    """Of both engines and of a control; whether the bytes were right."""
    library.cupti_now.restype = ctypes.c_uint64
    count = NBYTES // 4
    with offcore.Communicator(backend="cuda", ranks=2, timeout=20) as comm:
        windows = [comm.window(NBYTES) for _ in range(2)]
        for engine in ("proxy", "armed"):
            graphs = [all_reduce(rank, count) for rank in range(2)]
            with loop.Loop(
                comm, graphs, buffers=windows, engine=engine, limit=5.0, spin=5.0
            ) as made:
                data = [np.arange(count, dtype=np.uint32) * (3 + rank) for rank in range(2)]
                for rank, graph in enumerate(graphs):
                    made.write(graph.buffers["data"][:], data[rank], rank)
                made.start()
                time.sleep(SECONDS / 3)
                span = Span(engine, library.cupti_now(), 0, [made.begun(rank) for rank in range(2)])
                time.sleep(SECONDS)
                for rank in range(2):
                    span.iterations[rank] = made.begun(rank) - span.iterations[rank]
                span.ended = library.cupti_now()
                time.sleep(SECONDS / 3)
                ended = made.stop()
                want = expected("all-reduce", data, ended)
                got = [made.read(graphs[rank].buffers["data"][:], rank) for rank in range(2)]
                yield span, all(map(np.array_equal, got, want))
                if engine == "proxy":
                    span = Span(CONTROL, library.cupti_now(), 0, [LAUNCHED] * 2)
                    made.run(LAUNCHED, launched=True)
                    span.ended = library.cupti_now()
                    yield span, True
        if library.cupti_mark(b"end") != 0:  # while there are contexts
            raise RuntimeError("CUPTI's recorder could not write its records")


def record(library: ctypes.CDLL, folder: Path) -> list[str]:
    """What is wrong; nothing: proven."""
    if library.cupti_calls() != 0:
        return ["CUPTI does not record calls"]
    found = list(spans(library))
    lines = (folder / "cupti.jsonl").read_text("utf-8").splitlines()
    wrong = [f"{span.engine}: wrong bytes" for span, right in found if not right]
    return wrong + judge_calls(lines, [span for span, _ in found])


def judge_calls(lines: list[str], found: list[Span]) -> list[str]:
    """What the records of these times show that should not be. Prints a line for each."""
    records = [json.loads(line) for line in lines]
    failures = [f"CUPTI lost {one['count']} records" for one in records if one["kind"] == "lost"]
    for span in found:
        within = [one for one in records if span.began <= one.get("start", 0) <= span.ended]
        calls = Counter(one["name"] for one in within if one["kind"] == "call")
        launches = sum(n for name, n in calls.items() if "Launch" in name)
        copies = sum(n for name, n in calls.items() if "Memcpy" in name)
        begun = sum(one["kind"] == "kernel" for one in within)
        through = [one for one in records if covers(one, span)]
        told = asdict(span) | {"launches": launches, "kernels begun": begun, "copies": copies}
        told |= {"kernels throughout": [one["name"] for one in through], "calls": dict(calls)}
        del told["began"], told["ended"]
        print(json.dumps(told), flush=True)
        failures += [f"{span.engine}: {one}" for one in faults(span, told)]
    return failures


def covers(one: dict[str, Any], span: Span) -> bool:
    through: bool = one["kind"] == "kernel" and one["start"] < span.began < span.ended < one["end"]
    return through


def faults(span: Span, told: dict[str, Any]) -> list[str]:
    if span.engine == CONTROL:
        seen = told["launches"] >= LAUNCHED and told["kernels begun"] >= LAUNCHED
        return [] if seen else ["launches were not seen that there were"]
    wrong = []
    if min(span.iterations) < 100:
        wrong.append(f"only {min(span.iterations)} iterations")
    if told["launches"] or told["kernels begun"]:
        wrong.append(f"{told['launches']} launches, {told['kernels begun']} kernels begun")
    if told["kernels throughout"] != ["offcore_loop"] * 2:
        wrong.append(f"kernels that ran throughout: {told['kernels throughout']}")
    if not told["copies"]:
        wrong.append("no call of a copy was seen, though the host submits them")
    return wrong
