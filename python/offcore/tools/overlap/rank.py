"""The process of one rank of a measurement of overlap, `python -m offcore.tools.overlap.rank`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from offcore.tools.bench.rank_worker import emit, serve
from offcore.tools.overlap import dependent, energy, measure
from offcore.tools.overlap.gpu_stage import GpuStage
from offcore.tools.overlap.host_stage import HostStage
from offcore.tools.overlap.measure import Case, Sweep
from offcore.tools.overlap.stage import Shape, Stage

Job = dict[str, Any]


def _cases(made: Iterable[dict[str, Any]]) -> list[Case]:
    return [Case(**one | {"shape": Shape(*one["shape"])}) for one in made]


def _shapes(made: dict[str, Any]) -> dict[str, Shape]:
    return {name: Shape(*shape) for name, shape in made.items()}


def _stage(job: Job) -> Stage:
    place = job["rank"], job["ranks"]
    if job["backend"] == "cuda":
        return GpuStage(*place, job["folder"], job["sizes"])
    return HostStage(*place, job["store"], job["sizes"])


def _rows(stage: Stage, job: Job) -> Iterator[dict[str, Any]]:
    yield {"stage": {"cores": stage.cores, "machine": stage.machine, "library": stage.library}}
    for name in job["steps"]:
        yield {"step": name}
        for row in _step(name, stage, job):
            yield row
            if stage.elapsed_s() > job["limit_s"]:
                yield {"skipped": f"no time is left for what follows of {name}"}
                break


def _step(name: str, stage: Stage, job: Job) -> Iterator[dict[str, Any]]:
    if name == "curve":
        beside = (stage.cores - one for one in job["cores"])  # what collectives leave
        counts = {*job["gemm_cores"], *beside}
        yield from measure.gemm_curve(stage, _shapes(job["shapes"]), counts)
    elif name == "collectives":
        for op in job["ops"]:
            yield from measure.collective_curve(stage, op, job["curve_sizes"], job["cores"])
    elif name == "run":
        sweep = Sweep(stage, job["cores"], job["idle"], job["limit_s"], tuple(job["runs"]))
        yield from sweep.rows(_cases(job["cases"]), job["strategies"], job["begin"])
    elif name == "matmul":
        yield from dependent.rows(stage, job["dependent"])
    else:
        yield from energy.rows(stage, _cases(job["energy"]), job)


def _measure(job: Job, say: TextIO) -> Callable[[], None]:
    job["limit_s"] -= time.time() - job["started"]  # imports took some
    stage = _stage(job)
    for row in _rows(stage, job):
        if at := row.get("at") or row.get("step"):
            emit(say, {"event": "step", "name": at})
        if "at" not in row:
            emit(say, {"event": "row", "row": row})
    return stage.close


if __name__ == "__main__":
    sys.exit(serve(_measure))
