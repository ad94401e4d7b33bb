"""Joules of a GEMM and a collective by NVML's counter (DMA-Latte's figure 15; ConCCL, VII).

Endless loops of some seconds, read from tick to tick of the counter; the strategies take turns, and
what an idle GPU draws is taken off. All values are of one GPU, the mean of all ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from offcore.tools.overlap.measure import Case, too_large
from offcore.tools.overlap.stage import ENGINES, GEMM, KERNEL, Part, Stage


def _loops(case: Case, rp: int, cores: int) -> dict[str, list[Part]]:
    gemm = Part(GEMM)
    kernel, engines = (Part(what, case.op, case.nbytes) for what in (KERNEL, ENGINES))
    return {
        "gemm": [gemm],
        "kernel": [kernel],
        "engines": [engines],
        "base": [gemm, kernel],
        "sp": [replace(kernel, urgent=True), gemm],
        "rp": [Part(GEMM, cores=cores - rp), replace(kernel, cores=rp)],
        "ConCCL": [gemm, replace(engines, urgent=True)],
    }


def rows(stage: Stage, cases: Sequence[Case], job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row a strategy, and {"at": what} before each loop, since a case may take minutes."""
    seconds, trials = job["energy_s"], job["trials"]
    idle = stage.energy([], seconds)
    if not idle:
        yield {"skipped": "energy: nothing counts it here"}
        return
    for case in cases:
        if reason := too_large(stage, case.op, case.nbytes):
            yield {"skipped": f"energy {case.op} {case.gemm} {case.nbytes}: {reason}"}
            continue
        names = job["loops"]
        if case.gemm:
            stage.prepare(case.shape)
        else:
            names = ("kernel", "engines")
        loops = _loops(case, job["energy_cores"], stage.cores)
        wanted = {name: loops[name] for name in names}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in wanted}
        for _ in range(trials):
            for name, parts in wanted.items():
                if stage.elapsed_s() + seconds > job["limit_s"]:
                    yield {"skipped": f"energy: no time is left for {name}"}
                    continue
                yield {"at": f"joules of {name}"}
                found[name].append(stage.energy(parts, seconds))
        for name, measured in found.items():
            if measured:
                yield _row(stage, case, name, measured, idle["watts"])


def _row(
    stage: Stage, case: Case, name: str, measured: Sequence[dict[str, float]], idle_w: float
) -> dict[str, Any]:
    """joules: of a run, without what the GPU draws after the loop until the counter ticks."""
    each = [
        (one["joules"] - idle_w * (one["counted_s"] - one["busy_s"])) / one["runs"]
        for one in measured
    ]
    times = [one["busy_s"] / one["runs"] for one in measured]
    joules, time_s = statistics.median(each), statistics.median(times)
    return {
        "measure": "energy",
        "gemm": case.gemm,
        "op": case.op,
        "bytes": case.nbytes,
        "strategy": name,
        "ranks": stage.ranks,
        "machine": stage.machine,
        "backend": stage.backend,
        "trials": len(measured),
        "time_us": round(time_s * 1e6, 1),
        "joules": round(joules, 4),
        "joules_least": round(min(each), 4),
        "joules_most": round(max(each), 4),
        "joules_a_gb": None if case.gemm else round(joules / case.nbytes * 1e9, 4),
        "joules_above_idle": round(joules - idle_w * time_s, 4),
        "watts": round(joules / time_s, 1),
        "idle_watts": round(idle_w, 1),
        "sm_mhz": round(statistics.median(one["sm_mhz"] for one in measured)),
    }
