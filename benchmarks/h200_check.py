"""Checks and measures the cuda backend on the GPUs of this machine, in one go.

    python benchmarks/h200_check.py                      # everything
    python benchmarks/h200_check.py --only build,check   # some steps

Builds the package in build/gpu. Random collectives run with all ranks in one process and with one
process a GPU, then what users of torch do, plain tensors of 1 byte to 2 GiB from each of torch's
allocators, registered ones, and operations in graphs; every byte is checked.
gpu_proof.py proves what the backend rests on, gpu_bench.py measures all-gather and all-to-all next
to NCCL; NVLink multicast is off. Every step has a time limit. Rows go to $OUT where it is set.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gpu_capture import captured
from gpu_plain import ALLOCATORS, plain_tensors
from gpu_random import armed, basics, check
from gpu_steps import run_step
from gpu_torch import torch_users

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu"
SITE = BUILD / "site"


# The steps: each a process of its own, with a time limit.


def step(name: str, command: list[str], limit_s: float, env: dict[str, str] | None = None) -> bool:
    print(f"== {name}", flush=True)
    began = time.monotonic()
    code = run_step(command, ROOT, limit_s, env)
    print(
        f"== {name}: {'ok' if code == 0 else code} in {time.monotonic() - began:.1f} s", flush=True
    )
    return code == 0


def build() -> bool:
    configure = ["cmake", "-S", ".", "-B", str(BUILD), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    configure.append(f"-DPython_EXECUTABLE={sys.executable}")
    if not step("configure", configure, 120):
        return False
    if not step("build", ["cmake", "--build", str(BUILD)], 600):
        return False
    shutil.rmtree(SITE, ignore_errors=True)
    if not step("install", ["cmake", "--install", str(BUILD), "--prefix", str(SITE)], 60):
        return False
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(
        ROOT / "python" / "offcore", SITE / "offcore", ignore=ignored, dirs_exist_ok=True
    )
    return True


def run_ranks(
    role: str, ranks: int, limit_s: float, extra: list[str], env: dict[str, str] | None = None
) -> bool:
    """One process a rank; all are ended when one fails or the time is over."""
    with socket.socket() as probe, socket.socket() as other:
        for one in (probe, other):
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in (probe, other)]
    began = time.monotonic()
    print(f"== {role}: {ranks} processes", flush=True)
    command = [sys.executable, __file__, "--role", role, "--ranks", str(ranks)]
    command += ["--ports", ",".join(map(str, ports)), *extra]
    processes = [
        subprocess.Popen([*command, "--rank", str(rank)], cwd=ROOT, env=environment() | (env or {}))
        for rank in range(ranks)
    ]
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                time.sleep(2)  # the others tell what they saw
                break
            if time.monotonic() - began > limit_s:
                print(f"== {role}: no end within {limit_s:.0f} s", flush=True)
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        codes = [process.wait() for process in processes]
    print(f"== {role}: exit codes {codes} in {time.monotonic() - began:.1f} s", flush=True)
    return not any(codes)


def environment() -> dict[str, str]:
    path = os.pathsep.join(p for p in (str(SITE), os.environ.get("PYTHONPATH", "")) if p)
    given = {"PYTHONPATH": path, "NCCL_NVLS_ENABLE": "0", "CUDA_MODULE_LOADING": "EAGER"}
    given |= {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # programs may be parked
    return os.environ | given


ROLES = {
    "basics": basics,
    "check": check,
    "armed": armed,
    "torch": torch_users,
    "plain": plain_tensors,
    "capture": captured,
}


STEPS = ("build", "probe", *ROLES, "proof", "measure")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", metavar="STEP,...", default=",".join(STEPS), help="of " + ", ".join(STEPS)
    )
    parser.add_argument("--ranks", type=int, default=0, help="GPUs to use; all by default")
    parser.add_argument("--calls", type=int, default=150, help="random operations a turn")
    parser.add_argument("--turns", type=int, default=2, help="communicators in a row")
    parser.add_argument("--largest", type=int, default=1 << 30, help="bytes, of the measurement")
    parser.add_argument("--limit", type=float, default=100, help="seconds, of each check")
    parser.add_argument("--role", choices=tuple(ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--armed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--ports", type=lambda text: [int(p) for p in text.split(",")], help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if unknown := set(args.only.split(",")) - set(STEPS):
        parser.error(f"no step is called {', '.join(sorted(unknown))}")
    return args


def main() -> int:
    args = arguments()
    if args.role:
        return ROLES[args.role](args)
    steps = args.only.split(",")
    if "build" in steps and not build():
        return 1
    if steps == ["build"]:
        return 0
    probe = "import offcore; print(*offcore.probe_backends(), sep='\\n')"
    if not step("probe", [sys.executable, "-c", probe], 120, environment()):
        return 1
    count = "import offcore; print(next(r for n, ok, r in offcore.probe_backends() if n == 'cuda'))"
    told = subprocess.check_output([sys.executable, "-c", count], env=environment(), text=True)
    if not told[0].isdigit():
        print(told)
        return 1
    ranks = args.ranks or int(told.split()[0])
    extra = ["--calls", str(args.calls), "--turns", str(args.turns)]

    def alone(role: str, name: str, limit_s: float, *more: str) -> bool:
        command = [sys.executable, __file__, "--role", role, "--ranks", str(ranks), *more]
        return step(name, command, limit_s, environment())

    def script(name: str, limit_s: float, *words: str) -> bool:
        command = [sys.executable, str(Path(__file__).with_name(name)), *words]
        return step(name, command, limit_s, environment())

    def checks(what: str, *more: str) -> bool:
        one = alone("check", f"{what}: one process", args.limit, *extra, *more)
        return run_ranks("check", ranks, args.limit, [*extra, *more]) and one

    def plain() -> bool:
        good = True
        for name, option in ALLOCATORS.items():
            print(f"== plain: allocator {name}", flush=True)
            env = {"PYTORCH_CUDA_ALLOC_CONF": option, "PYTORCH_ALLOC_CONF": option}
            good = run_ranks("plain", ranks, args.limit, [], env if option else None) and good
        return good

    largest = ("--largest", str(args.largest))
    work: dict[str, Callable[[], bool]] = {
        "basics": lambda: alone("basics", "basics", 90),
        "torch": lambda: run_ranks("torch", ranks, 60, []),
        "plain": plain,
        "capture": lambda: run_ranks("capture", ranks, 30, []),
        "proof": lambda: script("gpu_proof.py", 80),
        "measure": lambda: script("gpu_bench.py", 120, "--ranks", str(ranks), *largest),
        "check": lambda: checks("check"),
        "armed": lambda: alone("armed", "armed", 60) and checks("check, armed", "--armed"),
    }
    good = all([run() for name, run in work.items() if name in steps])
    print("ALL GOOD" if good else "SOMETHING FAILED", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
