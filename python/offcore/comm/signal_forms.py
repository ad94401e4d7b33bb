"""Which signal form is safe here: measured once, remembered, and chosen by `signals="auto"`.

A kernel on every GPU reads each chunk the moment its flag is there, while copy engines push chunks
as operations do (studies/proof/stress.h). A form has passed where no word was wrong and
where the planted fault, flags sent before data, was seen. What passed is remembered by driver and
GPU in `signals.json` of the cache folder (OFFCORE_CACHE).
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offcore import _core, defaults, folders
from offcore.errors import error

FORMS = ("fenced", "copy_order")
SHAPES = ("bcst", "fan", "pcpy")
SIZES = (1 << 10, 16 << 10, 64 << 10, 256 << 10)
OPERATIONS = 2000  # of each trial
OPERATIONS_MIN = 500  # that a remembered verdict rests on
_PLANTED = 256
_TRIAL_S = 5.0
_RUN_S = 20.0  # all trials


@dataclass(frozen=True)
class Verdict:
    """What the stress has found of one signal form."""

    driver: str
    gpu: str
    signals: str
    passed: bool
    told: str  # why
    operations: int
    wrong_words: int
    planted_wrong_words: int
    strided: bool  # one copy reaches all GPUs; else rows went one by one
    gpus: int
    date: str


def memory() -> Path:
    """The file of verdicts."""
    return folders.cache() / "signals.json"


def driver_name(facts: dict[str, Any]) -> str:
    """ "580.95.05 (CUDA 13.0)", as far as it is told."""
    cuda = f"CUDA {facts['cuda'] // 1000}.{facts['cuda'] % 1000 // 10}"
    return f"{facts['driver']} ({cuda})" if facts["driver"] else cuda


def remembered() -> list[Verdict]:
    """Every verdict in the cache. Raises `Error`: invalid for a file that makes no sense."""
    file = memory()
    try:
        return [Verdict(**row) for row in json.loads(file.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as failure:
        raise error("invalid", f"{file} cannot be read ({failure}); remove it") from None


def remember(verdicts: Sequence[Verdict]) -> Path:
    """Puts verdicts in the place of older ones of the same driver, GPU and form."""

    def key(verdict: Verdict) -> tuple[str, str, str]:
        return verdict.driver, verdict.gpu, verdict.signals

    file = memory()
    try:
        kept = [old for old in remembered() if key(old) not in map(key, verdicts)]
    except _core.Error:
        kept = []  # what cannot be read is replaced
    rows = json.dumps([asdict(verdict) for verdict in (*kept, *verdicts)], indent=1)
    part = file.with_name(f"signals.{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(rows + "\n", encoding="utf-8")
        part.replace(file)
    except OSError as failure:
        raise error("invalid", f"cannot write {file}: {failure}; see OFFCORE_CACHE") from None
    return file


def choose(facts: dict[str, Any], devices: Sequence[int] = ()) -> tuple[str, str]:
    """What `signals="auto"` is on these GPUs (all by default), and why. Never raises: what is not
    known to be safe is fenced."""
    driver = driver_name(facts)
    gpus = {gpu["name"] for gpu in facts["gpus"] if not devices or gpu["ordinal"] in devices}
    try:
        verdicts = [v for v in remembered() if v.driver == driver and v.signals == "copy_order"]
    except _core.Error as failure:
        return "fenced", str(failure)
    known = {verdict.gpu: verdict for verdict in verdicts}
    for gpu in sorted(gpus):
        if gpu not in known:
            return "fenced", "no stress of this driver and GPU: run offcore doctor --stress"
        if not known[gpu].passed:
            return "fenced", f"the stress of {known[gpu].date} failed: {known[gpu].told}"
    dates = ", ".join(sorted({known[gpu].date for gpu in gpus}))
    return "copy_order", f"the stress of {dates} has passed on this driver and GPU"


def cuda_options(
    backend: str, devices: list[int], signals: str, own_copy: str, sms: int
) -> _core.CudaOptions:
    """A communicator's, with what `auto` is on its GPUs."""
    proven = "fenced"
    if defaults.traits(backend).gpus and signals == "auto":
        with contextlib.suppress(_core.Error):  # opening the backend says what is missing
            proven, _ = choose(_core.cuda_facts(), devices)
    signals, own_copy = str(signals), str(own_copy)  # the core says which there are
    return _core.CudaOptions(
        devices=devices, signals=signals, proven=proven, own_copy=own_copy, sms=max(1, sms)
    )


def _judge(trials: Sequence[_core.StressOutcome], wanted: int, planted: int) -> str:
    """Why the trials of a form have failed, or nothing."""
    if wrong := sum(trial.wrong_words for trial in trials):
        return f"{wrong} wrong words: flags overtook data"
    if any(trial.stuck for trial in trials):
        return "a flag did not come in time"
    if sum(trial.operations for trial in trials) < wanted:
        return "the GPUs did not get through all trials in time"
    if not planted:
        return "the planted fault, flags sent before data, was not seen: the stress proves nothing"
    return ""


def run(
    operations: int = OPERATIONS,
    sizes: Sequence[int] = SIZES,
    step: Callable[[], None] = lambda: None,
) -> list[Verdict]:
    """Stresses the signal forms on all visible GPUs, `step` being called after each of `trials()`.

    Raises `Error`: unavailable, unsupported (fewer than two GPUs, no peer access), driver.
    """
    facts = _core.cuda_facts()
    gpus = facts["gpus"]
    if any(len(gpu["peers"]) < max(1, len(gpus) - 1) for gpu in gpus):
        raise error(
            "unsupported",
            "the stress needs two visible GPUs or more that all reach each "
            "other; offcore doctor says which do",
        )
    end = time.monotonic() + _RUN_S
    stress = _core.Stress([gpu["ordinal"] for gpu in gpus])

    def trial(
        signals: str, shape: str, size: int, count: int, planted: bool = False
    ) -> _core.StressOutcome:
        outcome = stress.run(
            signals=signals,
            shape=shape,
            planted=planted,
            chunk_bytes=size,
            operations=count,
            timeout_s=max(0.1, min(_TRIAL_S, end - time.monotonic())),
        )
        step()
        return outcome

    seen = sum(trial("fenced", "bcst", size, _PLANTED, True).wrong_words for size in sizes)
    verdicts = []
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    for signals in FORMS:
        done: list[_core.StressOutcome] = []
        for shape, size in itertools.product(SHAPES, sizes):
            done.append(trial(signals, shape, size, operations))
            if done[-1].stuck:
                break  # the others would wait as long
        failure = _judge(done, operations * len(done), seen)
        count = sum(one.operations for one in done)
        for name in sorted({gpu["name"] for gpu in gpus}):
            verdict = Verdict(
                driver=driver_name(facts),
                gpu=name,
                signals=signals,
                passed=not failure,
                told=failure or f"{count} operations without a wrong word",
                operations=count,
                wrong_words=sum(one.wrong_words for one in done),
                planted_wrong_words=seen,
                strided=stress.strided,
                gpus=len(gpus),
                date=date,
            )
            verdicts.append(verdict)
    return verdicts


def trials(sizes: Sequence[int] = SIZES) -> int:
    """How many trials `run` makes."""
    return len(sizes) * (1 + len(FORMS) * len(SHAPES))
