"""Communicators: collectives over DMA engines (DMA-Latte sections 2.1.1 and 4)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from offcore import _core, defaults, machines
from offcore.bootstrap import bootstrap_of, part_of
from offcore.comm import numa, nvtx, signal_forms
from offcore.comm.arrays import dense
from offcore.comm.exchange import AllToAllCalls
from offcore.comm.handle import Handle, View
from offcore.comm.programs import program_of, variants
from offcore.comm.reductions import Reduction, ReductionCalls, typed
from offcore.comm.registration import Registration
from offcore.comm.requests import Put, Requests
from offcore.comm.views import Spec, ViewCalls, specs_of
from offcore.comm.window import Window
from offcore.errors import Error, error
from offcore.operands import (
    NUMBER_MAX,
    SEED_MAX,
    SMS_MAX,
    OperandError,
    Side,
    checked,
    counts_in_bytes,
    dtype_name,
    faults_of,
    keep_alive,
    places_of,
    same_dtype,
)

Counts1 = Sequence[int]


class Communicator(AllToAllCalls, ViewCalls, ReductionCalls):
    """Ranks that communicate by DMA engines.

    Either all ranks run in this process (`ranks=8`), or this process or thread is one rank of
    several that connect through a store (`store="127.0.0.1:29400", rank=r, world_size=n`; default:
    OFFCORE_STORE, OFFCORE_RANK and OFFCORE_WORLD_SIZE). Rank 0 listens at host:port. A
    torch.distributed store, or a process group, which knows rank and size, is also accepted.

    backend: "sim", "host", "cuda" or "auto": sim if `machine` names another machine, else cuda if
        available, else host.
    machine: name or file of a machine; default: this host, or mi300x-8 on sim.
    device: cuda only: the GPU of this rank, or a list with one GPU per local rank; default: rank r
        uses visible GPU r, modulo their number.
    signals: cuda only: how a flag is ordered after the data, "fenced", "copy_order" or "auto" (rank
        0's choice: copy_order if `offcore doctor --stress` has passed; docs/cuda.md).
    own_copy: cuda only: copies within a GPU use "engines", one "engine" or "sm" (docs/cuda.md).
    sms: cuda only: maximum number of SMs of a reduction, 1 to 64; copies use none.
    near_gpu: cuda only: bind the calling thread to the CPUs of its GPU's NUMA node.
    phantom: sim only: windows have sizes but no bytes, so gigabytes use no memory.
    seed: sim only: order of simultaneous events. packets: sim only: use SDMA packets (sdma.md).
    faults: sim only: faults to inject, dicts with kind, rank, queue, nth, factor, ns.
    timeout: default timeout of a wait, in seconds.

    Operations accept arrays (one, or a list with one per local rank), Windows and their regions.
    All ranks call the same operations in the same order with the same sizes. Peers write directly
    into outputs inside a window (`empty`, `window`) at the same offset on every rank; any other
    output is staged through a slot, and the result reports it. Arguments of all operations:

    variant: "auto", or pcpy, bcst, swap, b2b, fan and prelaunch_ of each (DMA-Latte, section 4).
    protocol: when peers may write: "auto" (barrier; or eager if the output is outside windows or
        the measured table prefers it), "barrier" (always safe), "credits" (as barrier, but
        `Handle.release` admits the peers before the next call), "eager" (through slots, always
        safe) or "promise" (the caller guarantees that every peer's output is free).
    lane: operations in one lane run in order; operations in different lanes may overtake each
        other. Threads may call concurrently, each in its own lanes, in any order. Windows must be
        created in the same order on all ranks.
    """

    def __init__(
        self,
        *,
        backend: str = "auto",
        machine: str | None = None,
        ranks: int | None = None,
        store: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
        device: int | Sequence[int] | None = None,
        signals: str = "auto",
        own_copy: str = "engines",
        sms: int = 12,
        near_gpu: bool = False,
        phantom: bool = False,
        seed: int = 0,
        faults: Sequence[dict[str, Any]] = (),
        packets: bool = False,
        timeout: float | None = None,
    ) -> None:
        self.timeout = defaults.seconds(timeout)
        if ranks is None and store is None:
            store = _core.env("OFFCORE_STORE") or None
        bootstrap = None
        if store is not None:
            if ranks is not None:
                raise error("invalid", "pass ranks (all in this process) or store, not both")
            bootstrap = bootstrap_of(store, rank, world_size)
            ranks = bootstrap.ranks
        wanted = _core.env("OFFCORE_BACKEND") if backend == "auto" else backend
        if wanted == "auto":
            wanted = defaults.backend(machine)
        given = machine
        if machine is None:
            machine = defaults.machine(wanted, ranks or 2)
        devices = [] if device is None else [device] if isinstance(device, int) else list(device)
        cuda = signal_forms.cuda_options(
            wanted, devices, signals, own_copy, checked("sms", sms, SMS_MAX)
        )
        loaded = machines.load(machine)
        if ranks is None:
            ranks = loaded.ranks
        self.backend = wanted
        self.machine = loaded.name
        self._options: dict[str, Any] = {"backend": wanted, "machine": given, "device": device}
        self._options |= {"signals": signals, "own_copy": own_copy, "sms": sms}
        self._core = _core.open_communicator(
            wanted,
            loaded,
            ranks=checked("ranks", ranks, NUMBER_MAX),
            bootstrap=bootstrap,
            phantom=phantom,
            seed=checked("seed", seed, SEED_MAX),
            faults=faults_of(faults),
            packets=packets,
            cuda=cuda,
            timeout_s=self.timeout,
        )
        self._core_start = nvtx.annotated(self._core.start)
        self.ranks: int = self._core.ranks
        self.local_ranks: list[int] = self._core.local_ranks
        self._gpus = [self._core.device(rank) for rank in self.local_ranks]
        if all(gpu >= 0 for gpu in self._gpus):  # a group's ranks are others; their GPUs are these
            self._options["device"] = self._gpus
        if near_gpu:
            numa.keep_near(self._gpus)
        self.phantom = phantom
        self._exchanges: dict[Any, Any] = {}

    def window(self, nbytes: int) -> Window:
        """Allocates `nbytes` of window memory on every rank. Collective. Raises `Error`: memory."""
        return Window(self, self._core.window(checked("nbytes", nbytes), self.timeout))

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = "uint8") -> Any:
        """Allocates zeroed window memory as arrays of this shape and dtype. Collective.

        Returns one array if one rank is local, else a list with one per local rank: numpy arrays,
        or torch tensors on cuda, where dtype may be a torch dtype.
        """
        shape, kind, nbytes = dense("empty", shape, dtype)
        window = self.window(max(1, nbytes))._core
        arrays = [self._array(window, rank, 0, shape, kind) for rank in self.local_ranks]
        return arrays[0] if len(arrays) == 1 else arrays

    def register(self, tensor: Any) -> Registration:
        """Registers an existing tensor as a window, so that peers write it directly. cuda only.
        Collective: every rank passes its own tensor, of the same number of bytes.

        tensor: a contiguous tensor on the rank's GPU; a list if several ranks are local.

        Until the registration is closed, the tensor stays allocated and is window memory, as is
        every part of it at the same offset on all ranks. Registering it or a part of it again maps
        nothing (docs/cuda.md, Registered tensors). Raises `Error`, the same on all ranks: mismatch
        (sizes), invalid, unsupported (backend; memory that other ranks cannot map).
        """
        places: list[tuple[int, int]] = []
        refusal = held = None
        try:
            given, _, held = Communicator._side(self, tensor, "register", writable=True)
            if isinstance(given, _core.Region) or None in given:
                raise error("invalid", "register: pass a tensor for each local rank")
            places = list(given)
        except Error as refused:  # told to the other ranks, which wait for this one
            refusal = str(refused)
        number = self._core.register_memory(places, refusal or "", held, self.timeout)
        return Registration(self._core, number, self._exchanges)

    def requests(
        self,
        buffers: Sequence[Any],
        *,
        schedule: Sequence[Sequence[Put]] = (),
        chunk: int | None = None,
        slots: int = 1 << 16,
        limit: float = 10.0,
        spin: float | None = None,
        engine: str = "auto",
    ) -> Requests:
        """Registers buffers for copies requested by running kernels (docs/gpu-driven.md).
        Collective.

        buffers: up to 64 Windows, regions or window memory (`empty`), of the same size and offset
            on all ranks; requests refer to them by number.
        schedule: cuda and sim: the puts of each rank, repeated in this order and armed in advance.
        chunk: bytes; a power of two that divides every buffer's size. Default: the smallest.
        slots: size of the ring. limit: default timeout of a kernel's wait, in seconds.
        spin: seconds that the engine's thread spins before it sleeps.
        engine: "auto"; on sim also "stores" or "device".
        Raises `Error`: invalid (a field exceeds its limit), mismatch, unsupported.
        """
        return Requests(self, buffers, schedule, chunk, slots, limit, spin, engine)

    def host_array(self, shape: int | tuple[int, ...], dtype: DTypeLike = "uint8") -> NDArray[Any]:
        """Allocates zeroed host memory that engines can access. On cuda it is pinned; operations
        accept no other host memory there."""
        shape, kind, nbytes = dense("host_array", shape, dtype)
        if self._core.host_visible:
            return np.zeros(shape, kind)
        view: Any = self._core.host_array(max(1, nbytes))
        array: NDArray[Any] = view[:nbytes].view(kind).reshape(shape)
        return array

    def all_gather(
        self,
        out: Any,
        inp: Any = None,
        *,
        variant: str = "auto",
        protocol: str = "auto",
        lane: int = 0,
    ) -> Handle:
        """Concatenates the inputs of all ranks, in rank order, on every rank.

        out: ranks x the size of the input. inp: None, or the rank's part of `out`: in place.
        Raises `Error`: invalid (sizes, overlap, dtypes), unsupported (a variant that this
        operation does not have), timeout and mismatch (at the first call with these sizes).
        """
        return self._start("all_gather", out, inp, None, 0, variant, protocol, lane)

    def all_gather_v(
        self,
        out: Any,
        inp: Any,
        counts: Counts1,
        *,
        variant: str = "auto",
        protocol: str = "auto",
        lane: int = 0,
    ) -> Handle:
        """all_gather with uneven parts: counts[r] elements (bytes for windows) from rank r."""
        return self._start("all_gather", out, inp, counts, 0, variant, protocol, lane)

    def broadcast(
        self,
        out: Any,
        inp: Any = None,
        *,
        root: int = 0,
        variant: str = "auto",
        protocol: str = "auto",
        lane: int = 0,
    ) -> Handle:
        """Copies the root's `inp`, or in place its `out`, to `out` on every rank. Other ranks may
        pass None as `inp`, unless a prelaunched broadcast's root changes between both forms
        (mismatch)."""
        return self._start("broadcast", out, inp, None, root, variant, protocol, lane)

    def scatter(
        self,
        out: Any,
        inp: Any,
        *,
        root: int = 0,
        variant: str = "auto",
        protocol: str = "auto",
        lane: int = 0,
    ) -> Handle:
        """Copies part q of the root's `inp` to rank q's `out`. Others may pass None as `inp`."""
        return self._start("scatter", out, inp, None, root, variant, protocol, lane)

    def scatter_v(
        self,
        out: Any,
        inp: Any,
        counts: Counts1,
        *,
        root: int = 0,
        variant: str = "auto",
        protocol: str = "auto",
        lane: int = 0,
    ) -> Handle:
        """scatter with uneven parts: counts[q] elements (bytes for windows) to rank q."""
        return self._start("scatter", out, inp, counts, root, variant, protocol, lane)

    def gather(
        self,
        out: Any,
        inp: Any,
        *,
        root: int = 0,
        variant: str = "auto",
        protocol: str = "auto",
        lane: int = 0,
    ) -> Handle:
        """Copies rank r's `inp` to part r of the root's `out`.

        out: may be None on other ranks. The data is then staged through a slot, since ranks can
            write directly only into a window and offset that they pass themselves.
        """
        return self._start("gather", out, inp, None, root, variant, protocol, lane)

    def gather_v(
        self,
        out: Any,
        inp: Any,
        counts: Counts1,
        *,
        root: int = 0,
        variant: str = "auto",
        protocol: str = "auto",
        lane: int = 0,
    ) -> Handle:
        """gather with uneven parts: counts[r] elements (bytes for windows) from rank r."""
        return self._start("gather", out, inp, counts, root, variant, protocol, lane)

    def barrier(self, timeout: float | None = None) -> None:
        """Blocks until all ranks have called it, at most `timeout` seconds."""
        self._core.barrier(self.timeout if timeout is None else timeout)

    def variants(self, op: str, in_place: bool = False) -> list[str]:
        """Returns the variants of an operation whose output is in a window."""
        return variants(op, ranks=self.ranks, in_place=in_place)

    def program(
        self,
        op: str,
        nbytes: int,
        *,
        variant: str = "auto",
        in_place: bool = False,
        protocol: str = "auto",
        dtype: Any = None,
        reduction: str | None = None,
    ) -> _core.Program:
        """Returns the program for a total size of `nbytes` on this communicator's machine. dtype,
        reduction: of operations that reduce; default float32 and "sum"."""
        machine = self._core.machine
        return program_of(
            machine, op, self.ranks, nbytes, variant, in_place, protocol, dtype, reduction
        )

    @property
    def now_ns(self) -> int:
        """The backend's clock in ns; virtual time on sim."""
        return self._core.now_ns

    def check(self) -> None:
        """Raises `Error` if the communicator is dead: peer (a rank died or aborted), cancelled, or
        invalid (closed). A graph's replays report nothing: call it before you use their outputs."""
        self._core.check()

    def abort(self) -> None:
        """Aborts all operations: every wait of every rank fails immediately, and the communicator
        is dead. Outputs of operations in progress are undefined."""
        self._core.abort()

    def close(self) -> None:
        """Disconnects from the peers. Windows and arrays remain valid while they are referenced."""
        self._exchanges.clear()
        self._core.close()

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Creates a communicator of the ranks with the same color, ordered by key, then by rank.
        Collective. Requires one process per rank. Color None returns None.

        The new communicator has the same GPUs and options; a machine that was not named is selected
        again. Close it separately. Raises `Error`: unsupported if all ranks run in this process,
        invalid, timeout, peer.
        """
        with part_of(self._core, color, key, self.timeout) as place:
            if place is None:
                return None
            group = copy.copy(self)  # what a subclass keeps
            Communicator.__init__(group, store=place, timeout=self.timeout, **self._options)
            return group

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _streams(self) -> list[int]:
        """The caller's streams, one a local rank; empty: the backend's own."""
        return []

    def _start(
        self,
        op: str,
        out: Any,
        inp: Any,
        counts: Sequence[int] | None,
        root: int,
        variant: str,
        protocol: str,
        lane: int,
        reduction: Reduction | None = None,
    ) -> Handle:
        out_core, out_dtype, out_held = self._side(out, op, writable=True)
        in_core, in_dtype, in_held = self._side(inp, op, writable=False)
        both = out_dtype is not None and in_dtype is not None
        if both and not same_dtype(out_dtype, in_dtype):
            raise error(
                "invalid",
                f"{op}: the output's dtype is {dtype_name(out_dtype)}, "
                f"the input's {dtype_name(in_dtype)}",
            )
        dtype = in_dtype if out_dtype is None else out_dtype
        if reduction is not None:
            reduction = typed(op, reduction, dtype)
        pending = self._core_start(
            op,
            out_core,
            in_core,
            () if counts is None else counts_in_bytes(op, counts, dtype),
            checked("root", root, NUMBER_MAX),
            variant,
            protocol,
            checked("lane", lane, NUMBER_MAX),
            reduction,
            self._streams(),
            out_held if in_held is None else (out_held, in_held),
            self.timeout,
        )
        return Handle(self, pending)

    def _start_view(
        self, op: str, inp: Any, rows: tuple[int, ...], variant: str, lane: int
    ) -> View:
        side, dtype, kept = self._side(inp, op + "_view", writable=False)
        specs: list[Spec]
        if type(side) is _core.Region:
            specs = [((side.nbytes,), np.dtype("uint8"))] * len(self.local_ranks)
        elif hasattr(inp, "shape"):
            specs = [(inp.shape, dtype)]
        else:
            specs = specs_of(inp)
        pending = self._core_start(
            op,
            None,
            side,
            (),
            0,
            variant,
            "view",
            checked("lane", lane, NUMBER_MAX),
            None,
            self._streams(),
            kept,
            self.timeout,
        )
        return View(self, pending, rows, specs)

    def _side(self, given: Any, op: str, writable: bool) -> Side:
        if given is None:
            return [None] * len(self.local_ranks) if writable else None, None, None
        if isinstance(given, Window):
            return given.whole, None, None
        if type(given) is _core.Region:
            return given, None, None
        try:
            return *places_of(given, self.local_ranks, self._gpus, writable), keep_alive(given)
        except OperandError as refusal:
            role = "output" if writable else "input"
            raise error("invalid", f"{op}: the {role}{refusal}") from None
