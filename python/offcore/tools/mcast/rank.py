"""One rank of `offcore mcast bench` on its host: `python -m offcore.tools.mcast.rank JSON`.

All implementations run in the same processes, one after the other in each batch. Rank 0 writes what
was measured to its standard output, a JSON object a line. Where it is told to, it asks there for
the switch ports' counters too, and reads the answer from its standard input.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from offcore import mcast
from offcore.errors import Error
from offcore.tools.bench.subjects import torch_for
from offcore.tools.mcast.bench import spread

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Call = Callable[[Bytes, Bytes], None]  # out, this rank's part
# That a rank receives in a batch, about: what ran before it leaves caches cold.
_BATCH_BYTES = 256 << 20
_CALLS_MAX = 20


class Rank:
    """What an order says, and the means to carry it out."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.rank, self.hosts = order["rank"], order["hosts"]
        self.root = order["op"] == "broadcast" and self.rank == 0
        host, _, port = order["meeting"].rpartition(":")
        self.comms: dict[str, mcast.Communicator] = {}
        for place, name in enumerate(("offcore", "ring")):
            if name == "offcore" or name in order["impls"]:
                self.comms[name] = mcast.Communicator(
                    f"{host}:{int(port) + place}",
                    rank=self.rank,
                    world_size=self.hosts,
                    multicast=name == "offcore",
                    timeout=order["timeout_s"],
                    **order["options"],
                )
        self.calls: dict[str, Call] = {
            name: self._ours(comm) for name, comm in self.comms.items() if name in order["impls"]
        }
        if "gloo" in order["impls"]:
            self.calls["gloo"] = self._gloo(f"tcp://{host}:{int(port) + 2}")

    def _ours(self, comm: mcast.Communicator) -> Call:
        if self.order["op"] == "broadcast":
            return lambda out, part: void(comm.broadcast(out, 0).wait())
        return lambda out, part: void(comm.all_gather(out, part).wait())

    def _gloo(self, place: str) -> Call:
        torch = torch_for("gloo")
        torch.set_num_threads(1)
        group = torch.distributed
        group.init_process_group("gloo", init_method=place, rank=self.rank, world_size=self.hosts)
        if self.order["op"] == "broadcast":
            return lambda out, part: group.broadcast(torch.from_numpy(out), 0)
        return lambda out, part: group.all_gather_into_tensor(
            torch.from_numpy(out), torch.from_numpy(part)
        )

    def meet(self) -> None:
        self.comms["offcore"].barrier().wait()

    def all(self, value: float) -> list[float]:
        """Every rank's value."""
        out = np.zeros(self.hosts, np.float64)
        self.comms["offcore"].all_gather(out, np.array([value])).wait()
        return [float(one) for one in out]

    def switch_bytes(self) -> int:
        """What the switches have carried, where somebody counts; rank 0 asks."""
        if self.rank == 0 and self.order["counted"]:
            print(json.dumps({"ask": "switch_bytes"}), flush=True)
            return int(sys.stdin.readline())
        return 0

    def counted(self, impl: str) -> tuple[int, int]:
        if impl not in self.comms:
            return 0, 0
        counters = self.comms[impl].counters
        return counters["fetched_chunks"], counters["duplicates"]

    def wrong(self, call: Call, nbytes: int) -> int:
        """Wrong bytes at all ranks in a call on fresh data."""
        expected: Bytes = np.frombuffer(np.random.default_rng(nbytes).bytes(nbytes), np.uint8)
        out, part = self.buffers(nbytes)
        if self.order["op"] == "broadcast":
            out[:] = expected if self.root else 0
        else:
            part[:] = expected[self.rank * len(part) : (self.rank + 1) * len(part)]
        call(out, part)
        return int(sum(self.all(float(np.count_nonzero(out != expected)))))

    def buffers(self, nbytes: int) -> tuple[Bytes, Bytes]:
        """Of pages that have been written: what only reads as zeros is one page, hot in a cache."""
        count = nbytes // self.hosts if self.order["op"] == "all_gather" else 0
        return np.full(nbytes, 1, np.uint8), np.full(count, 1, np.uint8)

    def close(self) -> None:
        self.meet()
        for comm in self.comms.values():
            comm.close()
        if "gloo" in self.calls:  # its threads do not survive the process's end
            torch_for("gloo").distributed.destroy_process_group()

    def measure(self, nbytes: int) -> list[dict[str, Any]]:
        wrong = {name: self.wrong(call, nbytes) for name, call in self.calls.items()}
        times: dict[str, list[float]] = {name: [] for name in self.calls}
        carried: dict[str, list[float]] = {name: [] for name in self.calls}
        counts = {name: [0, 0] for name in self.calls}
        out, part = self.buffers(nbytes)
        calls = max(1, min(_CALLS_MAX, _BATCH_BYTES // max(nbytes, 1)))
        for batch in range(self.order["batches"] + 1):
            for name, call in self.calls.items():
                self.meet()
                ports, known = self.switch_bytes(), self.counted(name)
                self.meet()
                started_s = time.perf_counter()
                for _ in range(calls):
                    call(out, part)
                took_s = time.perf_counter() - started_s
                self.meet()
                ports = self.switch_bytes() - ports
                if batch > 0:
                    times[name].append(max(self.all(took_s)) / calls * 1e6)
                    carried[name].append(ports / calls)
                    for place, count in enumerate(self.counted(name)):
                        counts[name][place] += count - known[place]
        rows = []
        for name in self.calls:
            totals = [int(sum(self.all(float(count)))) for count in counts[name]]
            ours = name in self.comms
            rows.append(
                {
                    "impl": name,
                    "bytes": nbytes,
                    **spread(times[name]),
                    "calls": calls * self.order["batches"],
                    "wrong": wrong[name],
                    "fetched_chunks": totals[0] if ours else None,
                    "duplicates": totals[1] if ours else None,
                    "switch_bytes": int(statistics.median(carried[name]))
                    if self.order["counted"]
                    else None,
                }
            )
        return rows


def void(_: object) -> None:
    """Nothing: a call's result is not looked at."""


def main() -> None:
    order = json.loads(sys.argv[1])
    try:
        rank = Rank(order)
        for nbytes in order["sizes"]:
            rows = rank.measure(nbytes)
            if rank.rank == 0:
                for row in rows:
                    print(json.dumps(row), flush=True)
        rank.close()
    except Error as failure:
        if order["rank"] == 0:
            print(json.dumps({"raised": [failure.code, str(failure)]}), flush=True)
        raise SystemExit(f"offcore: rank {order['rank']}: {failure.code}: {failure}") from None


if __name__ == "__main__":
    main()
