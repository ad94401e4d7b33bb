"""Bytes of L2 and HBM that GEMMs move, by a GPU's hardware counters (ConCCL's figure 6).

NVIDIA's ncu runs counted.py and lists the counters of each kernel as CSV. Caches are empty before a
launch, and clocks are left as they are: of single launches, they are higher than in a long loop.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from offcore import _core, machines
from offcore.errors import error
from offcore.overlap.kernels import Compute
from offcore.tools.bench.rank_processes import environment_of
from offcore.tools.overlap import counted, measured, tabled

METRICS = {
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l2_bytes": "lts__t_bytes.sum",
    "time_us": "gpu__time_duration.sum",
}
LACKING = (0, 8, 16, 32, 64)  # SMs
RUNS = 3
_MODULE = "offcore.tools.overlap.counted"
_PLACES = ("/usr/local/cuda/bin/ncu",)  # besides PATH
_LATE_S = 60  # after the worker's limit: it is about to import torch, or hangs
_TAIL_LINES = 8
# Of ncu's units: bytes and us. Names differ between versions.
_BYTES = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}
_TIMES = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
_UNITS = _BYTES | _TIMES | {f"{unit}econd": scale for unit, scale in _TIMES.items()}
_REFUSED = "ERR_NVGPUCTRPERM"


@dataclass(frozen=True)
class Kernel:
    """As ncu lists it. values: by name of METRICS."""

    name: str
    blocks: int
    values: dict[str, float]


def rows(gemms: Sequence[str], limit_s: float, peaks: Sequence[float]) -> Iterator[dict[str, Any]]:
    """A row a GEMM and number of SMs, and {"skipped": why}, {"failed": why} and {"stage": what}.
    peaks: see tabled.cores_of. Raises `Error`: unavailable where counters cannot be read, timeout,
    and invalid where classes cannot be told for lack of peaks."""
    _core.gpus()  # raises where there is no driver
    tabled.cores_of(machines.for_gpus(1), "cuda", 1, peaks)
    ncu = shutil.which("ncu") or next(filter(os.path.exists, _PLACES), "")
    if not ncu:
        raise error(
            "unavailable",
            "no ncu, which reads the counters: install NVIDIA Nsight Compute (it comes with the "
            "CUDA toolkit) and add its folder to PATH",
        )
    with tempfile.TemporaryDirectory(prefix="offcore-") as made:
        folder = Path(made)
        shapes = {tag: measured.shape_of(tag, 1) for tag in gemms}
        # The small ones first: a limit of time then costs the large ones.
        job = {
            "shapes": dict(sorted(shapes.items(), key=lambda one: math.prod(one[1]))),
            "lacking": LACKING,
            "runs": RUNS,
            "limit_s": limit_s,
        }
        (folder / counted.JOB).write_text(json.dumps(job), "utf-8")
        failure = _run(ncu, folder, limit_s + _LATE_S)
        listed = _read(folder / "log")
        told = [json.loads(line) for line in _read(folder / counted.LAUNCHES).splitlines()]
        refusal = _refusal(told, listed + _read(folder / "output"))
        kernels = kernels_of(listed)
        if not kernels:
            tail = _read(folder / "output").splitlines()[-_TAIL_LINES:]
            raise error("unavailable", "\n  ".join([refusal or failure or "no kernel ran", *tail]))
        yield from rows_of(told, kernels, peaks)
        if refusal or failure:
            yield {"failed": refusal or failure}


def _read(path: Path) -> str:
    return path.read_text("utf-8", "replace") if path.exists() else ""


def _run(ncu: str, folder: Path, limit_s: float) -> str:
    """How it failed; empty: it did not. Raises `Error`: timeout."""
    words = [ncu, "--csv", "--print-units", "base", "--log-file", str(folder / "log")]
    words += ["--metrics", ",".join(METRICS.values())]
    words += ["--profile-from-start", "off", "--target-processes", "all"]
    words += ["--clock-control", "none", "--cache-control", "all"]
    words += [sys.executable, "-m", _MODULE, str(folder)]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment_of({"LC_ALL": "C"}),
            start_new_session=True,  # so that what ncu started ends with it
        )
        try:
            status = process.wait(limit_s)
            return f"ncu exited with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            raise error("timeout", f"ncu has not ended in {limit_s:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _refusal(told: Iterable[Mapping[str, Any]], text: str) -> str:
    """Why nothing, or not all, could be counted."""
    if _REFUSED in text:
        return (
            f"this user may not read the GPU's counters ({_REFUSED}): run as root, in a container "
            "with --cap-add SYS_ADMIN, or load the driver with "
            "NVreg_RestrictProfilingToAdminUsers=0"
        )
    reasons = [one["unavailable"] for one in told if "unavailable" in one]
    reasons += [line for line in text.splitlines() if line.startswith("==ERROR==")]
    return "; ".join(dict.fromkeys(reasons))


def kernels_of(listed: str) -> list[Kernel]:
    """From ncu's CSV (page "details"), in the order of their launches. Raises `Error`: invalid."""
    found: dict[str, Kernel] = {}
    names = {metric: name for name, metric in METRICS.items()}
    lines = [line for line in listed.splitlines() if line.startswith('"')]  # others are messages
    for row in csv.DictReader(lines):
        try:
            name = names.get(row["Metric Name"])
            one = found.setdefault(row["ID"], Kernel(row["Kernel Name"], _blocks(row), {}))
            if name and row["Metric Value"].lower() not in ("n/a", "nan", ""):
                value = float(row["Metric Value"].replace(",", ""))
                one.values[name] = value * _UNITS[row["Metric Unit"]]
        except (KeyError, ValueError, AttributeError) as cause:
            raise error("invalid", f"not ncu's CSV: {cause!r} in {row}") from cause
    return list(found.values())


def _blocks(row: Mapping[str, str]) -> int:
    x, y, z = (int(one.replace(",", "")) for one in row["Grid Size"].strip("() ").split(", "))
    return x * y * z


def _by_launch(kernels: Iterable[Kernel]) -> list[list[Kernel]]:
    """Those behind each marker."""
    found: list[list[Kernel]] = []
    for one in kernels:
        if counted.MARKER in one.name:
            found.append([])
        elif found:
            found[-1].append(one)
    return found


def rows_of(
    told: Sequence[dict[str, Any]], kernels: Iterable[Kernel], peaks: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """told: by counted.py. Raises `Error`: invalid where ncu lists other launches than these."""
    marked = [one for one in told if one.get("marked")]
    groups = _by_launch(kernels)
    if not len(marked) <= len(groups) <= len(marked) + 1:  # one died before it was told
        raise error("invalid", f"ncu lists {len(groups)} launches; there were {len(marked)}")
    launched = dict(zip(map(id, marked), groups, strict=False))
    stage = next(one["stage"] for one in told if "stage" in one)
    cases: dict[tuple[str, int], list[list[Kernel]]] = {}
    first: dict[tuple[str, int], dict[str, Any]] = {}
    for one in told:
        label = f"{one['gemm']} on {one['sms']} SMs" if "sms" in one else ""
        if "sms" not in one:
            yield one
        elif "failed" in one:
            yield {"failed": f"{label}: {one['failed']}"}
        elif lack := _lack(launched[id(one)]):
            yield {"failed": f"{label}: {lack}"}
        else:
            key = one["gemm"], one["sms"]
            first.setdefault(key, one)
            cases.setdefault(key, []).append(launched[id(one)])
    for key, runs in cases.items():
        yield _row(first[key], runs, stage, peaks)


def _lack(kernels: Sequence[Kernel]) -> str:
    if not kernels:
        return "ncu lists no kernel"
    lacking = sorted({METRICS[name] for one in kernels for name in METRICS.keys() - one.values})
    return f"ncu has no value of {', '.join(lacking)}" if lacking else ""


def _row(
    case: Mapping[str, Any],
    runs: Sequence[Sequence[Kernel]],
    stage: Mapping[str, Any],
    peaks: Sequence[float],
) -> dict[str, Any]:
    """Medians of the launches, each of which is the sum of its kernels."""
    values = {
        name: median(sum(one.values[name] for one in kernels) for kernels in runs)
        for name in METRICS
    }
    longest = max(runs[0], key=lambda one: one.values["time_us"])
    dram_bytes = values["dram_read_bytes"] + values["dram_write_bytes"]
    shape = {name: case[name] for name in ("gemm", "m", "n", "k", "sms")}
    kernel = Compute(case["gemm"], 2.0 * case["m"] * case["n"] * case["k"], dram_bytes)
    cores = tabled.cores_of(stage["machine"], "cuda", stage["cores"], peaks)
    return {
        "measure": "counters",
        **shape,
        "every": stage["cores"],
        "runs": len(runs),
        "kernel": longest.name,
        "kernels": len(runs[0]),
        "blocks": longest.blocks,
        **{name: round(value, 3) for name, value in values.items()},
        "dram_gbps": round(dram_bytes / values["time_us"] / 1e3, 1),
        "l2_gbps": round(values["l2_bytes"] / values["time_us"] / 1e3, 1),
        "op_byte": round(kernel.op_to_byte, 1),
        "machine_op_byte": round(cores.op_to_byte, 1),
        "peak_gbps": cores.memory_gbps,
        "bound": cores.bound_of(kernel),
        "bound_by_name": measured.bound_by_name(case["gemm"]),
        "machine": stage["machine"],
        "backend": "cuda",
    }
