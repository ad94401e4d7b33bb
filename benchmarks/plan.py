"""What planning costs: `python benchmarks/plan.py [--json FILE]`.

`plan` is lower, legalize and verify of one collective of 8 ranks (target: under 1 ms); with variant
auto it is preceded by the cost model's choice among all variants. `lookup` is the way of a call to
a plan that is kept: arguments checked, key built and found (target: under 5 us), once with regions
of windows, once with the addresses of arrays, for all 8 ranks. Neither a launch nor numpy is in it.
Each value is the median of many repetitions, the way from Python included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import offcore
from offcore import _core
from offcore.tools.report import JsonLines, Stamp

RANKS = 8
MACHINES = ("mi300x-8", "h200-8", "host-8")
OPS = ("all_gather", "all_to_all")
NBYTES = 1 << 20
Row = dict[str, Any]


def row(metric: str, op: str, variant: str, protocol: str, value_us: float) -> Row:
    return {
        "metric": metric,
        "op": op,
        "ranks": RANKS,
        "bytes": NBYTES,
        "variant": variant,
        "protocol": protocol,
        "value_us": round(value_us, 3),
    }


def median_us(work: Callable[[], object], repetitions: int, calls: int) -> float:
    """Of one call, each repetition timing several."""
    times_ns = []
    for _ in range(repetitions):
        start_ns = time.perf_counter_ns()
        for _ in range(calls):
            work()
        times_ns.append((time.perf_counter_ns() - start_ns) / calls)
    return statistics.median(times_ns) / 1e3


def moves_of(op: str) -> _core.Moves:
    if op == "all_gather":
        return _core.moves_all_gather([NBYTES // RANKS] * RANKS)
    return _core.moves_all_to_all(RANKS, [NBYTES // RANKS // RANKS] * RANKS**2)


def plans(machine: _core.Machine, op: str) -> Iterator[Row]:
    moves = moves_of(op)
    for entering in (_core.Protocol(), _core.Protocol(entry=False, staged=True)):
        for variant in _core.variants_of(moves, entering):
            work = partial(_core.plan, moves, variant, machine, entering)
            yield row("plan", op, variant, str(entering), median_us(work, 100, 1))

    def choose() -> None:
        variant, _ = _core.choose(moves, NBYTES, machine, _core.Protocol())
        _core.plan(moves, variant, machine, _core.Protocol())

    yield row("plan", op, "auto", "barrier", median_us(choose, 50, 1))


def lookups(machine: str, op: str) -> Iterator[Row]:
    with offcore.Communicator(backend="sim", machine=machine, ranks=RANKS) as comm:
        out = comm.window(NBYTES)
        inp = comm.window(NBYTES // RANKS if op == "all_gather" else NBYTES)
        getattr(comm, op)(out, inp, variant="b2b").wait()
        regions = [window.region(0, window.nbytes) for window in (out, inp)]
        addresses = [
            [(window.array(rank).ctypes.data, window.nbytes) for rank in range(RANKS)]
            for window in (out, inp)
        ]
        for metric, (to, of) in (("lookup", regions), ("lookup by address", addresses)):
            work = partial(comm._core.knows, op, to, of, [], "b2b")
            assert work()
            yield row(metric, op, "b2b", "barrier", median_us(work, 100, 1000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there; - is stdout")
    target = parser.parse_args().json
    stamp = asdict(Stamp())
    with JsonLines(target) as lines:
        for name in MACHINES:
            machine = offcore.machines.load(name)
            for op in OPS:
                for found in (*plans(machine, op), *lookups(name, op)):
                    lines.write({"impl": "offcore", "machine": name} | found | stamp)
                    if not lines.to_stdout:
                        what = [found[key] for key in ("metric", "op", "variant", "protocol")]
                        print(f"{name:10} {' '.join(what):45} {found['value_us']:8.2f} us")


if __name__ == "__main__":
    main()
