"""Proves on the GPUs of this machine that flags stay behind data, that collectives use no SM, and
that loop kernels need no launch.

    python benchmarks/gpu_proof.py                    # all; needs two GPUs
    python benchmarks/gpu_proof.py --only held        # stress | held | channels | loop

stress    `offcore doctor --stress`, which remembers the signal forms that are safe here.
held      Blocks that only wait fill every SM of every GPU; an operation must end meanwhile, with
          the right bytes. A control kernel launched behind the blocks must not run until they go,
          and an operation that may use SMs (own_copy="sm") must not end until then either. Each
          operation has blocks of its own, and what it left has ended before the next one's come.
channels  CUPTI records every copy, fill and kernel of the operations: no kernel, and every copy on
          a copy engine's channel. Controls: kernels and an SM copy that it has to see. Needs
          CUPTI's header and library and a C++ compiler (CUDA's toolkit, or PyPI's
          nvidia-cuda-cupti with cuda.h).
loop      CUPTI records every call of CUDA's functions, and every kernel, while loop kernels run,
          by both engines: one kernel a GPU for all iterations, and no launch. Controls: the calls
          that submit the proxy's copies, and launches of the same operators one by one.

Each step is a process with a time limit. The exit status is 0 where all was proven.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_steps import run_step

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "gpu" / "site"  # where h200_check.py installs the package
LIMIT_S = 25
LOOP_LIMIT_S = 75  # its kernels are compiled
HELD_S = 5.0  # the blocks go by themselves then
ENDS_S = 0.5  # what needs no SM has ended by then
DRAINS_S = 3.0  # and all the rest, once the blocks have gone
PART = 256 << 10
DRAWN = 999_983  # random bytes, which then come again
LARGE = 16 << 20  # of which engines for host copies take a share, where a rank keeps it
VARIANTS = ("auto", "pcpy", "b2b", "fan", "bcst")
LARGE_OPS = ("all_gather", "all_to_all")


@dataclass
class Case:
    """An operation whose output is known."""

    name: str
    op: str
    variant: str
    out: Any
    inp: Any  # None: in place
    part: int

    def start(self, comm: Any) -> Any:
        buffers = [self.out] if self.inp is None else [self.out, self.inp]
        return getattr(comm, self.op)(*buffers, variant=self.variant)


class Cases:
    """All operations in all variants, each with buffers of its own in one window, and `large` ones
    again with larger parts."""

    def __init__(self, comm: Any, part: int, large: Sequence[str] = ()) -> None:
        self.comm = comm
        named = [
            ("all_gather", True),
            ("broadcast", True),
            ("all_gather", False),
            ("all_to_all", False),
        ]
        wanted = [
            (op, in_place, variant, part)
            for op, in_place in named
            for variant in VARIANTS
            if variant == "auto" or variant in comm.variants(op, in_place)
        ]
        wanted += [(op, False, "auto", LARGE) for op in large]
        self.window = comm.window(sum(2 * comm.ranks * part for *_, part in wanted))
        self.all: list[Case] = []
        end = 0
        for op, in_place, variant, part in wanted:
            whole = part * comm.ranks
            at, end = end, end + 2 * whole
            sizes = {"all_gather": (whole, part), "broadcast": (part, part)}
            out_bytes, in_bytes = sizes.get(op, (whole, whole))
            out = self.window.region(at, out_bytes)
            inp = None if in_place else self.window.region(at + whole, in_bytes)
            place = "in place" if in_place else "out of place"
            name = f"{op} {place}, {variant}" + (" of large parts" if part == LARGE else "")
            self.all.append(Case(name, op, variant, out, inp, part))

    def fill(self, turn: int) -> None:
        import numpy as np

        for index, case in enumerate(self.all):
            for rank in self.comm.local_ranks:
                self.window.write(np.zeros(case.out.nbytes, np.uint8), case.out.offset, rank)
                if case.op == "broadcast":
                    data, at = self.data(turn, index, 0, case.part), case.out.offset
                    if rank != 0:
                        continue
                elif case.inp is None:
                    data = self.data(turn, index, rank, case.part)
                    at = case.out.offset + rank * case.part
                else:
                    data, at = self.data(turn, index, rank, case.inp.nbytes), case.inp.offset
                self.window.write(data, at, rank)

    def data(self, turn: int, index: int, rank: int, nbytes: int) -> Any:
        import numpy as np

        random = np.random.default_rng((turn, index, rank))
        return np.resize(random.integers(0, 256, min(nbytes, DRAWN), np.uint8), nbytes)

    def wrong(self, turn: int) -> dict[str, int]:
        """How many bytes each operation's outputs have wrong, of those that have any."""
        found = {case.name: self.wrong_bytes(turn, case) for case in self.all}
        return {name: bad for name, bad in found.items() if bad}

    def wrong_bytes(self, turn: int, case: Case) -> int:
        import numpy as np

        nbytes = case.part if case.inp is None else case.inp.nbytes
        index = self.all.index(case)
        data = [self.data(turn, index, rank, nbytes) for rank in range(self.comm.ranks)]
        bad = 0
        for rank in self.comm.local_ranks:
            if case.op == "broadcast":
                expected = data[0]
            elif case.op == "all_gather":
                expected = np.concatenate(data)
            else:
                mine = slice(rank * case.part, (rank + 1) * case.part)
                expected = np.concatenate([sent[mine] for sent in data])
            got = np.empty(case.out.nbytes, np.uint8)
            self.window.read(got, case.out.offset, rank)
            bad += int((got != expected).sum())
        return bad


@contextmanager
def opened(ranks: int, **options: Any) -> Iterator[Any]:
    import offcore

    with offcore.Communicator(backend="cuda", ranks=ranks, timeout=10, **options) as comm:
        yield comm


@dataclass
class Trial:
    """What an operation did while every SM was held."""

    ended: bool
    took_ms: float
    blocks: int
    faults: list[str]  # of the trial itself

    def __str__(self) -> str:
        return f"ended in {self.took_ms:.1f} ms" if self.ended else "waited for the SMs"


def hold(comm: Any, case: Case) -> Trial:
    """Starts the operation while every SM is held. What it left has ended on return, or Error."""
    from offcore import Error, _core

    blocks = _core.Occupation(list(range(comm.ranks)), HELD_S)
    began, ended = time.monotonic(), True
    pending = case.start(comm)
    try:
        pending.wait(ENDS_S)
    except Error as failure:
        if failure.code != "timeout":
            raise
        ended = False
    took_ms = (time.monotonic() - began) * 1e3
    faults = []
    if not blocks.holds or blocks.control_ran:
        faults.append("the SMs were not full all the time: the control kernel ran")
    if not blocks.release():
        faults.append("the control kernel did not run after the blocks had gone")
    if not ended:
        pending.wait(DRAINS_S)
    return Trial(ended, took_ms, blocks.blocks, faults)


def held(ranks: int) -> list[str]:
    """What is wrong; nothing: proven."""
    from offcore import Error

    failures: list[str] = []
    with opened(ranks) as comm, opened(ranks, own_copy="sm") as other:
        cases, controls = Cases(comm, PART, LARGE_OPS), Cases(other, PART)
        for turn, tried in enumerate((cases, controls)):
            tried.fill(turn)
            for case in tried.all:  # plans are met and streams are made before anything spins
                own_copy = case.start(tried.comm).wait().own_copy
                if tried is cases and case.part == LARGE and own_copy != "engines":
                    print(f"   {case.name}: no spare engines, own_copy is {own_copy}", flush=True)
            if wrong := tried.wrong(turn):
                return [f"wrong bytes before anything was held: {wrong}"]
        cases.fill(7)
        control = next(c for c in controls.all if c.name == "all_gather out of place, b2b")
        for case in [*cases.all, control]:
            name = "control: a copy that may use SMs" if case is control else case.name
            try:
                trial = hold(other if case is control else comm, case)
            except Error as failure:  # blocks or copies are still there: nothing can be told now
                return [*failures, f"{name}: {failure}; what comes after was not tried"]
            print(f"   {name}: {trial}", flush=True)
            failures += [f"{name}: {fault}" for fault in trial.faults]
            if case is not control:
                if not trial.ended:
                    failures.append(f"{name}: waited for the SMs")
                if bad := cases.wrong_bytes(7, case):
                    failures.append(f"{name}: {bad} wrong bytes")
    print(f"held: {trial.blocks} blocks on {ranks} GPUs held every SM, for each operation anew")
    return failures


def loaded(recorder: str) -> ctypes.CDLL:
    from offcore import _core

    _core.cuda_facts()  # opens the driver, which loads the recorder
    if not Path("cupti.jsonl").is_file():
        raise RuntimeError("the driver did not load CUPTI's recorder")
    library = ctypes.CDLL(recorder)
    library.cupti_mark.argtypes = (ctypes.c_char_p,)
    return library


def channels(ranks: int, recorder: str) -> list[str]:
    """What is wrong; nothing: proven."""
    from offcore import _core

    library = loaded(recorder)
    with opened(ranks) as comm, opened(ranks, own_copy="sm") as other:
        cases, controls = Cases(comm, PART, LARGE_OPS), Cases(other, PART)
        for tried in (cases, controls):
            tried.fill(1)
            for case in tried.all:
                case.start(tried.comm).wait()
        comm.barrier()
        marks: list[int] = []

        def marked(name: str, run: Any) -> None:
            time.sleep(0.05)  # the last records arrive
            marks.append(library.cupti_mark(name.encode()))
            run()

        for case in cases.all:
            marked(case.name, lambda case=case: case.start(comm).wait())
        control = next(c for c in controls.all if c.name == "all_gather out of place, b2b")
        marked("control: SM copy", lambda: control.start(other).wait())
        marked("control: kernels", lambda: _core.Occupation([0], 0.5).release())
        marked("end", lambda: None)
    if any(marks):
        return ["CUPTI's recorder could not write its records"]
    return judge(Path("cupti.jsonl").read_text(encoding="utf-8").splitlines(), len(cases.all))


def loops(recorder: str) -> list[str]:
    """What is wrong; nothing: proven."""
    from gpu_loop_calls import record

    return record(loaded(recorder), Path.cwd())


def judge(lines: list[str], operations: int) -> list[str]:
    """What the records of `channels` show that should not be."""
    by_mark: dict[str, list[dict[str, Any]]] = {"start": []}
    records = by_mark["start"]
    failures = []
    for record in map(json.loads, lines):
        if record["kind"] == "mark":
            records = by_mark.setdefault(record["name"], [])
        elif record["kind"] == "lost":
            failures.append(f"CUPTI lost {record['count']} records")
        elif record["kind"] != "ready":
            records.append(record)
    copies = 0
    names = [name for name in by_mark if name not in ("start", "end") and "control" not in name]
    if len(names) != operations:
        failures.append(f"{len(names)} of {operations} operations were recorded")
    for name in names:
        found = by_mark[name]
        done = [record for record in found if record["kind"] == "memcpy"]
        others = [record for record in found if record["kind"] != "memcpy"]
        on_sm = [record for record in done if record["channel"] != "engine"]
        copies += len(done)
        if not done:
            failures.append(f"{name}: no copy was recorded")
        if others:
            what = sorted({record.get("name", record["kind"]) for record in others})
            failures.append(f"{name}: {len(others)} kernels or fills: {', '.join(what)}")
        if on_sm:
            failures.append(f"{name}: {len(on_sm)} of {len(done)} copies on no engine: {on_sm[0]}")
    if not any(r["kind"] == "kernel" for r in by_mark.get("control: kernels", [])):
        failures.append("control: the recorder did not see the kernels that it should see")
    sm_copy = by_mark.get("control: SM copy", [])
    seen = any(record.get("channel") == "compute" for record in sm_copy)
    kernel = any(record["kind"] == "kernel" for record in sm_copy)
    if not seen and not kernel:
        failures.append("control: the copy that may use SMs was not seen on a compute channel")
    print(f"channels: {len(names)} operations, {copies} copies")
    return failures


def build_recorder(folder: Path) -> Path:
    """Compiles the recorder. Raises RuntimeError, saying what is missing."""
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    toolkit = [cuda / "include", cuda / "targets" / "x86_64-linux" / "include"]
    sets = [[*toolkit, cuda / "extras" / "CUPTI" / "include"], [packages / "cu13" / "include"]]
    for headers in sets:  # one whole set: headers of different versions do not go together
        have = all(any((p / name).is_file() for p in headers) for name in ("cuda.h", "cupti.h"))
        places = [place.parent / name for place in headers for name in ("lib64", "lib")]
        libraries = [found for place in places for found in sorted(place.glob("libcupti.so*"))]
        if have and libraries:
            break
    else:
        raise RuntimeError("CUPTI's headers or library were not found: set CUDA_HOME")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise RuntimeError("no C++ compiler: set CXX")
    made = folder / "libcupti_channels.so"
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(made)]
    command += [str(ROOT / "benchmarks" / "cupti_channels.cpp")]
    command += [f"-I{place}" for place in headers if place.is_dir()]
    command += [str(libraries[0]), f"-Wl,-rpath,{libraries[0].resolve().parent}", "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(f"the recorder does not compile:\n{done.stderr[:2000]}")
    return made


def limit_of(name: str) -> float:
    return LOOP_LIMIT_S if name == "loop" else LIMIT_S


def step(name: str, command: list[str], folder: Path, env: dict[str, str] | None = None) -> bool:
    path = [str(SITE)] if SITE.is_dir() else []
    path += [p for p in (os.environ.get("PYTHONPATH", ""),) if p]
    given = {
        "PYTHONPATH": os.pathsep.join(path),
        "CUDA_MODULE_LOADING": "EAGER",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # no stream shares a channel with the blocks'
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    began = time.monotonic()
    code = run_step(
        [sys.executable, *command], folder, limit_of(name), os.environ | given | (env or {})
    )
    told = "PROVEN" if code == 0 else f"NOT PROVEN ({code})"
    print(f"{name}: {told} in {time.monotonic() - began:.1f} s", flush=True)
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("stress", "held", "channels", "loop"))
    parser.add_argument("--ranks", type=int, default=2, help="GPUs to use")
    parser.add_argument("--role", choices=("held", "channels", "loop"), help=argparse.SUPPRESS)
    parser.add_argument("--recorder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        faulthandler.dump_traceback_later(limit_of(args.role) - 5, exit=True)  # where it hangs
        roles: dict[str, Callable[[], list[str]]] = {
            "held": lambda: held(args.ranks),
            "channels": lambda: channels(args.ranks, args.recorder),
            "loop": lambda: loops(args.recorder),
        }
        failures = roles[args.role]()
        for failure in failures:
            print(f"   {failure[:400]}", flush=True)
        return 1 if failures else 0
    good = True
    role = [__file__, "--ranks", str(args.ranks), "--role"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.only in (None, "stress"):
            good &= step("stress", ["-m", "offcore.tools.cli", "doctor", "--stress"], folder)
        if args.only in (None, "held"):
            good &= step("held", [*role, "held"], folder)
        for name in ("channels", "loop"):
            if args.only not in (None, name):
                continue
            try:
                recorder = str(build_recorder(folder))
            except RuntimeError as failure:
                print(f"{name}: NOT PROVEN: {failure}")
                return 1
            command = [*role, name, "--recorder", recorder]
            good &= step(name, command, folder, {"CUDA_INJECTION64_PATH": recorder})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
