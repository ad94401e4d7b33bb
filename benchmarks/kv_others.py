"""How long an application's own copies and launches wait beside transfers of KV blocks on one GPU.

    python benchmarks/kv_others.py                 # a minute
    python benchmarks/kv_others.py --only launches

While a load or a store is under way (offcore by both engines and by one, one batch call, the
kernel) another thread copies 1 KiB, or 512, to the host or to the GPU in a stream of its own and
waits for it, again and again, as a serving engine fetches its tokens and hands over what a batch
reads. `launches`: it launches a small kernel instead, again and again, which takes the driver's
lock as the calls of the transfer do; K and V lie apart in a tensor a layer, and the kernel is in a
stream of its own or in the default stream. Rows go to cuda-kv-others.jsonl and
cuda-kv-launches.jsonl in $OUT where that is set, else in benchmarks/results; the table comes last.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from offcore.sizes import format_bytes, parse_sizes
from offcore.tools.kv.case import Case
from offcore.tools.kv.models import Geometry
from offcore.tools.kv.peers import InStream, Transfers, Way, open_way
from offcore.tools.report import Stamp, dumps

LAYERS = 28
TIMEOUT_S = 20.0
WAYS = ("offcore", "zero-sm", "batch64", "batch256", "batch", "kernel", "torch")


class Copies:
    """Copies of so many bytes, each waited for."""

    kinds = ("to_host", "to_gpu")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._gpu = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        self._host = torch.zeros(nbytes, dtype=torch.uint8).pin_memory()
        self._stream = torch.cuda.Stream()

    def until(self, ended: threading.Event, kind: str) -> list[float]:
        """Microseconds of each that began before that."""
        to_host = kind == "to_host"
        dst, src = (self._host, self._gpu) if to_host else (self._gpu, self._host)
        times = []
        while not ended.is_set():
            began = time.perf_counter()
            with torch.cuda.stream(self._stream):
                dst.copy_(src, non_blocking=True)
            self._stream.synchronize()
            times.append((time.perf_counter() - began) * 1e6)
        return times


class Launches:
    """Launches of a small kernel: the time of the call."""

    kinds = ("launch", "launch_default")  # in a stream of its own, in the default stream
    nbytes = 0

    def __init__(self) -> None:
        self._values = torch.zeros(1024, device="cuda")
        self._stream = torch.cuda.Stream()

    def until(self, ended: threading.Event, kind: str) -> list[float]:
        times = []
        stream = torch.cuda.default_stream() if kind == "launch_default" else self._stream
        with torch.cuda.stream(stream):
            while not ended.is_set():
                began = time.perf_counter()
                torch.relu_(self._values)
                times.append((time.perf_counter() - began) * 1e6)
        stream.synchronize()
        return times


Others = Copies | Launches


class Nothing(InStream):
    """No transfer for a while: what others take alone."""

    streamed = False

    def enqueue(self, direction: str, stream: int) -> float:
        time.sleep(0.005)
        return 0.0

    def close(self) -> None: ...


def beside(way: Way, direction: str, others: Others, kind: str) -> tuple[list[float], float]:
    """Those times, and the microseconds that the way took meanwhile."""
    stream = torch.cuda.Stream()
    ended = threading.Event()
    took: list[float] = []

    def transfer() -> None:
        try:
            began = time.perf_counter()
            way.enqueue(direction, stream.cuda_stream)
            if way.streamed:
                stream.synchronize()
            way.settle()
            took.append((time.perf_counter() - began) * 1e6)
        finally:
            ended.set()

    thread = threading.Thread(target=transfer)
    thread.start()
    times = others.until(ended, kind)
    thread.join()
    return times, took[0]


def measure(
    case: Case, name: str, way: Way, rounds: int, page: int, others: Others
) -> list[dict[str, Any]]:
    rows = []
    for direction in ("load", "store"):
        for kind in others.kinds:
            beside(way, direction, others, kind)  # warm
            found = [beside(way, direction, others, kind) for _ in range(rounds)]
            times = sorted(one for times, _ in found for one in times)
            row = {
                "impl": name,
                "direction": direction,
                "other": kind,
                "other_bytes": others.nbytes,
                "layout": case.layout,
                "page_bytes": page,
                "layers": LAYERS,
                "blocks": case.blocks,
                "median_us": round(times[len(times) // 2], 1),
                "p90_us": round(times[len(times) * 9 // 10], 1),
                "most_us": round(times[-1], 1),
                "count": len(times),
                "transfer_us": round(sorted(took for _, took in found)[rounds // 2], 1),
            }
            rows.append(row)
    return rows


def beside_copies(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for page in parse_sizes(args.pages):
        case = Case("cuda", Geometry("", LAYERS, page), "layers", args.blocks)
        ways: dict[str, Way] = {
            "offcore": Transfers(case, TIMEOUT_S),
            "offcore, one engine": Transfers(case, TIMEOUT_S, crossing_bytes=0),
            "batch": open_way("batch", case, TIMEOUT_S),
            "kernel": open_way("kernel", case, TIMEOUT_S),
        }
        for name, way in ways.items():
            for nbytes in parse_sizes(args.copies):
                yield from measure(case, name, way, args.rounds, page, Copies(nbytes))
            way.close()
        case.close()


def beside_launches(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    launches = Launches()
    for page in parse_sizes(args.apart):
        case = Case("cuda", Geometry("", LAYERS, page), "kv-apart", args.blocks)
        ways: dict[str, Way] = {"nothing": Nothing()}
        ways |= {name: open_way(name, case, TIMEOUT_S) for name in WAYS}
        for name, way in ways.items():
            yield from measure(case, name, way, args.rounds, page, launches)
            way.close()
        case.close()


PARTS = {"copies": (beside_copies, "others"), "launches": (beside_launches, "launches")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--pages", default="8K,64K", help="bytes of a layer's page")
    parser.add_argument("--apart", default="32K,64K", help="the same of K and V, for launches")
    parser.add_argument("--copies", default="1K,512K", help="bytes of the other copies")
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7, help="transfers of each kind")
    args = parser.parse_args()
    stamp = asdict(Stamp())
    folder = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
    rows = []
    for part in args.only:
        measured, name = PARTS[part]
        with (folder / f"cuda-kv-{name}.jsonl").open("w", encoding="utf-8", buffering=1) as out:
            for row in measured(args):
                rows.append(row)
                out.write(dumps(row | stamp))
    print("page, transfer, copy or launch: us of that, median, 90 %, most; of the transfer")
    for row in rows:
        print(
            f"{format_bytes(row['page_bytes']):>5} {row['impl']:>19} {row['direction']:>5} "
            f"{format_bytes(row['other_bytes']):>4} {row['other']:>14}: {row['median_us']:9.1f} "
            f"{row['p90_us']:9.1f} {row['most_us']:9.1f} {row['transfer_us']:9.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
