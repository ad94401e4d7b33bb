"""GEMMs of torch beside NCCL and offcore on GPUs, one process a GPU.

All parts of a run stand behind an event, which the GPUs reach together. The event of a kernel that
is to come later comes some microseconds later, since the order of launches alone decides nothing
with several hardware queues. Cores: a GEMM's by cuBLAS's number of SMs to use, NCCL's by its number
of CTAs, in a communicator of its own for each.
"""

from __future__ import annotations

import datetime
import importlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from offcore import machines
from offcore.errors import Error, error
from offcore.overlap.sms import sms_for_gemms
from offcore.tools.bench.nccl import ENVIRONMENT as MULTICAST_OFF
from offcore.tools.bench.nccl import profiled, verdict
from offcore.tools.overlap import nvml
from offcore.tools.overlap.stage import ENGINES, GEMM, LIBRARY_ENGINES, Part, Shape

ENVIRONMENT = MULTICAST_OFF | {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
LIBRARY_ENGINES_MAX = 4 << 30  # bytes of a symmetric buffer of NCCL's
_GATE_US = 900  # in which the host enqueues a run
_LATER_US = 15  # between one launch and the next
_CYCLES_A_US = 1900
_SPARE = 3 << 30  # bytes of a GPU's memory that libraries get
_AHEAD = 4  # runs of an endless loop that are enqueued before the first has ended
_SAMPLED = 8  # whose time says how many fill the seconds of a loop
_PARTS_MOST = 4
_LOOK_S = 1e-4
_LIMIT_S = 20  # of a wait for other ranks, and for the GPU
_ANSWER_S = _LIMIT_S + 10  # in which a rank that waits for one that failed has given up
_NO_CTA = 2  # NCCL's CTA policy ZERO, where torch has no name for it
_REDUCE = ("reduce_scatter", "all_reduce")

# A part made ready: its stream, what enqueues it, and whether engines run it.
_Made = tuple[Any, Callable[[], Any], bool]


class GpuStage:
    """sizes: the most bytes that each operation is run with."""

    backend = "cuda"
    library = "nccl"

    def __init__(self, rank: int, ranks: int, folder: str, sizes: dict[str, int]) -> None:
        self._began = time.monotonic()
        self.rank, self.ranks = rank, ranks
        self._torch = torch = importlib.import_module("torch")
        self._dist = dist = importlib.import_module("torch.distributed")
        self._device = torch.device("cuda", rank)
        torch.cuda.set_device(self._device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl",
            init_method=f"file://{folder}/world",
            rank=rank,
            world_size=ranks,
            device_id=self._device,
            timeout=datetime.timedelta(seconds=_LIMIT_S),
        )
        answer = datetime.timedelta(seconds=_ANSWER_S)
        self._answers = dist.new_group(backend="gloo", timeout=answer)
        self.machine = machines.for_gpus(ranks)
        properties = torch.cuda.get_device_properties(self._device)
        self.cores = int(properties.multi_processor_count)
        self._gpu = self._counter(properties)
        self.comm: Any = None
        if ranks > 1:
            self.comm = importlib.import_module("offcore.torch").Communicator(timeout=_LIMIT_S)
        self._gates = [torch.cuda.Stream() for _ in range(_PARTS_MOST)]
        self._streams = {
            (what, urgent): torch.cuda.Stream(priority=-1 if urgent else 0)
            for what in (GEMM, "collective")
            for urgent in (False, True)
        }
        self._word = torch.zeros(1, device=self._device)
        self._groups: dict[int | None, Any] = {None: None}
        self._symmetric: list[Any] | str = "not opened"
        self._verdicts: dict[Part, str] = {}
        self._facts: dict[str, Any] = {}
        self._operands: tuple[Any, Any, Any] | None = None
        self._windows = self._open_windows(sizes) if ranks > 1 else []

    def _counter(self, properties: Any) -> nvml.Gpu | None:
        try:
            return nvml.Gpu(str(properties.uuid))
        except (Error, AttributeError):
            return None  # rows then have no clocks

    def _open_windows(self, sizes: dict[str, int]) -> list[Any]:
        """An output, and an input for what is not in place, as large as memory allows."""
        torch = self._torch
        least = torch.tensor(torch.cuda.mem_get_info(self._device)[0])
        self._dist.all_reduce(least, op=self._dist.ReduceOp.MIN)
        free = int(least) - 2 * LIBRARY_ENGINES_MAX - _SPARE - sizes.get(GEMM, 0)
        out = max((size for op, size in sizes.items() if op != GEMM), default=0)
        inp = max((sizes.get(op, 0) for op in ("all_to_all", "reduce_scatter")), default=0)
        over = out + inp - free
        if over > 0:  # the input is as large as the output where both do not fit
            out = min(out, max(free - inp, free // 2))
            inp = min(inp, free - out)
        unit = 2 * self.ranks << 20
        made = [self.comm.empty(max(size // unit * unit, unit), torch.uint8) for size in (out, inp)]
        for one in made:
            one.view(torch.bfloat16).normal_()
        return made

    def prepare(self, shape: Shape) -> None:
        torch = self._torch
        self._operands = None
        made = {"device": self._device, "dtype": torch.bfloat16}
        self._operands = (
            torch.randn(shape.m, shape.k, **made),
            torch.randn(shape.k, shape.n, **made),
            torch.empty(shape.m, shape.n, **made),
        )

    def room(self, op: str) -> int:
        if not self._windows:
            return 0
        two = op in ("all_to_all", "reduce_scatter")
        return min(int(one.numel()) for one in self._windows[: 2 if two else 1])

    def refusal(self, part: Part) -> str:
        if part.what != LIBRARY_ENGINES:
            return ""
        if part.op in _REDUCE:
            return f"NCCL has no {part.op} by copy engines"
        if part.nbytes > LIBRARY_ENGINES_MAX:
            return f"{part.nbytes} bytes are more than its symmetric buffers have"
        if self._symmetric == "not opened":
            self._symmetric = self._open_symmetric()
        if isinstance(self._symmetric, str):
            return self._symmetric
        if part not in self._verdicts:
            counts: list[int | None] = [None] * self.ranks
            self._dist.all_gather_object(counts, self._kernels(part))
            self._verdicts[part] = verdict(part.what, counts)
        return self._verdicts[part]

    def _open_symmetric(self) -> list[Any] | str:
        """Symmetric buffers in a communicator that may use no CTA; or why there are none."""
        torch, dist, failure = self._torch, self._dist, ""
        made: list[Any] = []
        try:
            options = dist.ProcessGroupNCCL.Options()
            options.config.cta_policy = getattr(
                dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO", _NO_CTA
            )
            symmetric = importlib.import_module("torch.distributed._symmetric_memory")
            symmetric.set_backend("NCCL")
            group = self._new_group(options)
            for _ in range(2):
                made.append(
                    symmetric.empty(LIBRARY_ENGINES_MAX, dtype=torch.uint8, device=self._device)
                )
                symmetric.rendezvous(made[-1], group.group_name)
            self._groups[0] = group
        except Exception as cause:  # whatever NCCL and torch raise
            failure = f"{type(cause).__name__}: {str(cause).splitlines()[0][:200]}"
        return self.agreed(failure) or made

    def agreed(self, failure: str) -> str:
        told = [""] * self.ranks
        try:
            self._dist.all_gather_object(told, failure, group=self._answers)
        except RuntimeError as cause:
            own = failure or "nothing failed here"
            raise error(
                "timeout",
                f"rank {self.rank}: {own}; another rank has not answered in {_ANSWER_S} s: {cause}",
            ) from cause
        return "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(told) if one)

    def _finish(self) -> None:
        """Waits for all work of the GPU. Raises `Error`: timeout."""
        done = self._torch.cuda.Event()
        for stream in {*self._gates, *self._streams.values()}:
            self._torch.cuda.current_stream().wait_stream(stream)
        done.record()
        until_s = time.monotonic() + _LIMIT_S
        while not done.query():
            if time.monotonic() > until_s:
                raise error(
                    "timeout", f"rank {self.rank}: the GPU has not ended a run in {_LIMIT_S} s"
                )
            time.sleep(_LOOK_S)

    def _new_group(self, options: Any) -> Any:
        group = self._dist.new_group(
            backend="nccl",
            timeout=datetime.timedelta(seconds=_LIMIT_S),
            pg_options=options,
            device_id=self._device,
        )
        self._dist.all_reduce(self._word, group=group)  # makes the communicator
        self._torch.cuda.synchronize()
        return group

    def _group(self, ctas: int | None) -> Any:
        if ctas not in self._groups:
            options = self._dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = ctas
            self._groups[ctas] = self._new_group(options)
        return self._groups[ctas]

    def _kernels(self, part: Part) -> int | None:
        """That one call runs. One of our own in the same trace shows that they are seen."""
        torch, call = self._torch, self._call(part)
        stream = self._stream(part)
        with torch.cuda.stream(stream):
            call()
            self._word.add_(1)
        torch.cuda.synchronize()

        def one() -> None:
            with torch.cuda.stream(stream):
                self._word.add_(1)
                call()
            torch.cuda.synchronize()

        return profiled(torch, one)

    def _stream(self, part: Part) -> Any:
        first = part.what == GEMM or part.behind
        return self._streams[GEMM if first else "collective", part.urgent]

    def _made(self, part: Part) -> _Made:
        return self._stream(part), self._call(part), part.what in (ENGINES, LIBRARY_ENGINES)

    def _call(self, part: Part) -> Callable[[], Any]:
        if part.what == GEMM:
            return self._gemm_call(part.cores)
        out, inp = self._buffers(part)
        if part.what == ENGINES:
            return self._own_call(part, out, inp)
        group = self._group(0 if part.what == LIBRARY_ENGINES else part.cores)
        return self._nccl_call(part.op, out, inp, group)

    def _gemm_call(self, cores: int | None) -> Callable[[], Any]:
        torch = self._torch
        assert self._operands is not None, "prepare() comes first"
        a, b, out = self._operands

        def call() -> None:
            with sms_for_gemms(torch, cores):
                torch.mm(a, b, out=out)

        return call

    def _buffers(self, part: Part) -> tuple[Any, Any]:
        whole = self._windows
        if part.what == LIBRARY_ENGINES:
            assert isinstance(self._symmetric, list), "refusal() comes first"
            whole = self._symmetric
        kind = self._torch.bfloat16 if part.op in _REDUCE else self._torch.uint8
        return whole[0][: part.nbytes].view(kind), whole[1][: part.nbytes].view(kind)

    def _own_call(self, part: Part, out: Any, inp: Any) -> Callable[[], Any]:
        comm = self.comm
        if part.op == "all_gather":
            return lambda: comm.all_gather(out)
        if part.op == "all_to_all":
            return lambda: comm.all_to_all(out, inp)
        if part.op == "all_reduce":
            return lambda: comm.all_reduce(out, op="avg")
        return lambda: comm.reduce_scatter(out[: inp.numel() // self.ranks], inp, "avg")

    def _nccl_call(self, op: str, out: Any, inp: Any, group: Any) -> Callable[[], Any]:
        dist, count = self._dist, out.numel() // self.ranks
        if op == "all_gather":
            own = out[self.rank * count : (self.rank + 1) * count]
            return lambda: dist.all_gather_into_tensor(out, own, group=group)
        if op == "all_to_all":
            return lambda: dist.all_to_all_single(out, inp, group=group)
        average = dist.ReduceOp.AVG
        if op == "all_reduce":
            return lambda: dist.all_reduce(out, average, group=group)
        return lambda: dist.reduce_scatter_tensor(out[:count], inp, average, group=group)

    def ends_us(self, parts: Sequence[Part], warmup: int, measured: int) -> list[list[float]]:
        return self._timed([self._made(part) for part in parts], warmup, measured)

    def call_us(self, call: Callable[[], Any], warmup: int, measured: int) -> list[float]:
        made = self._streams[GEMM, False], call, False
        return [one for (one,) in self._timed([made], warmup, measured)]

    def _timed(self, calls: Sequence[_Made], warmup: int, measured: int) -> list[list[float]]:
        torch, dist = self._torch, self._dist
        times = []
        for number in range(warmup + measured):
            begin, ends = self._enqueue(calls)
            if number == warmup + measured - 1 and self._gpu is not None:
                self._facts = self._gpu.facts()
            self._finish()
            times.append([begin.elapsed_time(end) * 1e3 for end in ends])
        slowest = torch.tensor(times[warmup:], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found: list[list[float]] = slowest.tolist()
        return found

    def _enqueue(self, calls: Sequence[_Made]) -> tuple[Any, list[Any]]:
        """One run: the event that it begins with, and those that its parts end with."""
        torch = self._torch
        gates = self._gates[: max(1, len(calls))]
        opened = [torch.cuda.Event(enable_timing=True) for _ in gates]
        ends = []
        with torch.cuda.stream(gates[0]):
            torch.cuda._sleep(_GATE_US * _CYCLES_A_US)
            if self.ranks > 1:
                self._dist.all_reduce(self._word)
            met = torch.cuda.Event()
            met.record()
        for place, (gate, event) in enumerate(zip(gates, opened, strict=True)):
            with torch.cuda.stream(gate):
                gate.wait_event(met)
                # All sleep from the same moment on: one that began later might find no SM free.
                torch.cuda._sleep((2 + place) * _LATER_US * _CYCLES_A_US)
                event.record()
        for place, (stream, call, on_engines) in enumerate(calls):
            with torch.cuda.stream(stream):
                stream.wait_event(opened[0 if on_engines else place])
                call()
                ends.append(torch.cuda.Event(enable_timing=True))
                ends[-1].record()
        return opened[0], ends

    def energy(self, parts: Sequence[Part], seconds: float) -> dict[str, float]:
        if self._gpu is None:
            return {}
        calls = [self._made(part) for part in parts]
        runs = self._runs_in(calls, seconds) if parts else 0
        self._dist.barrier()
        before_s, before_mj = self._gpu.tick()
        if parts:
            self._loop(calls, runs)
        else:
            time.sleep(seconds)
        ended_s = time.perf_counter()
        facts = self._gpu.facts()
        after_s, after_mj = self._gpu.tick()
        joules = (after_mj - before_mj) / 1e3
        found = {"watts": joules / (after_s - before_s), "runs": runs, **facts}
        # What the counter covers after the loop has ended is idle time, of less than a tick.
        found |= {"joules": joules, "busy_s": ended_s - before_s, "counted_s": after_s - before_s}
        told: list[Any] = [None] * self.ranks
        self._dist.all_gather_object(told, found)
        return {
            name: max(one[name] for one in told) if name == "busy_s" else
            sum(one[name] for one in told) / self.ranks
            for name in ("watts", "runs", "joules", "busy_s", "counted_s", "sm_mhz")
        }  # fmt: skip

    def _runs_in(self, calls: Sequence[_Made], seconds: float) -> int:
        """The same on all ranks. Small kernels last as long as it takes to enqueue them."""
        self._loop(calls, _AHEAD)
        began = time.perf_counter()
        self._loop(calls, _SAMPLED)
        took_s = self._torch.tensor(time.perf_counter() - began, dtype=self._torch.float64)
        self._dist.all_reduce(took_s, op=self._dist.ReduceOp.MAX)
        return max(_AHEAD, math.ceil(seconds * _SAMPLED / float(took_s)))

    def _loop(self, calls: Sequence[_Made], runs: int) -> None:
        """Each run begins when the one before has ended."""
        torch = self._torch
        last: list[Any] = []
        ahead: list[list[Any]] = []
        for _ in range(runs):
            ends = []
            for stream, call, _ in calls:
                with torch.cuda.stream(stream):
                    for event in last:
                        stream.wait_event(event)
                    call()
                    ends.append(torch.cuda.Event(blocking=True))
                    ends[-1].record()
            last = ends
            ahead.append(ends)
            if len(ahead) > _AHEAD:
                for event in ahead.pop(0):
                    event.synchronize()
        torch.cuda.synchronize()

    def facts(self) -> dict[str, Any]:
        return self._facts

    def elapsed_s(self) -> float:
        value = self._torch.tensor([time.monotonic() - self._began], dtype=self._torch.float64)
        self._dist.all_reduce(value, op=self._dist.ReduceOp.MAX)
        return float(value)

    def close(self) -> None:
        if self.comm is not None:
            self.comm.close()
        self._dist.destroy_process_group()
