"""The NCCL shim under torch, beside plain NCCL: results compared, times taken in turns.

    python benchmarks/gpu_nccl_shim.py [--sizes 8,64K,16M,1G] [--min-bytes all_reduce=32M] [--quick]
    python benchmarks/gpu_nccl_shim.py --nccl-tests FOLDER

Two sets of processes, one a GPU each, torch.distributed with backend "nccl" in both; one set has
LD_PRELOAD=$(offcore nccl-shim). For every collective and size each set compares every element with
what it must be (small whole numbers, exact in any order), and times calls that the host makes one
after another, by turns: the other set is idle then. Medians, of the slower rank, in us; S is the
whole array. `ratio` is NCCL's time over the shim's; the exit status says whether any is below 0.97,
or any element wrong. At the end it prints what the shim took and forwarded, GPU memory that the
first call took, and what the machine's libnccl exports that the shim lacks. --nccl-tests runs its
programs from that folder in the same way. NVLink multicast is off.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from offcore.tools import nccl_shim

OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "gather", "scatter")
PROGRAMS = {
    "all_reduce_perf": ["-d", "bfloat16"],
    "reduce_scatter_perf": ["-d", "bfloat16"],
    "all_gather_perf": [],
    "alltoall_perf": [],
}
SIZES = "8,64,512,4K,32K,256K,2M,16M,32M,64M,128M,256M,1G"
LEAST = 0.97
LIMIT_S = 560


def parsed(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


class Collective:
    """One collective of S = `size` bytes on this rank."""

    def __init__(self, op: str, size: int, dtype: torch.dtype, device: torch.device) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        part = max(1, size // dtype.itemsize // ranks)
        whole = part * ranks
        self.op, self.rank, self.ranks = op, rank, ranks

        def given(count: int, peer: int) -> torch.Tensor:
            values = torch.arange(count, device=device, dtype=torch.int64)
            return ((values * 7 + peer * 5) % 13 - 6).to(dtype)

        gathers = op in ("all_gather", "gather")
        self.inp = given(part if gathers else whole, rank)
        self.out = self.inp.new_zeros(part if op in ("reduce_scatter", "scatter") else whole)
        inputs = [given(self.inp.numel(), peer) for peer in range(ranks)]
        mine = slice(part * rank, part * (rank + 1))
        if op in ("all_reduce", "reduce_scatter"):
            total = sum(inputs[1:], inputs[0])
            self.wanted = total if op == "all_reduce" else total[mine]
        elif gathers:
            self.wanted = torch.cat(inputs)
        elif op == "all_to_all":
            self.wanted = torch.cat([one[mine] for one in inputs])
        else:
            self.wanted = inputs[0] if op == "broadcast" else inputs[0][mine]

    def run(self) -> None:
        if self.op == "all_reduce":
            dist.all_reduce(self.out)
        elif self.op == "reduce_scatter":
            dist.reduce_scatter_tensor(self.out, self.inp)
        elif self.op == "all_gather":
            dist.all_gather_into_tensor(self.out, self.inp)
        elif self.op == "all_to_all":
            dist.all_to_all_single(self.out, self.inp)
        elif self.op == "broadcast":
            dist.broadcast(self.out, 0)
        elif self.op == "gather":
            parts = [*self.out.chunk(self.ranks)] if self.rank == 0 else None
            dist.gather(self.inp, parts, 0)
        else:
            parts = [*self.inp.chunk(self.ranks)] if self.rank == 0 else None
            dist.scatter(self.out, parts, 0)

    def wrong(self, run: Callable[[], None] | None = None) -> int:
        self.out.zero_()
        if self.op == "all_reduce" or (self.op == "broadcast" and self.rank == 0):
            self.out.copy_(self.inp)
        (run or self.run)()
        torch.cuda.synchronize()
        if self.op == "gather" and self.rank:
            return 0
        return int((self.out != self.wanted).sum())


class Worker:
    """Answers lines of JSON: this process is a rank."""

    def __init__(self) -> None:
        self.rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", self.rank)
        torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl",
            init_method=f"file://{os.environ['MEETING']}",
            rank=self.rank,
            world_size=ranks,
            device_id=self.device,
        )
        self.held: Collective | None = None

    def make(self, op: str, size: int, dtype: str) -> dict[str, Any]:
        """Compares a call, and the same out of a graph."""
        self.held = None
        torch.cuda.empty_cache()
        self.held = Collective(op, size, getattr(torch, dtype), self.device)
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        wrong = self.held.wrong()
        taken = free - torch.cuda.mem_get_info()[0]
        wrong += self.held.wrong()
        return {"wrong": wrong, "memory": taken}

    def captured(self) -> dict[str, Any]:
        """The collective that is held, by a graph of it."""
        assert self.held is not None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.held.run()
        return {"wrong": self.held.wrong(graph.replay)}

    def coalesced(self, size: int) -> dict[str, Any]:
        """Two reductions in one group."""
        pair = [Collective("reduce_scatter", size, torch.bfloat16, self.device) for _ in range(2)]

        def both() -> None:
            with dist._coalescing_manager(device=self.device):
                for one in pair:
                    one.run()

        wrong = pair[0].wrong(both)
        return {"wrong": wrong + int((pair[1].out != pair[1].wanted).sum())}

    def time(self, calls: int) -> dict[str, Any]:
        assert self.held is not None
        self.held.run()
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(calls):
            self.held.run()
        last.record()
        torch.cuda.synchronize()
        return {"us": first.elapsed_time(last) * 1e3 / calls}

    def serve(self) -> None:
        for line in sys.stdin:
            name, arguments = json.loads(line)
            print("> " + json.dumps(getattr(self, name)(**arguments)), flush=True)
        self.held = None
        dist.destroy_process_group()


class Ranks:
    """A set of processes, one a GPU."""

    def __init__(self, count: int, env: dict[str, str], folder: Path, name: str) -> None:
        shared = {**common(), "MEETING": str(folder / name), "WORLD_SIZE": str(count)}
        self.said = folder / f"{name}.txt"
        with self.said.open("w") as errors:
            self.processes = [
                subprocess.Popen(
                    [sys.executable, __file__],
                    env={**os.environ, **shared, **env, "RANK": str(rank)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
                for rank in range(count)
            ]

    def ask(self, name: str, **arguments: Any) -> list[dict[str, Any]]:
        for one in self.processes:
            assert one.stdin is not None
            one.stdin.write(json.dumps([name, arguments]) + "\n")
            one.stdin.flush()
        return [self._answer(one) for one in self.processes]

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("> "):
                answer: dict[str, Any] = json.loads(line[2:])
                return answer
        raise SystemExit(f"a rank has ended:\n{self.said.read_text()[-4000:]}")

    def end(self) -> str:
        """What they said on stderr."""
        for one in self.processes:
            assert one.stdin is not None
            one.stdin.close()
        for one in self.processes:
            one.wait(60)
        return self.said.read_text()

    def kill(self) -> None:
        for one in self.processes:
            one.kill()


def common() -> dict[str, str]:
    return {"NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def shimmed(min_bytes: str) -> dict[str, str]:
    return {
        "LD_PRELOAD": str(nccl_shim.path()),
        "OFFCORE_NCCL_MIN_BYTES": min_bytes,
        "OFFCORE_NCCL_REPORT": "1",
    }


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def compare(sets: dict[str, Ranks], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    turns = 3 if arguments.quick else 7
    for op in arguments.ops.split(","):
        for size in map(parsed, arguments.sizes.split(",")):
            row: dict[str, Any] = {"op": op, "bytes": size, "wrong": 0}
            for dtype in ("int32", "float32", "bfloat16"):
                for name, ranks in sets.items():
                    told = ranks.ask("make", op=op, size=size, dtype=dtype)
                    row["wrong"] += sum(one["wrong"] for one in told)
                    if name == "shim" and max(one["memory"] for one in told) > 1 << 20:
                        row["memory"] = max(one["memory"] for one in told)
            calls = max(3, min(100, (1 << 31) // max(1, size)))
            times: dict[str, list[float]] = {name: [] for name in sets}
            for _ in range(turns):
                for name, ranks in sets.items():
                    times[name].append(max(one["us"] for one in ranks.ask("time", calls=calls)))
            row |= {name: round(median(told), 2) for name, told in times.items()}
            row["ratio"] = round(median(times["nccl"]) / median(times["shim"]), 3)
            yield row


def others(shim: Ranks) -> Iterator[dict[str, Any]]:
    """What is not timed: graphs and groups of several operations."""
    shim.ask("make", op="all_reduce", size=128 << 20, dtype="bfloat16")
    yield {"graph of all_reduce 128M": sum(one["wrong"] for one in shim.ask("captured"))}
    told = shim.ask("coalesced", size=64 << 20)
    yield {"two reduce_scatters in a group": sum(one["wrong"] for one in told)}


def lacking() -> str:
    """What the loaded libnccl exports and the shim does not."""
    torch.cuda.nccl.version()
    maps = Path("/proc/self/maps").read_text("utf-8")
    found = re.search(r"\S*libnccl\.so\S*", maps)
    if found is None:
        return "not looked for: torch has NCCL in itself"
    names = []
    for file in (found[0], str(nccl_shim.path())):
        with contextlib.suppress(FileNotFoundError):
            done = subprocess.run(["nm", "-D", "--defined-only", file], capture_output=True)
            names.append(set(re.findall(r"\bp?nccl[A-Z]\w+", done.stdout.decode())))
    return " ".join(sorted(names[0] - names[1])) or "none" if len(names) == 2 else "no nm here"


def under_torch(arguments: argparse.Namespace) -> bool:
    good = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sets = {
            "nccl": Ranks(arguments.ranks, {}, folder, "nccl"),
            "shim": Ranks(arguments.ranks, shimmed(arguments.min_bytes), folder, "shim"),
        }
        try:
            for row in compare(sets, arguments):
                good = good and not row["wrong"] and row["ratio"] >= LEAST
                print(json.dumps(row), flush=True)
            for row in others(sets["shim"]):
                good = good and not any(row.values())
                print(json.dumps(row), flush=True)
            sets["nccl"].end()
            said = sets["shim"].end()
        finally:
            for ranks in sets.values():
                ranks.kill()
    print("\n".join(line for line in said.splitlines() if "offcore nccl-shim" in line))
    print(f"libnccl exports, and the shim lacks: {lacking()}")
    return good


def program_rows(text: str) -> dict[int, tuple[float, int]]:
    """By bytes: out-of-place us, and wrong elements of both ways."""
    rows = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 13 and words[0].isdigit():
            wrong = sum(int(words[at]) for at in (8, 12) if words[at].isdigit())
            rows[int(words[0])] = (float(words[5]), wrong)
    return rows


def nccl_tests(folder: Path, arguments: argparse.Namespace) -> bool:
    good = True
    for program, options in PROGRAMS.items():
        command = [str(folder / program), "-b", "8", "-e", "1G", "-f", "8", "-c", "1"]
        command += ["-t", str(arguments.ranks), "-g", "1", *options]
        found = {}
        for name, env in (("nccl", {}), ("shim", shimmed(arguments.min_bytes))):
            done = subprocess.run(
                command,
                env={**os.environ, **common(), **env},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            if done.returncode:
                raise SystemExit(f"{program} ({name}) ended with {done.returncode}: {done.stderr}")
            found[name] = program_rows(done.stdout)
            said = [line for line in done.stderr.splitlines() if "offcore nccl-shim" in line]
        for size, (us, wrong) in found["shim"].items():
            theirs = found["nccl"][size][0]
            ratio = round(theirs / us, 3)
            row = {"program": program, "bytes": size, "nccl": theirs, "shim": us}
            row |= {"ratio": ratio, "wrong": wrong}
            good = good and not wrong and ratio >= LEAST
            print(json.dumps(row), flush=True)
        print("\n".join(said))
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument(
        "--min-bytes", default="", help="OFFCORE_NCCL_MIN_BYTES; empty: as measured"
    )
    parser.add_argument("--quick", action="store_true", help="3 turns instead of 7")
    parser.add_argument("--nccl-tests", type=Path, metavar="FOLDER", help="its programs instead")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    if "RANK" in os.environ:
        Worker().serve()
        return 0
    arguments = parser.parse_args()
    if arguments.nccl_tests:
        return 0 if nccl_tests(arguments.nccl_tests, arguments) else 1
    return 0 if under_torch(arguments) else 1


if __name__ == "__main__":
    sys.exit(main())
