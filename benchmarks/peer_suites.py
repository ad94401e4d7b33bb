"""Other people's tests of torch.distributed, with the backend "offcore" and with torch's own.

    python benchmarks/peer_suites.py [--suites ...] [--tests WORDS] [--ranks N] [--record FILE]
    python benchmarks/peer_suites.py --jobs 6 --limit 300    # so many tests at once, for 300 s
    python benchmarks/peer_suites.py --nccl-tests FOLDER

distributed: torch/testing/_internal/distributed/distributed_test.py of torch's wheel. It skips what
a backend of an unknown name might not do, so it is told that it runs with torch's own both times,
and the default group is made with the backend.
dtensor, fsdp: tests on the bases that the wheel has for them (peer_bases.py).
accelerate: `test_ops` and `test_script` of the package, by torchrun, a test each.

torch's own backend is NCCL where there are as many GPUs as ranks, else gloo, on CPU tensors. One
after the other; prints for each what passed, failed and was skipped, and the tests that differ.

Ranks are processes that run one test after the other, each with a default group of its own. A test
that fails, takes more than 30 s or ends a rank ends all of them, and is tried once more with fresh
ones. That outcome counts, so no test fails for what others left in its processes; the first failure
is listed. Tests that end a process on purpose have fresh ranks at once, and so has what follows.

Needs `pip install expecttest accelerate`. --nccl-tests runs the programs of nccl-tests in that
folder beside the same through the NCCL shim (gpu_nccl_shim.py): needs GPUs.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SUITES = ("distributed", "dtensor", "fsdp", "accelerate")
SCRIPTS = ("test_ops", "test_script")  # accelerate's
SCRIPT_LIMIT_S = 300
OPTIONS = ("SUITE_BACKEND", "WORLD_SIZE", "MASTER_ADDR", "BACKEND")
Found = dict[str, dict[str, str]]  # of each test: its outcome, reason, and first failure


def begin_with_backend() -> None:
    """From now on default groups have the backend of the environment, whatever they ask for."""
    import torch.distributed as dist

    import offcore.distributed  # noqa: F401  # registers the backend

    begin = dist.init_process_group

    def begin_with(backend: str | None = None, **options: Any) -> None:
        begin(os.environ["SUITE_BACKEND"], **options)

    dist.init_process_group = begin_with


def run_script(name: str) -> None:
    """A script of accelerate's, in a process that torchrun has started."""
    begin_with_backend()
    runpy.run_module(f"accelerate.test_utils.scripts.{name}", run_name="script")["main"]()


class Outcome(unittest.TestResult):
    """One word and the reason for a test."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.reason = "failed", "it did not end"

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self.word, self.reason = "passed", ""

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self.word, self.reason = "skipped", reason

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        told = "".join(traceback.format_exception(*err))
        errors = re.findall(r"^\w*(?:Error|Exception): .*(?:\n+Expected .*)?", told, re.M)
        self.word, self.reason = "failed", " ".join((errors or [told[-300:]])[-1].split())

    addFailure = addError  # noqa: N815


def run_here(args: argparse.Namespace) -> None:
    """Runs the tests that no other job has begun; a line of JSON for each on stdout."""
    import peer_bases

    for suite in [peer_bases.SUITES[name] for name in args.suites if name in peer_bases.SUITES]:
        for name in unittest.defaultTestLoader.getTestCaseNames(suite):
            if args.tests and not any(word in name for word in args.tests):
                continue
            try:
                (args.here / name).touch(exist_ok=False)
            except FileExistsError:
                continue
            began = time.monotonic()
            found = run_test(suite, name, args.until)
            took = round(time.monotonic() - began, 1)
            print(json.dumps([name, *(word[:300] for word in found), took]), flush=True)
    peer_bases.end_ranks()


def run_test(suite: type[unittest.TestCase], name: str, until: float) -> tuple[str, str, str]:
    """What became of it, why, and why it failed with ranks that had run others."""
    import peer_bases

    if name in peer_bases.CRASHING:
        peer_bases.end_ranks()
        found = attempt(suite, name, until)
        peer_bases.end_ranks()
        return *found, ""
    word, reason = attempt(suite, name, until)
    if word != "failed":
        return word, reason, ""
    return *attempt(suite, name, until), reason


def attempt(suite: type[unittest.TestCase], name: str, until: float) -> tuple[str, str]:
    import peer_bases

    left_s = until - time.monotonic()
    if left_s < 0:
        return "not run", ""
    peer_bases.limit(left_s)
    outcome = Outcome()
    unittest.TestSuite([suite(name)]).run(outcome)
    if outcome.word == "failed":
        peer_bases.end_ranks()
        if time.monotonic() > until:
            return "not run", ""
    return outcome.word, outcome.reason


def own(ranks: int) -> str:
    """torch's own backend."""
    import torch

    return "nccl" if torch.cuda.device_count() >= ranks else "gloo"


def run_scripts(backend: str, ranks: int, until: float) -> Found:
    """What became of accelerate's scripts."""
    found: Found = {}
    env = os.environ | {
        "SUITE_BACKEND": backend,
        "ACCELERATE_USE_CPU": str(int(own(ranks) == "gloo")),
    }
    for name in SCRIPTS:
        began = time.monotonic()
        words = ["torch.distributed.run", "--nproc-per-node", str(ranks), __file__, "--script"]
        with subprocess.Popen(
            [sys.executable, "-m", *words, name],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                _, told = process.communicate(timeout=max(0, min(SCRIPT_LIMIT_S, until - began)))
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun then ends its ranks
                _, told = process.communicate()
        errors = re.findall(r"\w*(?:Error|Exception): .*", told)
        outcome = "failed" if process.returncode else "passed"
        reason = errors[0][:300] if process.returncode and errors else ""
        if process.returncode and time.monotonic() > until:
            outcome, reason = "not run", ""
        note(found, backend, f"accelerate {name}", outcome, reason, "", time.monotonic() - began)
    return found


def note(
    found: Found, backend: str, name: str, outcome: str, reason: str, first: str, took: float
) -> None:
    found[name] = {"outcome": outcome, "reason": reason, "first": first}
    print(f"{backend:8} {outcome:8} {took:5.1f} s  {name}", flush=True)


def run_job(backend: str, ranks: int, until: float, folder: str) -> Found:
    """What became of the tests that this job began, of all that are asked for."""
    found: Found = {}
    given = (backend, str(ranks), "127.0.0.1", own(ranks))
    env = os.environ | dict(zip(OPTIONS, given, strict=True))
    env["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), env.get("PYTHONPATH", "")))
    env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # or asking for GPUs starts CUDA before the fork
    command = [sys.executable, *sys.argv, "--here", folder, "--until", str(until)]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('["test_'):  # else a test's own words
                note(found, backend, *json.loads(line))
    if process.returncode:
        raise SystemExit(f"the tests with {backend} ended with {process.returncode}")
    return found


def run_backend(backend: str, args: argparse.Namespace, until: float) -> Found:
    """What became of each test."""
    found: Found = {}
    if set(args.suites) != {"accelerate"}:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
            jobs = [
                pool.submit(run_job, backend, args.ranks, until, folder) for _ in range(args.jobs)
            ]
            for job in jobs:
                found |= job.result()
    if "accelerate" in args.suites:
        found |= run_scripts(backend, args.ranks, until)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", nargs="*", default=[], help="only those with one of these words")
    parser.add_argument("--backends", nargs="*", help="by default torch's own, and offcore")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1, help="tests at once")
    parser.add_argument(
        "--limit",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="of the whole: what has not ended then is counted as not run",
    )
    parser.add_argument("--record", type=Path, help="where the outcome is written, as text")
    parser.add_argument("--suites", nargs="*", default=SUITES, choices=SUITES)
    parser.add_argument("--nccl-tests", type=Path, help="where its built programs are")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--script", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here or args.script:
        run_here(args) if args.here else run_script(args.script)
        return
    if args.nccl_tests:
        shim = Path(__file__).with_name("gpu_nccl_shim.py")
        command = [sys.executable, str(shim), "--nccl-tests", str(args.nccl_tests)]
        raise SystemExit(subprocess.run(command).returncode)
    for package in ("expecttest", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise SystemExit("these tests need packages: pip install expecttest accelerate")
    head = [*header(args.ranks)]  # the commit that runs, whatever is edited meanwhile
    until = time.monotonic() + args.limit
    found: dict[str, Found] = {}
    took = {}
    for backend in args.backends or (own(args.ranks), "offcore"):
        began = time.monotonic()
        found[backend] = run_backend(backend, args, until)
        took[backend] = time.monotonic() - began
    lines = [*summary(found, took)]
    print("\n".join(lines))
    if args.record:
        args.record.write_text("\n".join([*head, *lines, *passed(found)]) + "\n")


def summary(found: dict[str, Found], took: dict[str, float]) -> Iterator[str]:
    for backend, tests in found.items():
        again = " only in fresh processes"  # what passed there after it had failed
        counts = collections.Counter(
            one["outcome"] + again * bool(one["first"] and one["outcome"] == "passed")
            for one in tests.values()
        )
        told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        yield f"{backend}: {len(tests)} tests, {told}, in {took[backend]:.0f} s"
    for backend, tests in found.items():
        reasons = collections.Counter(
            one["reason"] for one in tests.values() if one["outcome"] == "skipped"
        )
        yield f"skipped with {backend}, by reason:"
        for reason, count in sorted(reasons.items(), key=lambda one: (-one[1], one[0])):
            yield f"  {count:3} {reason}"
    for backend, tests in found.items():
        yield f"failed with {backend} before they ran in fresh processes:"
        for name, one in sorted(tests.items()):
            if one["first"] and one["outcome"] != "failed":
                yield f"  {name}, then {one['outcome']}: {one['first']}"
    yield "failed with each:"
    ran: dict[str, Found] = collections.defaultdict(dict)
    for backend, tests in found.items():
        for name, one in tests.items():
            if one["outcome"] != "not run":
                ran[name][backend] = one
    for name, outcomes in sorted(ran.items()):
        if all(one["outcome"] == "failed" for one in outcomes.values()):
            yield f"  {name}: {[*outcomes.values()][-1]['reason']}"
    yield "tests that differ:"
    for name, outcomes in sorted(ran.items()):
        if len({one["outcome"] for one in outcomes.values()}) > 1:
            yield f"  {name}"
            for backend, one in outcomes.items():
                yield f"    {backend}: {one['outcome']} {one['reason']}".rstrip()


def header(ranks: int) -> Iterator[str]:
    from offcore.tools.report import Stamp

    plain = own(ranks)
    place = "CPU tensors" if plain == "gloo" else "GPUs"
    yield f"torch's and accelerate's tests with {ranks} ranks on {place}, over {plain} and offcore"
    yield f"command: python benchmarks/peer_suites.py {' '.join(sys.argv[1:])}"
    yield from (f"{name}: {value}" for name, value in vars(Stamp()).items())
    yield ""


def passed(found: dict[str, Found]) -> Iterator[str]:
    last = [*found][-1]
    names = [name for name, one in found[last].items() if one["outcome"] == "passed"]
    yield f"passed with {last}:"
    yield from (f"  {name}" for name in sorted(names))


if __name__ == "__main__":
    main()
