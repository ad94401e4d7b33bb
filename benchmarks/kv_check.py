"""Checks transfers of KV blocks on this machine's GPU, every byte, and tells how fast they are.

    python benchmarks/kv_check.py                    # all of the below
    python benchmarks/kv_check.py --only speed --pages 8K,32K

Random jobs of all layouts run in both directions at once, in any order and priority, packed or not,
beside matrix products that keep the SMs busy. Whoever is told of an end looks at the bytes at once.
Blocks of threads that only wait hold every SM: transfers by engines must end meanwhile, and one by
a kernel must not. Streams compare layers behind gates, and nothing but the gates holds them back.
Objects of LMCache's go by its adapter, at any places of memory that is registered in pieces.
Speed is what a caller sees, from the call until `wait` returns, as medians: folded over the layers
and page by page, beside one contiguous copy of pinned memory.
Without a GPU (or with --backend host) the host backend is checked, on smaller caches.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
from kv_objects import Objects

from offcore import _core, kv
from offcore.serving import lmcache
from offcore.sizes import parse_sizes

SLEEP_CYCLES = 20_000_000  # a kernel that a store has to come after
PRODUCT = 4096
TURNS = 9
GATE_TURNS = 60
LAYERS = 28
ON_GPU = ("streams", "gates", "order", "held")  # of the checks: they need one
HELD_S = 5.0  # the blocks go by themselves then
# What needs no SM has ended by then. Blocks that look at a word of the host take much of the link.
ENDS_S = 1.5


class Checks:
    """What the checks share: where caches lie, and how one is made."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.gpu = args.backend == "cuda"
        self.device = "cuda" if self.gpu else "cpu"
        self.random = random.Random(args.seed)
        torch.manual_seed(args.seed)

    def cache(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device)

    def pool(self, layout: kv.Layout, blocks: int, rows_chunk: int = 0) -> kv.HostPool:
        chunk = rows_chunk * layout.row_bytes or 1 << 30
        rows = blocks // layout.row_blocks
        return kv.HostPool(layout.row_bytes, rows, backend=self.args.backend, chunk_bytes=chunk)

    def slots(self, layout: kv.Layout, count: int) -> list[int]:
        """Any, or those of whole rows but the first and the last one."""
        shared = layout.row_blocks
        if self.random.random() < 0.5:
            return self.random.sample(range(layout.blocks), count)
        rows = self.random.sample(range(layout.blocks // shared), layout.blocks // shared)
        skip = self.random.randrange(min(shared, layout.blocks - count + 1))
        return [row * shared + place for row in rows for place in range(shared)][skip:][:count]

    def policies(self) -> tuple[str, ...]:
        """Those that differ here."""
        return ("auto", "zero_sm", "pack") if self.gpu else ("auto",)

    def settle(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()


class Busy:
    """A matrix product after the other in a stream of its own."""

    def __init__(self, checks: Checks) -> None:
        self.on = checks.gpu
        if self.on:
            self.stream = torch.cuda.Stream()
            self.a = torch.randn(PRODUCT, PRODUCT, dtype=torch.bfloat16, device="cuda")
            torch.cuda.synchronize()

    def more(self, count: int = 8) -> None:
        if self.on:
            with torch.cuda.stream(self.stream):
                for _ in range(count):
                    torch.mm(self.a, self.a)


def layouts(checks: Checks) -> list[tuple[str, kv.Layout, Any]]:
    """Caches of each kind, and a view of each as (blocks, bytes of a row)."""
    layers, blocks, page = 9, 96, 4096 + 512 * checks.random.randrange(8)
    each = [checks.cache(blocks, page) for _ in range(layers)]
    apart = [checks.cache(2, blocks, page) for _ in range(layers)]
    pairs = [(checks.cache(blocks, page), checks.cache(blocks, 640)) for _ in range(layers)]
    outermost, contiguous = checks.cache(layers, blocks, page), checks.cache(blocks, layers, page)
    return [
        ("a tensor a layer", kv.Layout(each), lambda b: [t[b] for t in each]),
        ("K and V apart", kv.Layout(apart, block_axis=1), lambda b: [t[:, b] for t in apart]),
        ("two sizes", kv.Layout(pairs), lambda b: [t[b] for pair in pairs for t in pair]),
        (
            "layers outermost",
            kv.Layout(outermost, block_axis=1, layer_axis=0),
            lambda b: [outermost[:, b]],
        ),
        ("contiguous", kv.Layout(contiguous, layer_axis=1), lambda b: [contiguous[b]]),
        (
            "K and V apart, 16 blocks a row",
            kv.Layout(apart, block_axis=1, row_blocks=16),
            lambda b: [t[:, b] for t in apart],
        ),
        (
            "layers outermost, 3 blocks a row",
            kv.Layout(outermost, block_axis=1, layer_axis=0, row_blocks=3),
            lambda b: [outermost[:, b]],
        ),
    ]


def at(pool: kv.HostPool, layout: kv.Layout, slot: int) -> bytes:
    """What a slot has of its row."""
    shared = layout.row_blocks
    page = layout.copies()[0][1] if shared > 1 else layout.block_bytes
    return pool.row(slot // shared).reshape(-1, shared, page)[:, slot % shared].tobytes()


def random_jobs(checks: Checks) -> int:
    """Jobs of any kind under way together; then all blocks and rows against plain numpy."""
    wrong = 0
    busy = Busy(checks)
    policies = checks.policies()
    rounds = max(1, checks.args.jobs // (20 * len(policies)))
    for (name, layout, parts), policy in itertools.product(layouts(checks), policies):
        pool = checks.pool(layout, layout.blocks, rows_chunk=7)
        pool.allocate(pool.blocks, timeout=60)

        def image(parts: Any = parts, blocks: int = layout.blocks) -> list[bytes]:
            checks.settle()
            return [
                b"".join(p.cpu().numpy().tobytes() for p in parts(block)) for block in range(blocks)
            ]

        caches = image()
        rows = [at(pool, layout, slot) for slot in range(layout.blocks)]
        ahead = checks.random.choice((1, 1 << 16, 32 << 20))
        jobs = 0
        with kv.BlockTransfer(layout, pool, ahead_bytes=ahead, policy=policy) as transfer:
            copied = pages = 0
            for _ in range(rounds):
                busy.more()
                waiting = []
                for _ in range(20):
                    count = checks.random.randrange(layout.blocks)
                    named = [checks.random.sample(range(layout.blocks), count)]
                    named.append(checks.slots(layout, count))
                    load = checks.random.random() < 0.5
                    call = transfer.load if load else transfer.store
                    by_layer = checks.random.choice((0, 0, 1, 2))
                    waiting.append(call(*named, priority=count % 5, by_layer=by_layer))
                    for block, slot in zip(*named, strict=True):
                        if load:
                            caches[block] = rows[slot]
                        else:
                            rows[slot] = caches[block]
                for job in waiting:
                    result = job.wait()
                    copied, pages = copied + result.commands, pages + result.pages
                jobs += len(waiting)
                wrong += sum(a != b for a, b in zip(image(), caches, strict=True))
                wrong += sum(at(pool, layout, k) != rows[k] for k in range(layout.blocks))
        print(f"{name}, {policy}: {jobs} jobs, {wrong} wrong; {pages} pages by {copied} commands")
        pool.close()
    return wrong


def streams(checks: Checks) -> int:
    """Stores behind a stream's kernels, kernels behind a load's layers, and a cancelled load."""
    cache = checks.cache(LAYERS, 512, 32 << 10)
    layout = kv.Layout(cache, block_axis=1, layer_axis=0)
    pool = checks.pool(layout, 256)
    slots = pool.allocate(256, timeout=60)
    blocks = torch.randperm(512)[:256]
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    wrong = 0
    for turn, policy in zip(range(12), itertools.cycle(checks.policies()), strict=False):
        with kv.BlockTransfer(layout, pool, policy=policy) as transfer:
            with torch.cuda.stream(writer):
                torch.cuda._sleep(SLEEP_CYCLES)
                cache.fill_(turn + 1)
            stored = transfer.store(blocks, slots, after=writer)
            job = transfer.load(blocks, slots, by_layer=True, after=writer)
            stored.wait()
            wrong += sum(int((pool.row(slot) != turn + 1).any()) for slot in slots[::16])
            job.wait()
            cache.zero_()
            checks.settle()
            job = transfer.load(blocks, slots, by_layer=turn // 3 % 3)
            sums = []
            with torch.cuda.stream(reader):
                for layer in range(LAYERS):
                    job.wait_layer(layer, reader)
                    sums.append((cache[layer, blocks.cuda()] != turn + 1).sum())
            wrong += int(torch.stack(sums).sum())
            job = transfer.load(blocks, slots, after=writer)
            job.cancel()
            result = job.wait()
            wrong += result.bytes != result.blocks * layout.block_bytes
    print(f"streams: {wrong} wrong")
    return wrong


def gates(checks: Checks) -> int:
    """Streams that wait for layers which are not enqueued yet: each compares every byte of its
    job's blocks, a layer after the other, beside three other jobs."""
    cache = checks.cache(LAYERS, 512, 16 << 10)
    layout = kv.Layout(cache, block_axis=1, layer_axis=0)
    pool = checks.pool(layout, 512)
    slots = pool.allocate(512, timeout=60)
    rows = checks.cache(512, LAYERS, 16 << 10)  # so that kernels find them without the link
    for slot, row in zip(slots, rows.cpu().numpy(), strict=True):
        pool.row(slot)[:] = row.reshape(-1)
    readers = [torch.cuda.Stream() for _ in range(4)]
    found, took = torch.zeros(len(readers), dtype=torch.int64, device="cuda"), []
    for turn, policy in zip(range(GATE_TURNS), itertools.cycle(checks.policies()), strict=False):
        ahead = checks.random.choice((1, 1 << 20, 32 << 20))
        with kv.BlockTransfer(layout, pool, policy=policy, ahead_bytes=ahead) as transfer:
            cache.zero_()
            parts = zip(torch.randperm(512).chunk(4), torch.randperm(512).chunk(4), strict=True)
            asked = [(blocks, at, blocks.cuda(), at.cuda()) for blocks, at in parts]
            checks.settle()
            for number, (stream, (blocks, at, blocks_gpu, at_gpu)) in enumerate(
                zip(readers, asked, strict=True)
            ):
                by_layer, priority = checks.random.randrange(3), checks.random.randrange(3)
                job = transfer.load(blocks, slots[at], by_layer=by_layer, priority=priority)
                with torch.cuda.stream(stream):
                    for layer in range(LAYERS):
                        began = time.perf_counter()
                        # Without a gate once: memory that torch still allocates would wait.
                        job.wait_layer(layer, stream, gate=turn > 0)
                        took.append(time.perf_counter() - began)
                        other = cache[layer].index_select(0, blocks_gpu) != rows[at_gpu, layer]
                        found[number] += other.sum()
            checks.settle()
    wrong = int(found.sum())
    middle = 1e6 * statistics.median(took[len(readers) * LAYERS :])
    print(f"gates: {GATE_TURNS * len(readers)} jobs, {wrong} wrong; a call takes {middle:.1f} us")
    return wrong


def objects(checks: Checks) -> int:
    """LMCache's adapter, in a stream of its own."""
    made = Objects(checks.random, checks.device)
    turns = max(1, checks.args.jobs // 10)
    stream = torch.cuda.Stream() if checks.gpu else None
    with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
        wrong = sum(made.wrong() for _ in range(turns))
    lmcache.forget()
    print(f"objects: {2 * turns} calls, {wrong} wrong")
    return wrong


def order(checks: Checks) -> int:
    """Whoever is told of a copy's end looks at once: the host at stores, a kernel at loads. Both
    engines have a part of each job."""
    cache = checks.cache(LAYERS, 128, 8 << 10)
    layout = kv.Layout(cache, block_axis=1, layer_axis=0)
    pool = checks.pool(layout, 16)
    slots = pool.allocate(16, timeout=60)[torch.randperm(16).numpy()]
    reader = torch.cuda.Stream()
    wrong = crossed = 0
    found = torch.zeros((), dtype=torch.int64, device="cuda")
    checks.settle()
    with kv.BlockTransfer(layout, pool, policy="zero_sm") as transfer:
        for turn in range(checks.args.turns):
            value = 1 + turn % 250
            named = torch.randperm(128)[: 2 + turn % 15]
            rows = slots[: len(named)]
            with torch.cuda.stream(reader):
                cache[:, named.cuda()] = value
            result = transfer.store(named, rows, after=reader).wait()
            # From the last byte on, which is the last to come.
            wrong += sum(int((pool.row(slot)[::-1] != value).sum()) for slot in rows)
            crossed += result.calls["crossed"]
            for slot in rows:
                pool.row(slot)[:] = value ^ 255
            job = transfer.load(named, rows, after=reader)
            with torch.cuda.stream(reader):
                job.wait_stream(reader)
                found += (cache[:, named.cuda()] != value ^ 255).sum()
            crossed += job.wait().calls["crossed"]
    checks.settle()
    wrong += int(found)
    print(f"order: {2 * checks.args.turns} jobs, {crossed} copies crossed, {wrong} wrong")
    pool.close()
    return wrong + (crossed == 0)


def held(checks: Checks) -> int:
    """Transfers while every SM is held, by engines and, as a control, by a kernel."""
    failures = 0
    for page in (8 << 10, 32 << 10, 64 << 10):
        cache = checks.cache(LAYERS, 256, page)
        layout = kv.Layout(cache, block_axis=1, layer_axis=0)
        pool = checks.pool(layout, 64)
        slots = pool.allocate(64, timeout=60)[torch.randperm(64).numpy()]
        named = torch.randperm(256)[:64].numpy()
        for kernel in (False, True):
            with kv.BlockTransfer(layout, pool, kernel=kernel, policy="zero_sm") as transfer:
                for call in (transfer.store, transfer.load):
                    call(named, slots).wait()
                    checks.settle()
                    failures += not ends_as_it_should(call, named, slots, kernel)
        pool.close()
    return failures


def ends_as_it_should(call: Any, named: Any, slots: Any, kernel: bool) -> bool:
    """Whether the job ends while every SM is held, or does not where a kernel copies."""
    blocks = _core.Occupation([0], HELD_S)
    began = time.perf_counter()
    job = call(named, slots)
    while not job.done() and time.perf_counter() - began < ENDS_S:
        time.sleep(0.001)
    ended = job.done()
    took_ms = (time.perf_counter() - began) * 1e3
    proven = blocks.holds and not blocks.control_ran
    blocks.release()
    result = job.wait()
    right = proven and ended != kernel
    print(
        f"held: {result.bytes >> 10:6} KiB {result.direction:>5} {result.path:>7}: "
        f"{f'ended in {took_ms:.0f} ms' if ended else 'waited for the SMs'}"
        f"{'' if right else ' WRONG'}",
        flush=True,
    )
    return right


def timed(call: Any) -> float:
    """Seconds, the median of a few calls."""
    times = []
    for _ in range(TURNS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def ceiling(checks: Checks, nbytes: int) -> list[float]:
    """GB/s of one contiguous copy, to the device and back."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=checks.gpu)
    device = torch.empty(nbytes, dtype=torch.uint8, device=checks.device)

    def copy(dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src, non_blocking=True)
        checks.settle()

    return [nbytes / timed(lambda p=p: copy(*p)) / 1e9 for p in ((device, host), (host, device))]


def speed(checks: Checks) -> int:
    """Scattered blocks of layers outermost, as the facts of peers are given."""
    load, store = ceiling(checks, 256 << 20)
    print(f"one contiguous copy: load {load:.1f}, store {store:.1f} GB/s")
    print("page, blocks, way: load and store in GB/s (share of the ceiling), both; us to submit")
    for page in parse_sizes(checks.args.pages):
        blocks = 2048 if checks.gpu else 512
        cache = checks.cache(LAYERS, blocks, page)
        layout = kv.Layout(cache, block_axis=1, layer_axis=0)
        pool = checks.pool(layout, 512)
        slots = np.random.default_rng(1).permutation(pool.allocate(512, timeout=300))
        ways = (("folded", None, "zero_sm"), ("by pages", 1, "zero_sm"), ("auto", None, "auto"))
        for way, plain_from, policy in ways:
            with kv.BlockTransfer(layout, pool, plain_from=plain_from, policy=policy) as transfer:
                for count in (64, 256):
                    named = np.random.default_rng(2).permutation(blocks)[: 2 * count].reshape(2, -1)
                    one, other = slots[:count], slots[count : 2 * count]
                    nbytes = count * layout.block_bytes
                    submit: list[float] = []

                    def both(
                        t: Any = transfer, n: Any = named, a: Any = one, b: Any = other
                    ) -> None:
                        jobs = t.load(n[0], a), t.store(n[1], b)
                        for job in jobs:
                            job.wait()

                    def alone(call: Any, n: Any = named, a: Any = one, us: Any = submit) -> None:
                        us.append(call(n[0], a).wait().submit_us)

                    rates = [
                        nbytes / timed(lambda c=call, f=alone: f(c)) / 1e9
                        for call in (transfer.load, transfer.store)
                    ]
                    rate = 2 * nbytes / timed(both) / 1e9
                    print(
                        f"{page >> 10:5} KiB {count:4} {way:>9}: "
                        f"{rates[0]:5.1f} ({rates[0] / load:4.0%}) "
                        f"{rates[1]:5.1f} ({rates[1] / store:4.0%}) both {rate:5.1f}; "
                        f"{statistics.median(submit):.0f} us",
                        flush=True,
                    )
        pool.close()
    return 0


def main() -> int:
    known = {"jobs": random_jobs, "streams": streams, "gates": gates, "order": order}
    known |= {"held": held, "objects": objects, "speed": speed}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(known), help="of " + ", ".join(known))
    parser.add_argument(
        "--backend", default="cuda" if torch.cuda.is_available() else "host", help="cuda or host"
    )
    parser.add_argument("--jobs", type=int, default=400, help="random jobs of each layout")
    parser.add_argument("--turns", type=int, default=1000, help="of `order`, of two jobs each")
    parser.add_argument("--pages", default="8K,16K,32K,64K,256K", help="bytes of a layer's page")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # which gates want
    checks = Checks(args)
    wrong = 0
    for name in args.only.split(","):
        if name in ON_GPU and not checks.gpu:
            print(f"{name}: no GPU")
        else:
            wrong += known[name](checks)
    print("ALL GOOD" if wrong == 0 else f"{wrong} WRONG")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
