"""Random collectives on GPUs, every byte checked, and the small things that they rest on.

Run by h200_check.py, with all ranks in one process or as one rank of several.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import time
from typing import Any

ARMED_S = 40


class Checker:
    """Random operations; every rank draws the same ones, and every byte is checked."""

    def __init__(self, comm: Any, seed: int, armed: bool) -> None:
        import numpy as np

        self.armed = armed

        self.np = np
        self.comm = comm
        self.random = random.Random(seed)
        self.room = 6 << 20
        self.out, self.inp = comm.window(self.room), comm.window(self.room)
        self.hosts = {r: [comm.host_array(self.room) for _ in "oi"] for r in comm.local_ranks}
        self.torch_buffers: dict[int, list[Any]] = {}
        self.wrong = 0
        self.calls = 0
        try:
            import torch
        except ImportError:
            torch = None
        if torch is not None and torch.cuda.is_available():
            for rank, gpu in zip(comm.local_ranks, comm._gpus, strict=True):
                self.torch_buffers[rank] = [
                    torch.empty(self.room, dtype=torch.uint8, device=f"cuda:{gpu}") for _ in "oi"
                ]

    def pattern(self, *seed: int) -> Any:
        return self.np.random.default_rng(seed)

    def size(self) -> int:
        kind = self.random.random()
        if kind < 0.5:
            return self.random.randrange(1, 4096)
        if kind < 0.9:
            return self.random.randrange(1, 1 << 16)
        return self.random.randrange(1, 1 << 20)

    def one(self) -> None:
        comm, ranks = self.comm, self.comm.ranks
        op = self.random.choice(["all_gather", "all_to_all", "broadcast", "scatter", "gather"])
        part = self.size()
        in_place = op in ("all_gather", "all_to_all") and self.random.random() < 0.4
        kinds = [*comm.variants(op, in_place), "auto"]
        variant = self.random.choice(kinds)
        if variant.startswith("prelaunch_") and (not self.armed or self.random.random() < 0.7):
            variant = variant.removeprefix("prelaunch_")
        places = ["window", "host", "torch"] if self.torch_buffers else ["window", "host"]
        out_at = self.random.choice(["window", *places])
        in_at = self.random.choice(places)
        protocol = self.random.choice(["auto", "barrier", "credits", "eager", "promise"])
        offset = self.random.choice([0, 0, 16, 4096, self.random.randrange(64)])
        root = self.random.randrange(ranks)
        self.calls += 1
        sizes = {
            "all_gather": (part, ranks * part),
            "all_to_all": (ranks * part, ranks * part),
            "broadcast": (part, part),
            "scatter": (ranks * part, part),
            "gather": (part, ranks * part),
        }
        in_bytes, out_bytes = sizes[op]
        if max(in_bytes, out_bytes) + offset > self.room:
            return
        if in_place and out_at != "window":
            in_place = False
        if protocol == "promise" and out_at != "window":
            protocol = "auto"
        data = [
            self.pattern(self.calls, r).integers(0, 256, in_bytes, "uint8") for r in range(ranks)
        ]
        for rank in comm.local_ranks:
            self.place(rank, "o", out_at, offset, self.np.full(out_bytes, 255 - rank, "uint8"))
            if in_place:
                own = rank * part if op == "all_gather" else 0
                self.place(rank, "o", out_at, offset + own, data[rank])
            else:
                self.place(rank, "i", in_at, offset, data[rank])
        self.settle()
        comm.barrier()  # a promise is kept, and nobody fills what a peer still writes
        what = (
            f"{op} part={part} {variant} {protocol} out={out_at} in={in_at} {in_place=} {offset=}"
        )
        try:
            handle = self.start(
                op, out_at, in_at, offset, in_bytes, out_bytes, in_place, variant, protocol, root
            )
            if handle.wait().protocol == "credits" and self.random.random() < 0.5:
                handle.release()  # nobody calls it again before the bytes were looked at
        except Exception as failure:
            if getattr(failure, "code", "") == "unsupported":
                return
            print(f"FAILED {what}: {failure}", flush=True)
            raise
        for rank in comm.local_ranks:
            expected = self.expected(op, data, part, rank, root)
            if expected is None:
                continue
            got = self.look(rank, out_at, offset, expected.size)
            bad = int((got != expected).sum())
            if bad:
                first = int(self.np.flatnonzero(got != expected)[0])
                print(
                    f"WRONG rank {rank}: {bad} bytes from {first} on: {what} root={root}",
                    flush=True,
                )
                self.wrong += bad
        comm.barrier()

    def expected(self, op: str, data: list[Any], part: int, rank: int, root: int) -> Any:
        joined = self.np.concatenate
        if op == "all_gather":
            return joined(data)
        if op == "all_to_all":
            return joined([d[rank * part : (rank + 1) * part] for d in data])
        if op == "broadcast":
            return data[root]
        if op == "scatter":
            return data[root][rank * part : (rank + 1) * part]
        return joined(data) if rank == root else None

    def start(
        self,
        op: str,
        out_at: str,
        in_at: str,
        offset: int,
        in_bytes: int,
        out_bytes: int,
        in_place: bool,
        variant: str,
        protocol: str,
        root: int,
    ) -> Any:
        out = self.side("o", out_at, offset, out_bytes)
        args = [out] if in_place else [out, self.side("i", in_at, offset, in_bytes)]
        options: dict[str, Any] = {"variant": variant, "protocol": protocol}
        if not op.startswith("all"):
            options["root"] = root
        return getattr(self.comm, op)(*args, **options)

    def side(self, side: str, at: str, offset: int, nbytes: int) -> Any:
        index = "oi".index(side)
        if at == "window":
            return (self.out, self.inp)[index].region(offset, nbytes)
        buffers = self.hosts if at == "host" else self.torch_buffers
        return [buffers[rank][index][offset : offset + nbytes] for rank in self.comm.local_ranks]

    def place(self, rank: int, side: str, at: str, offset: int, data: Any) -> None:
        index = "oi".index(side)
        if at == "window":
            (self.out, self.inp)[index].write(data, offset, rank)
        elif at == "host":
            self.hosts[rank][index][offset : offset + data.size] = data
        else:
            import torch

            self.torch_buffers[rank][index][offset : offset + data.size] = torch.from_numpy(data)

    def look(self, rank: int, at: str, offset: int, nbytes: int) -> Any:
        if at == "window":
            got = self.np.empty(nbytes, "uint8")
            self.out.read(got, offset, rank)
            return got
        if at == "host":
            return self.hosts[rank][0][offset : offset + nbytes]
        return self.torch_buffers[rank][0][offset : offset + nbytes].cpu().numpy()

    def settle(self) -> None:
        """torch's default stream, which fills its tensors; parked streams are none of its."""
        if self.torch_buffers:
            import torch

            for gpu in self.comm._gpus:
                torch.cuda.default_stream(gpu).synchronize()


def check(args: argparse.Namespace) -> int:
    import offcore

    if args.rank is None:
        options: dict[str, Any] = {"ranks": args.ranks}
    else:
        store = f"127.0.0.1:{args.ports[0]}"
        options = {"store": store, "rank": args.rank, "world_size": args.ranks}
    total = wrong = 0
    for turn in range(args.turns):
        signals = ("fenced", "copy_order")[turn % 2]
        with offcore.Communicator(backend="cuda", timeout=20, signals=signals, **options) as comm:
            checker = Checker(comm, turn, args.armed)
            for _ in range(args.calls):
                checker.one()
            total += checker.calls
            wrong += checker.wrong
            del checker
    if not args.rank:
        print(f"{total} operations, {wrong} wrong bytes", flush=True)
    return 1 if wrong else 0


def basics(args: argparse.Namespace) -> int:
    """Small things that random runs rest on, one by one, so that a failure has a name."""
    import numpy as np

    import offcore

    def told(what: str, began: float) -> None:
        print(f"   {what}: {(time.monotonic() - began) * 1e3:.2f} ms", flush=True)

    def filled(window: Any, part: int, base: int) -> None:
        for rank in comm.local_ranks:
            window.write(np.full(part, base + rank, np.uint8), rank * part, rank)

    def wrong(window: Any, part: int, base: int) -> int:
        bad = 0
        for rank in comm.local_ranks:
            got = np.empty(part * comm.ranks, np.uint8)
            window.read(got, 0, rank)
            bad += int((got.reshape(-1, part) != base + np.arange(comm.ranks)[:, None]).sum())
        return bad

    failures = 0
    began = time.monotonic()
    comm = offcore.Communicator(backend="cuda", ranks=args.ranks, timeout=10)
    told("communicator", began)
    began = time.monotonic()
    window = comm.window(64 << 20)
    told("window of 64 MiB", began)
    for variant in comm.variants("all_gather", True):
        if variant.startswith("prelaunch_"):
            continue
        for protocol in ("promise", "barrier", "eager"):
            for part in (4, 1000, 65536, 1 << 20):
                filled(window, part, part % 100)
                began = time.monotonic()
                try:
                    region = window.region(0, part * comm.ranks)
                    comm.all_gather(region, variant=variant, protocol=protocol).wait()
                except offcore.Error as error:
                    print(f"   FAILED {variant} {protocol} {part}: {error.code}: {error}")
                    return 1
                if bad := wrong(window, part, part % 100):
                    print(f"   WRONG {variant} {protocol} {part}: {bad} bytes")
                    failures += 1
            told(f"{variant} {protocol}, 1 MiB a rank", began)
    began = time.monotonic()
    wide = comm.window(3 << 30)
    told("window of 3 GiB (its stride is beyond a 2-D copy's pitch)", began)
    filled(wide, 1000, 5)
    comm.all_gather(wide.region(0, 1000 * comm.ranks), variant="fan").wait()
    if bad := wrong(wide, 1000, 5):
        print(f"   WRONG fan in a wide window: {bad} bytes")
        failures += 1
    del wide
    comm.close()
    print(f"   basics: {failures} failures", flush=True)
    return 1 if failures else 0


def armed(args: argparse.Namespace) -> int:
    """What happens to the driver while a program is parked: this is where it could hang."""
    import numpy as np

    import offcore

    faulthandler.dump_traceback_later(ARMED_S, exit=True)  # where it hangs
    comm = offcore.Communicator(backend="cuda", ranks=args.ranks, timeout=10)
    window = comm.window(1 << 20)

    def say(what: str) -> None:
        print(f"   {time.monotonic() - began:.3f} s  {what}", flush=True)

    began = time.monotonic()
    for variant in ("prelaunch_fan", "prelaunch_b2b", "prelaunch_pcpy"):
        for _ in range(5):
            result = comm.all_gather(window, variant=variant).wait()
        say(f"{variant}: armed ahead {result.armed_ahead}")
    other = comm.window(8 << 20)
    say("made a window while programs were parked")
    comm.all_gather(other, variant="fan").wait()
    say("used it")
    for _ in range(3):  # other inputs at every call: what is parked has to be taken back
        inputs = [comm.host_array((1 << 20) // comm.ranks) for _ in comm.local_ranks]
        for array in inputs:
            array[:] = 9
        comm.all_gather(window, inputs, variant="prelaunch_fan").wait()
        say("called with other buffers than were armed")
    got = np.empty(1 << 20, np.uint8)
    window.read(got, 0, 0)
    del other
    say("freed a window while programs were parked")
    comm.close()
    say("closed: what was parked has run out")
    return 0 if (got[: 1 << 18] == 9).all() else 1
