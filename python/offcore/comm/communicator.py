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

    Either all ranks live in this process (`ranks=8`), or this process or thread is one rank of
    several that meet at a store (`store="127.0.0.1:29400", rank=r, world_size=n`; left out, the
    environment's OFFCORE_STORE, OFFCORE_RANK and OFFCORE_WORLD_SIZE are taken). At host:port rank 0
    listens; a torch.distributed store, or a process group, which knows rank and size, does as well.

    backend: "sim", "host", "cuda" or "auto": sim for a machine that is named and not this one,
        else cuda where it is available, else host.
    machine: a machine's name or file; by default this host, or mi300x-8 on sim.
    device: cuda only: the GPU of this process's rank, or a list with one for each local rank; by
        default rank r drives GPU r (counted among the visible ones, modulo their number).
    signals, own_copy: cuda only: how data and the word that tells of it are ordered, "fenced",
        "copy_order" or "auto" (rank 0's choice: copy_order where `offcore doctor --stress` has
        passed); whether copies within a GPU ask for "engines", an "engine" or "sm"s (docs/cuda.md).
    sms: cuda only: SMs that a reduction takes at most, from 1 to 64; copies take none.
    near_gpu: cuda only: keep the calling thread on the CPUs of its GPU's NUMA node from now on.
    phantom: sim only: windows have sizes but no bytes, so gigabytes cost no memory.
    seed, faults, packets: sim only: the order of simultaneous events; faults to inject (dicts with
        kind, rank, queue, nth, factor, ns); whether commands go through SDMA packets (sdma.md).
    timeout: seconds that a wait lasts which names none.

    Operations take arrays (one; or a list of one for each local rank), Windows or their regions.
    Every rank calls the same operations in the same order with the same sizes. Outputs inside a
    window (`empty`, `window`) at the same place on every rank are written directly by the peers;
    any other output works too, by way of a staging slot, and the result says so.

    variant: "auto", or pcpy, bcst, swap, b2b, fan and prelaunch_ of each (section 4).
    protocol: how peers may enter: "auto" (barrier, or eager where the output is in no window or
        the measured table has it ahead); "barrier" (always safe); "credits" (as barrier, but a rank
        that calls `Handle.release` lets its peers in before its next call); "eager" (through slots,
        always safe); "promise" (the caller promises that every peer's output is free).
    lane: operations of one lane run in order; those of different lanes may overtake each other.
        Threads may call at once, each in lanes of its own, in any order; windows are to be made
        in one order on all ranks.
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
        """Allocates window memory, `nbytes` on every rank. Collective. Raises `Error`: memory."""
        return Window(self, self._core.window(checked("nbytes", nbytes), self.timeout))

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = "uint8") -> Any:
        """Window memory as arrays of that shape and dtype, zeroed. Collective.

        One array where one rank is local, else a list with one for each local rank. Numpy arrays;
        on cuda torch tensors, whose dtype may be one of torch's.
        """
        shape, kind, nbytes = dense("empty", shape, dtype)
        window = self.window(max(1, nbytes))._core
        arrays = [self._array(window, rank, 0, shape, kind) for rank in self.local_ranks]
        return arrays[0] if len(arrays) == 1 else arrays

    def register(self, tensor: Any) -> Registration:
        """Makes memory that others allocated a window as it lies, so that peers write tensors in
        it directly. Collective: every rank passes a tensor of its own, of as many bytes.

        tensor: a contiguous tensor on the rank's GPU; a list where several ranks are local. Until
        the registration is closed it stays allocated, and counts as window memory, and so does
        every part of it at the same offset on all ranks. Registering it again, or a part of it,
        maps nothing anew. Only cuda has this (see docs/cuda.md, Registered tensors). Raises
        `Error`, on all ranks alike: mismatch (sizes), invalid, unsupported (the backend, or memory
        that no other rank can map, with what to do instead).
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
        """Lets running kernels move data between these buffers by themselves: docs/gpu-driven.md.
        Collective.

        buffers: Windows, regions or window memory (`empty`), 64 at most, of one size and place on
            all ranks, named by number. schedule: cuda and sim: each rank's puts, repeated in this
            order; engines have them ahead (armed). chunk: bytes, a power of two of which buffers
            are multiples; by default the least that works. slots: of the ring. limit: seconds of a
            kernel's wait that names none. spin: seconds that the engine's thread spins before it
            naps. engine: on sim "stores" or "device", too. Raises `Error`: invalid (past a
            field's limit), mismatch, unsupported.
        """
        return Requests(self, buffers, schedule, chunk, slots, limit, spin, engine)

    def host_array(self, shape: int | tuple[int, ...], dtype: DTypeLike = "uint8") -> NDArray[Any]:
        """Zeroed host memory that the engines reach. On cuda it is pinned, and no other host
        memory may be passed to an operation."""
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
        """Every rank gets every rank's input, in rank order (section 2.1.1).

        out: ranks x the input's bytes. inp: left out, or the rank's own part of `out`: in place.
        Raises `Error`: invalid (sizes, overlap, dtypes), unsupported (a variant that this
        operation cannot have), timeout and mismatch (at the first call with these sizes).
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
        """all_gather of uneven parts: counts[r] elements (bytes for windows) from rank r."""
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
        """Every rank's `out` becomes the root's; with `inp`, the root's `inp`. Others may pass
        None, if a prelaunched broadcast's root does not change between both forms (mismatch)."""
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
        """Part q of the root's input becomes rank q's output. inp: others may pass None."""
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
        """scatter of uneven parts: counts[q] elements (bytes for windows) to rank q."""
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
        """Rank r's input becomes part r of the root's output.

        out: may be None on other ranks; the data then goes by way of a slot, because only ranks
        that name the root's window, and its place there, can write into it directly.
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
        """gather of uneven parts: counts[r] elements (bytes for windows) from rank r."""
        return self._start("gather", out, inp, counts, root, variant, protocol, lane)

    def barrier(self, timeout: float | None = None) -> None:
        """Returns when every rank has called it. timeout: seconds."""
        self._core.barrier(self.timeout if timeout is None else timeout)

    def variants(self, op: str, in_place: bool = False) -> list[str]:
        """The variants that the operation can have, its output in a window."""
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
        """The program that would run for S = `nbytes` on this communicator's machine; dtype and
        reduction (by default float32 and "sum") of operations that reduce."""
        machine = self._core.machine
        return program_of(
            machine, op, self.ranks, nbytes, variant, in_place, protocol, dtype, reduction
        )

    @property
    def now_ns(self) -> int:
        """The backend's clock; virtual time on sim."""
        return self._core.now_ns

    def check(self) -> None:
        """Raises `Error` where every call would: peer (a rank died or aborted), cancelled, invalid
        (closed). A graph's replays tell nobody: ask after them, before you use what they wrote."""
        self._core.check()

    def abort(self) -> None:
        """Makes every wait of every rank fail at once. The communicator is dead afterwards; what
        was under way may have written any part of its output."""
        self._core.abort()

    def close(self) -> None:
        """Says goodbye to the peers. Windows and arrays stay valid for as long as they are held."""
        self._exchanges.clear()
        self._core.close()

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A new communicator of the ranks that gave the same color, ordered by key, then rank.

        Collective; color None: this rank is in no group, and gets None. For ranks that are
        processes. Each keeps its GPU and this one's options; a machine that was not named is
        chosen anew. Close it on its own. Raises `Error`: unsupported where all ranks live in this
        process, invalid, timeout, peer.
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
