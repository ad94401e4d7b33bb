"""torch's own tests of torch.distributed, with the backend "offcore" and with gloo.

    python benchmarks/peer_suites.py [--tests WORDS] [--ranks N] [--record FILE]

Runs the tests of torch/testing/_internal/distributed/distributed_test.py, which lie in torch's
wheel, on CPU tensors, one backend after the other, and prints for each what passed, failed and was
skipped, and the tests that differ. The suite skips what a backend of an unknown name might not do,
so it is told that it runs with gloo both times, and the default group is made with the backend.
Each test has processes of its own, forked from one that has imported torch. Needs
`pip install expecttest`; takes two minutes for each backend.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BACKENDS = ("gloo", "offcore")
LIMIT_S = 60  # of one test
OPTIONS = ("SUITE_BACKEND", "WORLD_SIZE", "TEMP_DIR", "MASTER_ADDR", "BACKEND")


def load() -> type[unittest.TestCase]:
    """The suite, as a class that starts its ranks by fork. Its options lie in the environment."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    import offcore.distributed  # noqa: F401  # registers the backend

    begin = dist.init_process_group

    def begin_with(backend: str, **options: Any) -> None:
        assert backend == "gloo"
        begin(os.environ["SUITE_BACKEND"], **options)

    dist.init_process_group = begin_with

    bases: Any = (distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase)

    class Suite(*bases):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    common_distributed.TIMEOUT_DEFAULT = LIMIT_S
    torch.set_num_threads(1)
    return Suite


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


def run_here(words: list[str]) -> None:
    """Runs the tests in this process, a line of JSON for each on stdout."""
    suite = load()
    names = unittest.defaultTestLoader.getTestCaseNames(suite)
    chosen = [name for name in names if not words or any(word in name for word in words)]
    unittest.TestSuite(suite(name) for name in chosen).run(Outcomes())


def run_backend(backend: str, ranks: int, words: list[str]) -> dict[str, dict[str, Any]]:
    """What became of each test."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("barrier", "test_dir", "init_dir"):
            (Path(folder) / name).mkdir()
        given = (backend, str(ranks), folder, "127.0.0.1", "gloo")
        env = os.environ | dict(zip(OPTIONS, given, strict=True))
        command = [sys.executable, __file__, "--here", *(("--tests", *words) if words else ())]
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
    parser.add_argument("--backends", nargs="*", default=BACKENDS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--record", type=Path, help="where the outcome is written, as text")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        run_here(args.tests)
        return
    if importlib.util.find_spec("expecttest") is None:
        raise SystemExit("torch's tests need expecttest: pip install expecttest")
    found = {backend: run_backend(backend, args.ranks, args.tests) for backend in args.backends}
    lines = [*summary(found)]
    print("\n".join(lines))
    if args.record:
        args.record.write_text("\n".join([*header(args.ranks), *lines, *passed(found)]) + "\n")


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
    yield "tests that differ:"
    for name in sorted({name for tests in found.values() for name in tests}):
        outcomes = {backend: tests[name] for backend, tests in found.items() if name in tests}
        if len({one["outcome"] for one in outcomes.values()}) > 1:
            yield f"  {name}"
            for backend, one in outcomes.items():
                yield f"    {backend}: {one['outcome']} {one['reason']}".rstrip()


def header(ranks: int) -> Iterator[str]:
    from offcore.tools.report import Stamp

    yield f"torch's distributed_test.py with {ranks} ranks on CPU tensors, over gloo and offcore"
    yield f"command: python benchmarks/peer_suites.py --ranks {ranks} --record FILE"
    yield from (f"{name}: {value}" for name, value in vars(Stamp()).items())
    yield ""


def passed(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    names = [name for name, one in found[BACKENDS[-1]].items() if one["outcome"] == "passed"]
    yield f"passed with {BACKENDS[-1]}:"
    yield from (f"  {name}" for name in sorted(names))


if __name__ == "__main__":
    main()
