"""Other people's tests of torch.distributed, with the backend "offcore" and with torch's own.

    python benchmarks/peer_suites.py [--suites ...] [--tests WORDS] [--ranks N] [--record FILE]
    python benchmarks/peer_suites.py --jobs 8      # so many tests at once
    python benchmarks/peer_suites.py --nccl-tests FOLDER

distributed: torch/testing/_internal/distributed/distributed_test.py of torch's wheel. It skips what
a backend of an unknown name might not do, so it is told that it runs with torch's own both times,
and the default group is made with the backend.
dtensor, fsdp: tests on the bases that the wheel has for them (peer_bases.py).
accelerate: `test_ops` and `test_script` of the package, by torchrun, a test each.

torch's own backend is NCCL where there are as many GPUs as ranks, else gloo, on CPU tensors. One
after the other; prints for each what passed, failed and was skipped, and the tests that
differ. Ranks are processes of their own, forked from one that has imported torch. Needs `pip
install expecttest accelerate`; takes three minutes for each backend. --nccl-tests runs the programs
of nccl-tests in that folder beside the same through the NCCL shim (gpu_nccl_shim.py): needs GPUs.
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
OPTIONS = ("SUITE_BACKEND", "WORLD_SIZE", "TEMP_DIR", "MASTER_ADDR", "BACKEND")


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


class Outcomes(unittest.TestResult):
    """One word and the reason for each test."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[str, str]] = {}
        self._began = 0.0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self._began = time.monotonic()

    def _note(self, test: unittest.TestCase, outcome: str, reason: str) -> None:
        name = test.id().rpartition(".")[2]
        self.found[name] = (outcome, reason)
        took = time.monotonic() - self._began
        print(json.dumps([name, outcome, reason[:300], round(took, 1)]), flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._note(test, "passed", "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._note(test, "skipped", reason)

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        told = "".join(traceback.format_exception(*err))
        errors = re.findall(r"^\w*(?:Error|Exception): .*", told, re.M)
        self._note(test, "failed", errors[-1] if errors else told[-300:])

    addFailure = addError  # noqa: N815


def run_here(suite_name: str, words: list[str], share: str) -> None:
    """Runs the tests in this process, every n-th from the k-th on for share "k/n"; a line of JSON
    for each on stdout."""
    import peer_bases

    suite = peer_bases.SUITES[suite_name]
    names = unittest.defaultTestLoader.getTestCaseNames(suite)
    chosen = [name for name in names if not words or any(word in name for word in words)]
    first, step = map(int, share.split("/"))
    chosen = chosen[first::step]
    unittest.TestSuite(suite(name) for name in chosen).run(Outcomes())


def own(ranks: int) -> str:
    """torch's own backend."""
    import torch

    return "nccl" if torch.cuda.device_count() >= ranks else "gloo"


def run_scripts(backend: str, ranks: int) -> dict[str, dict[str, Any]]:
    """What became of accelerate's scripts."""
    found = {}
    env = os.environ | {
        "SUITE_BACKEND": backend,
        "ACCELERATE_USE_CPU": str(int(own(ranks) == "gloo")),
    }
    for name in SCRIPTS:
        began = time.monotonic()
        words = ["torch.distributed.run", "--nproc-per-node", str(ranks), __file__, "--script"]
        done = subprocess.run(
            [sys.executable, "-m", *words, name],
            env=env,
            capture_output=True,
            text=True,
            timeout=SCRIPT_LIMIT_S,
        )
        errors = re.findall(r"\w*(?:Error|Exception): .*", done.stderr)
        took = round(time.monotonic() - began, 1)
        outcome = "failed" if done.returncode else "passed"
        reason = errors[0][:300] if done.returncode and errors else ""
        found[f"accelerate {name}"] = {"outcome": outcome, "reason": reason, "seconds": took}
        print(f"{backend:8} {outcome:8} {took:5.1f} s  accelerate {name}", flush=True)
    return found


def run_backend(
    backend: str, suite: str, ranks: int, words: list[str], jobs: int
) -> dict[str, dict[str, Any]]:
    """What became of each test."""
    if suite == "accelerate":
        return run_scripts(backend, ranks)
    with ThreadPoolExecutor(jobs) as pool:
        shares = [f"{job}/{jobs}" for job in range(jobs)]
        parts = pool.map(lambda share: run_share(backend, suite, ranks, words, share), shares)
        return {name: one for part in parts for name, one in part.items()}


def run_share(
    backend: str, suite: str, ranks: int, words: list[str], share: str
) -> dict[str, dict[str, Any]]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("barrier", "test_dir", "init_dir"):
            (Path(folder) / name).mkdir()
        given = (backend, str(ranks), folder, "127.0.0.1", own(ranks))
        env = os.environ | dict(zip(OPTIONS, given, strict=True))
        env["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), env.get("PYTHONPATH", "")))
        env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # or asking for GPUs starts CUDA before the fork
        command = [sys.executable, __file__, "--here", suite, "--share", share]
        command += ["--tests", *words] if words else []
        with subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith('["test_'):
                    continue  # a test's own words
                name, outcome, reason, took = json.loads(line)
                found[name] = {"outcome": outcome, "reason": reason, "seconds": took}
                print(f"{backend:8} {outcome:8} {took:5.1f} s  {name}", flush=True)
        if process.returncode:
            raise SystemExit(f"the suite with {backend} ended with {process.returncode}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", nargs="*", default=[], help="only those with one of these words")
    parser.add_argument("--backends", nargs="*", help="by default torch's own, and offcore")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1, help="tests at once")
    parser.add_argument("--record", type=Path, help="where the outcome is written, as text")
    parser.add_argument("--suites", nargs="*", default=SUITES, choices=SUITES)
    parser.add_argument("--nccl-tests", type=Path, help="where its built programs are")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    parser.add_argument("--script", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here or args.script:
        run_here(args.here, args.tests, args.share) if args.here else run_script(args.script)
        return
    if args.nccl_tests:
        shim = Path(__file__).with_name("gpu_nccl_shim.py")
        command = [sys.executable, str(shim), "--nccl-tests", str(args.nccl_tests)]
        raise SystemExit(subprocess.run(command).returncode)
    for package in ("expecttest", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise SystemExit("these tests need packages: pip install expecttest accelerate")
    head = [*header(args.ranks)]  # the commit that runs, whatever is edited meanwhile
    backends = args.backends or (own(args.ranks), "offcore")
    found: dict[str, dict[str, Any]] = {backend: {} for backend in backends}
    for backend in backends:
        for suite in args.suites:
            found[backend] |= run_backend(backend, suite, args.ranks, args.tests, args.jobs)
    lines = [*summary(found)]
    print("\n".join(lines))
    if args.record:
        args.record.write_text("\n".join([*head, *lines, *passed(found)]) + "\n")


def summary(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    for backend, tests in found.items():
        counts = collections.Counter(one["outcome"] for one in tests.values())
        told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        yield f"{backend}: {len(tests)} tests, {told}"
    for backend, tests in found.items():
        reasons = collections.Counter(
            one["reason"] for one in tests.values() if one["outcome"] == "skipped"
        )
        yield f"skipped with {backend}, by reason:"
        yield from (f"  {count:3} {reason}" for reason, count in reasons.most_common())
    yield "failed with each:"
    for name in sorted({name for tests in found.values() for name in tests}):
        failed = [tests[name] for tests in found.values() if name in tests]
        if all(one["outcome"] == "failed" for one in failed):
            yield f"  {name}: {failed[-1]['reason']}"
    yield "tests that differ:"
    for name in sorted({name for tests in found.values() for name in tests}):
        outcomes = {backend: tests[name] for backend, tests in found.items() if name in tests}
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


def passed(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    last = [*found][-1]
    names = [name for name, one in found[last].items() if one["outcome"] == "passed"]
    yield f"passed with {last}:"
    yield from (f"  {name}" for name in sorted(names))


if __name__ == "__main__":
    main()
