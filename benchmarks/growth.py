"""Whether memory and times grow: `python benchmarks/growth.py [--calls N] [--json FILE]`.

`counts` makes all_to_all_v with random counts, as a mixture of experts does: hardly two calls are
alike, so each is planned. `windows` makes a window and drops it, and now and then times calls of a
kept plan. Both on backend host with all ranks in one process. A row holds the process's resident
KiB (of /proc/self/statm) after so many calls, the plans and windows that the communicator keeps,
and the microseconds of a call since the row before. The first tenth fills the plan cache: from then
on the curve has to be flat.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

import offcore
from offcore.tools.report import JsonLines, Stamp

ROWS = 10
COUNT_BYTES_MAX = 4096
TIMED_CALLS = 200
PAGE_KIB = 4
Row = dict[str, Any]


def resident_kib() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE_KIB


def row(name: str, comm: offcore.Communicator, calls: int, call_us: float) -> Row:
    plans, windows = comm._core.kept
    found = {"measure": name, "backend": "host", "ranks": comm.ranks, "calls": calls}
    found |= {"resident_kib": resident_kib(), "plans": plans, "windows": windows}
    return found | {"call_us": round(call_us, 2)}


def counts(calls: int, ranks: int = 8) -> Iterator[Row]:
    random = np.random.default_rng(1)
    with offcore.Communicator(backend="host", ranks=ranks) as comm:
        out, inp = comm.empty(ranks * COUNT_BYTES_MAX), comm.empty(ranks * COUNT_BYTES_MAX)
        for done in range(0, calls, calls // ROWS):
            start_s = time.perf_counter()
            for _ in range(calls // ROWS):
                some = random.integers(0, COUNT_BYTES_MAX, (ranks, ranks)).tolist()
                comm.all_to_all_v(out, inp, some).wait()
            took_us = (time.perf_counter() - start_s) * 1e6 / (calls // ROWS)
            yield row("counts", comm, done + calls // ROWS, took_us)


def windows(calls: int, ranks: int = 2) -> Iterator[Row]:
    with offcore.Communicator(backend="host", ranks=ranks) as comm:
        out, inp = comm.empty(ranks * 8), comm.empty(8)
        for done in range(0, calls, calls // ROWS):
            for _ in range(calls // ROWS):
                comm.window(ranks * 8)
            start_s = time.perf_counter()
            for _ in range(TIMED_CALLS):
                comm.all_gather(out, inp).wait()
            took_us = (time.perf_counter() - start_s) * 1e6 / TIMED_CALLS
            yield row("windows", comm, done + calls // ROWS, took_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000, help="of each measure")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there; - is stdout")
    given = parser.parse_args()
    stamp = asdict(Stamp())
    with JsonLines(given.json) as lines:
        for measure in (counts, windows):
            for found in measure(given.calls):
                lines.write({"impl": "offcore"} | found | stamp)
                if not lines.to_stdout:
                    print(
                        f"{found['measure']:8} {found['calls']:7} calls {found['resident_kib']:7} "
                        f"KiB {found['plans']:5} plans {found['windows']:3} windows "
                        f"{found['call_us']:8.2f} us a call",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
