"""GEMMs that a profiler counts, one at a time: `python -m offcore.tools.overlap.counted FOLDER`.

Reads FOLDER/job.json and tells of each launch in FOLDER/launches.jsonl. Each stands behind a marker
kernel, because a GEMM may be several kernels; only these two are profiled.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from offcore import machines
from offcore.overlap.sms import sms_for_gemms

JOB, LAUNCHES = "job.json", "launches.jsonl"
MARKER = "spin_kernel"  # torch.cuda._sleep
_TOLD = 300  # characters of a failure


def launches(torch: Any, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row a launch, "marked" if the marker ran; also {"stage"}, {"failed"} and {"skipped"}."""
    began = time.monotonic()
    every = torch.cuda.get_device_properties(0).multi_processor_count
    yield {"stage": {"cores": every, "machine": machines.for_gpus(1)}}
    for name, (m, n, k) in job["shapes"].items():
        case = {"gemm": name, "m": m, "n": n, "k": k}
        operands = None  # of the GEMM before
        try:
            operands = _operands(torch, m, n, k)
        except Exception as cause:  # whatever torch raises: the others can be counted
            yield {"failed": f"{name}: {_why(cause)}"}
            continue
        for lacking in job["lacking"]:
            for _ in range(job["runs"]):
                if time.monotonic() - began > job["limit_s"]:
                    yield {"skipped": f"no time is left for {name} and what follows"}
                    return
                yield case | {"sms": every - lacking} | _launched(torch, operands, every, lacking)


def _operands(torch: Any, m: int, n: int, k: int) -> tuple[Any, Any, Any]:
    """Multiplied once, so that libraries have loaded what they need."""
    made = {"device": "cuda", "dtype": torch.bfloat16}
    a, b = torch.randn(m, k, **made), torch.randn(k, n, **made)
    out = torch.empty(m, n, **made)
    torch.mm(a, b, out=out)
    torch.cuda.synchronize()
    return a, b, out


def _launched(
    torch: Any, operands: tuple[Any, Any, Any], every: int, lacking: int
) -> dict[str, Any]:
    a, b, out = operands
    told: dict[str, Any] = {"marked": False}
    torch.cuda.profiler.start()
    try:
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        told["marked"] = True
        with sms_for_gemms(torch, every - lacking if lacking else None):
            torch.mm(a, b, out=out)
        torch.cuda.synchronize()
    except Exception as cause:
        told["failed"] = _why(cause)
    torch.cuda.profiler.stop()
    return told


def _why(cause: Exception) -> str:
    return f"{type(cause).__name__}: {str(cause)[:_TOLD]}"


def serve(folder: Path, load: Callable[[], Any]) -> None:
    """load: gives torch."""
    with (folder / LAUNCHES).open("w", encoding="utf-8") as told:
        try:
            torch = load()
            torch.cuda.init()
        except Exception as cause:
            told.write(json.dumps({"unavailable": _why(cause)}) + "\n")
            return
        for row in launches(torch, json.loads((folder / JOB).read_text("utf-8"))):
            told.write(json.dumps(row) + "\n")
            told.flush()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), lambda: importlib.import_module("torch"))
