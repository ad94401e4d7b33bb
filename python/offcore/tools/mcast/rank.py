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
Arrays = list[tuple[Bytes, Bytes]]  # of each operation: out, this rank's part or input
Call = Callable[[Arrays], None]
_FLOATS = 251  # inputs of reductions: whole numbers below this, whose sums are exact
_COUNTS = ("switch_bytes", "host_sent_bytes", "host_received_bytes")
# That a rank receives in a batch, about: what ran before it leaves caches cold.
_BATCH_BYTES = 256 << 20
_CALLS_MAX = 20


class Rank:
    """What an order says, and the means to carry it out."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.rank, self.hosts = order["rank"], order["hosts"]
        self.ops: list[str] = order["ops"]
        self.root = self.ops[0] == "broadcast" and self.rank == 0
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
        def start(op: str, out: Bytes, part: Bytes) -> mcast.Handle:
            if op == "broadcast":
                return comm.broadcast(out, 0)
            if op == "all_gather":
                return comm.all_gather(out, part)
            return comm.reduce_scatter(out, part, dtype="float32")

        return self._at_once(start)

    def _gloo(self, place: str) -> Call:
        torch = torch_for("gloo")
        torch.set_num_threads(1)
        group = torch.distributed
        group.init_process_group("gloo", init_method=place, rank=self.rank, world_size=self.hosts)

        def start(op: str, out: Bytes, part: Bytes) -> Any:
            to, given = torch.from_numpy(out), torch.from_numpy(part)
            if op == "broadcast":
                return group.broadcast(to, 0, async_op=True)
            if op == "all_gather":
                return group.all_gather_into_tensor(to, given, async_op=True)
            kind = torch.float32
            return group.reduce_scatter_tensor(to.view(kind), given.view(kind), async_op=True)

        return self._at_once(start)

    def _at_once(self, start: Callable[[str, Bytes, Bytes], Any]) -> Call:
        """Starts each operation, and waits for all of them."""

        def call(arrays: Arrays) -> None:
            started = [start(op, *pair) for op, pair in zip(self.ops, arrays, strict=True)]
            for one in started:
                one.wait()

        return call

    def meet(self) -> None:
        self.comms["offcore"].barrier().wait()

    def all(self, value: float) -> list[float]:
        """Every rank's value."""
        out = np.zeros(self.hosts, np.float64)
        self.comms["offcore"].all_gather(out, np.array([value])).wait()
        return [float(one) for one in out]

    def carried(self) -> list[int]:
        """What the testbed's ports have counted, where somebody counts; rank 0 asks."""
        if self.rank == 0 and self.order["counted"]:
            print(json.dumps({"ask": "counted"}), flush=True)
            return [int(one) for one in json.loads(sys.stdin.readline())]
        return [0] * len(_COUNTS)

    def counted(self, impl: str) -> tuple[int, int]:
        if impl not in self.comms:
            return 0, 0
        counters = self.comms[impl].counters
        return counters["fetched_chunks"], counters["duplicates"]

    def wrong(self, call: Call, nbytes: int) -> int:
        """Wrong bytes at all ranks in a call on fresh data."""
        arrays = self.buffers(nbytes)
        filled = zip(self.ops, arrays, strict=True)
        expected = [self._fill(op, nbytes, *pair) for op, pair in filled]
        call(arrays)
        wrong = sum(
            np.count_nonzero(out != right) for (out, _), right in zip(arrays, expected, strict=True)
        )
        return int(sum(self.all(float(wrong))))

    def _fill(self, op: str, nbytes: int, out: Bytes, part: Bytes) -> Bytes:
        """Gives an operation its data; what `out` has to be."""
        if op == "reduce_scatter":
            whole = [self._numbers(rank, nbytes // 4) for rank in range(self.hosts)]
            part[:] = whole[self.rank].view(np.uint8)
            own = slice(self.rank * len(out) // 4, (self.rank + 1) * len(out) // 4)
            total: Bytes = sum(one[own] for one in whole).view(np.uint8)
            return total
        expected: Bytes = np.frombuffer(np.random.default_rng(nbytes).bytes(nbytes), np.uint8)
        if op == "broadcast":
            out[:] = expected if self.root else 0
        else:
            part[:] = expected[self.rank * len(part) : (self.rank + 1) * len(part)]
        return expected

    @staticmethod
    def _numbers(rank: int, count: int) -> Any:
        return np.random.default_rng(rank).integers(0, _FLOATS, count).astype(np.float32)

    def buffers(self, nbytes: int) -> Arrays:
        """Of pages that have been written: what only reads as zeros is one page, hot in a cache."""
        sizes = {
            "broadcast": (nbytes, 0),
            "all_gather": (nbytes, nbytes // self.hosts),
            "reduce_scatter": (nbytes // self.hosts, nbytes),
        }
        return [
            (np.full(sizes[op][0], 1, np.uint8), np.full(sizes[op][1], 1, np.uint8))
            for op in self.ops
        ]

    def close(self) -> None:
        if "gloo" in self.calls:  # its threads do not survive the process's end
            torch_for("gloo").distributed.destroy_process_group()
        self.meet()  # rank 0 has gloo's store, which the others want until then
        for comm in self.comms.values():
            comm.close()

    def measure(self, nbytes: int) -> list[dict[str, Any]]:
        wrong = {name: self.wrong(call, nbytes) for name, call in self.calls.items()}
        times: dict[str, list[float]] = {name: [] for name in self.calls}
        carried: dict[str, list[list[int]]] = {name: [] for name in self.calls}
        counts = {name: [0, 0] for name in self.calls}
        arrays = self.buffers(nbytes)
        calls = max(1, min(_CALLS_MAX, _BATCH_BYTES // max(nbytes, 1)))
        for batch in range(self.order["batches"] + 1):
            for name, call in self.calls.items():
                self.meet()
                ports, known = self.carried(), self.counted(name)
                self.meet()
                started_s = time.perf_counter()
                for _ in range(calls):
                    call(arrays)
                took_s = time.perf_counter() - started_s
                self.meet()
                since = self.carried()
                if batch > 0:
                    times[name].append(max(self.all(took_s)) / calls * 1e6)
                    carried[name].append([b - a for a, b in zip(ports, since, strict=True)])
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
                    **self._per_call(carried[name], calls),
                }
            )
        return rows

    def _per_call(self, batches: list[list[int]], calls: int) -> dict[str, int | None]:
        """What ports counted in one call; of hosts, the mean."""
        found: dict[str, int | None] = {}
        for place, name in enumerate(_COUNTS):
            sharers = 1 if name == "switch_bytes" else self.hosts
            counts = [batch[place] / calls / sharers for batch in batches]
            found[name] = int(statistics.median(counts)) if self.order["counted"] else None
        return found


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
