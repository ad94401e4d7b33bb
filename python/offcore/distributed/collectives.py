"""torch.distributed's collectives as operations of offcore's communicators, for both of its kinds
of back end (group.py)."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from offcore.comm import Communicator
from offcore.distributed import reach
from offcore.distributed.direct import DirectSide, side_of
from offcore.distributed.hosts import Hosts, open_ends
from offcore.distributed.memory import Pool, Ring, memory_of
from offcore.distributed.sides import Body, Side, log
from offcore.errors import error
from offcore.torch_calls import Arguments, all_on, joined, packed, reducible, reduction_of


class Collectives:
    """The calls of one group that offcore carries. Each returns its work, or None: not by offcore,
    which is the same on every rank.

    The communicator for tensors on CPUs is opened with the group, the one for a GPU, which is not
    known before, at the first call with tensors there.
    """

    def __init__(
        self, store: Any, rank: int, ranks: int, timeout: float, name: str, arguments: Arguments
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.name = name
        self.timeout = timeout
        self.carried: dict[str, int] = {}  # calls by name
        self.obstacles: dict[str, str] = {}  # by type of device
        self.memory: dict[str, Ring | Pool] = {}  # by type of device
        self._store = store
        self._arguments = arguments.arguments
        self._sides: dict[str, Side] = {}
        self._lock = threading.Lock()
        self.direct: DirectSide | None = None  # once there is a communicator for a GPU
        self._open(torch.device("cpu"))

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        root = opts.rootRank
        return self._plain("broadcast", tensors, (), opts, self.rank == root, root=root)

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        op, scale = reduction_of(opts.reduceOp) or ("", 1.0)
        return self._plain("all_reduce", tensors, (), opts, op=op, scale=scale)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        def body(comm: Communicator) -> Any:
            whole, back = packed(tensors[0], self.rank != opts.rootRank)
            out = whole if self.rank == opts.rootRank else None
            return [comm.reduce(out, whole, op, scale=scale, root=opts.rootRank)], back

        op, scale = reduction_of(opts.reduceOp) or ("", 1.0)
        return self._run("reduce", body, tensors, tensors, opts, op)

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """outputs[i][r]: where input i of rank r goes; sizes may differ, as the outputs say."""

        def body(comm: Communicator) -> Any:
            handles: list[Any] = []
            copies: list[tuple[Any, Any]] = []
            for parts, given in zip(outputs, inputs, strict=True):
                _alike([*parts, given])
                counts = [part.numel() for part in parts]
                inp = packed(given, True)[0].view(-1)
                whole = inp.new_empty(sum(counts))
                if min(counts) == max(counts):
                    handles.append(comm.all_gather(whole, inp))
                else:
                    handles.append(comm.all_gather_v(whole, inp, counts))
                copies += _pieces(parts, whole, counts)
            return handles, copies

        flattened = [part for parts in outputs for part in parts]
        if any(len(parts) != self.ranks for parts in outputs):
            raise error("invalid", f"all_gather: needs {self.ranks} outputs for an input")
        even = all(len({part.numel() for part in parts}) == 1 for parts in outputs)
        return self._run("all_gather", body, [*flattened, *inputs], outputs, opts, even=even)

    def all_gather_single(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self._plain("all_gather", outputs, [inputs], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """inputs[0][r]: what goes to rank r; sizes may differ."""

        def body(comm: Communicator) -> Any:
            (out,), (parts,) = outputs, inputs
            _alike([out, *parts])
            whole, back = packed(out, False)
            counts = [part.numel() for part in parts]
            inp = joined(parts)
            if min(counts) == max(counts):
                return [comm.reduce_scatter(whole, inp, op, scale=scale)], back
            return [comm.reduce_scatter_v(whole, inp, counts, op, scale=scale)], back

        op, scale = reduction_of(opts.reduceOp) or ("", 1.0)
        used = [*outputs, *(part for parts in inputs for part in parts)]
        even = len({part.numel() for part in inputs[0]}) == 1
        return self._run("reduce_scatter", body, used, outputs, opts, op, even)

    def reduce_scatter_single(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        op, scale = reduction_of(opts.reduceOp) or ("", 1.0)
        return self._plain("reduce_scatter", outputs, [inputs], opts, op=op, scale=scale)

    def all_to_all_single(
        self, out: Any, inp: Any, out_splits: Sequence[int], in_splits: Sequence[int], opts: Any
    ) -> Any:
        """Splits are rows; all ranks give some or none does."""

        def body(comm: Communicator) -> Any:
            whole, back = packed(out, False)
            given = packed(inp, True)[0]
            if not out_splits and not in_splits:
                return [comm.all_to_all(whole, given)], back
            sent, taken = (
                self._rows(tensor, splits)
                for tensor, splits in ((inp, in_splits), (out, out_splits))
            )
            counts = self._counts(comm, sent, taken, opts)
            return [comm.all_to_all_v(whole, given, counts)], back

        even = not out_splits and not in_splits
        return self._run("all_to_all", body, [out, inp], [out], opts, even=even)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        def body(comm: Communicator) -> Any:
            _alike([*outputs, *inputs])
            if len(outputs) != self.ranks or len(inputs) != self.ranks:
                raise error("invalid", f"all_to_all: needs {self.ranks} outputs and inputs")
            sent, taken = ([one.numel() for one in side] for side in (inputs, outputs))
            counts = self._counts(comm, sent, taken, opts)
            inp = joined(inputs)
            whole = inp.new_empty(sum(taken))
            handle = comm.all_to_all_v(whole, inp, counts)
            return [handle], _pieces(outputs, whole, taken)

        return self._run("all_to_all", body, [*outputs, *inputs], outputs, opts, even=False)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        def body(comm: Communicator) -> Any:
            _alike([outputs[0], *(part for parts in inputs for part in parts)])
            whole, back = packed(outputs[0], False)
            parts = joined(inputs[0]) if self.rank == opts.rootRank else None
            return [comm.scatter(whole, parts, root=opts.rootRank)], back

        used = [*outputs, *(part for parts in inputs for part in parts)]
        return self._run("scatter", body, used, outputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        def body(comm: Communicator) -> Any:
            inp = packed(inputs[0], True)[0].view(-1)
            if self.rank != opts.rootRank:
                return [comm.gather(None, inp, root=opts.rootRank)], ()
            (parts,) = outputs
            _alike([*parts, inp])
            whole = inp.new_empty(inp.numel() * self.ranks)
            handle = comm.gather(whole, inp, root=opts.rootRank)
            return [handle], _pieces(parts, whole, [part.numel() for part in parts])

        used = [*inputs, *(part for parts in outputs for part in parts)]
        return self._run("gather", body, used, outputs, opts)

    def barrier(self, opts: Any) -> Any:
        """Of what the current stream has, too."""
        event = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            event = torch.cuda.Event()
            event.record()

        def body(comm: Communicator) -> Any:
            if event is not None:
                event.synchronize()
            comm.barrier(comm.timeout)
            return (), ()

        return self._run("barrier", body, [torch.empty(0, device="cpu")], None, opts)

    def memory_on(self, device: torch.device) -> Ring | Pool | None:
        """What `allocate_tensor` takes from; None: there is none. Collective at the first call."""
        kind, nbytes = device.type, self._arguments.get("memory", 0)
        if not nbytes or kind in self.memory or kind not in ("cpu", "cuda"):
            return self.memory.get(kind)
        if kind == "cuda" and device.index is None:
            device = torch.device(kind, torch.cuda.current_device())
        side = self._sides.get(kind) or self._open(device)
        if side is None or isinstance(side.comm, Hosts):
            return None

        def body(comm: Communicator) -> Any:
            self.memory[kind] = memory_of(comm, nbytes, device)
            return (), ()

        side.call("memory", body)  # in the order of the group's calls
        return self.memory[kind]

    def hosts(self) -> dict[str, dict[str, int]]:
        """Of a group that spans hosts, by type of device: how many, and what a rail brought."""
        return {
            kind: side.comm.facts()
            for kind, side in self._sides.items()
            if isinstance(side.comm, Hosts)
        }

    def close(self) -> None:
        """Once what is under way has ended."""
        self.memory.clear()
        self._each(Side.close)

    def abort(self) -> None:
        """Every rank's waits and later calls fail."""
        self._each(Side.abort)

    def _each(self, do: Callable[[Side], None]) -> None:
        for side in [*self._sides.values()]:
            do(side)

    def _plain(
        self, op: str, outputs: Any, inputs: Any, opts: Any, read: bool = False, /, **given: Any
    ) -> Any:
        """An operation on each output, with its input where there are some."""

        def body(comm: Communicator) -> Any:
            handles: list[Any] = []
            copies: list[tuple[Any, Any]] = []
            for out, *others in zip(outputs, *inputs, strict=True):
                whole, back = packed(out, read)
                packs = [packed(one, True)[0] for one in others]
                handles.append(getattr(comm, op)(whole, *packs, **given))
                copies += back
            return handles, copies

        used = [*outputs, *(one for tensors in inputs for one in tensors)]
        return self._run(op, body, used, outputs, opts, given.get("op"))

    def _run(
        self,
        op: str,
        body: Body,
        used: Any,
        outputs: Any,
        opts: Any,
        reduction: str | None = None,
        even: bool = True,
    ) -> Any:
        kind = "cuda" if all_on("cuda", used) else "cpu"
        if not used or (kind == "cpu" and not all_on("cpu", used)):
            return None
        if reduction is not None and (
            not reduction or not all([reducible(tensor.dtype) for tensor in used])
        ):
            return None
        side = self._sides.get(kind) or self._open(used[0].device)
        if side is None or (
            isinstance(side.comm, Hosts) and not side.comm.takes(op, reduction, used[0].dtype, even)
        ):
            return None
        self.carried[op] = self.carried.get(op, 0) + 1
        return side.run(op, body, outputs, opts)

    def _open(self, device: Any) -> Side | None:
        kind = device.type
        with self._lock:
            if kind not in self._sides and kind not in self.obstacles:
                store = dist.PrefixStore(f"offcore/{kind}/", self._store)
                told = self._told(store, reach.facts_of(device))
                why = reach.obstacle(told)
                if why:
                    self.obstacles[kind] = why
                    log.warning("group %s goes by torch's own backend: %s", self.name, why)
                else:
                    hosts = reach.hosts_of(told)
                    (comm,) = open_ends(
                        store, hosts, self.rank, self.timeout, device, self._arguments
                    )
                    given = comm, self.name, self.rank, self.timeout, device
                    self._sides[kind] = side = side_of(*given)
                    self.direct = side if isinstance(side, DirectSide) else self.direct
            return self._sides.get(kind)

    def _told(self, store: Any, own: str) -> list[str]:
        """Every rank's facts, by way of the store."""
        store.set(f"facts/{self.rank}", own)
        keys = [f"facts/{rank}" for rank in range(self.ranks)]
        return [one.decode() for one in store.multi_get(keys)]  # one request, also of thousands

    def _rows(self, tensor: Any, splits: Sequence[int]) -> list[int]:
        """Elements to or from each rank; without splits equal parts."""
        rows, row = tensor.shape[0], math.prod(tensor.shape[1:])
        if not splits and rows % self.ranks == 0:
            splits = [rows // self.ranks] * self.ranks
        if len(splits) != self.ranks or sum(splits) != rows:
            raise error(
                "invalid", f"all_to_all: splits {[*splits]} of {rows} rows for {self.ranks} ranks"
            )
        return [part * row for part in splits]

    def _counts(
        self, comm: Communicator, sent: Sequence[int], taken: Sequence[int], opts: Any
    ) -> list[list[int]]:
        """What every rank sends to every rank, which each tells the others."""
        told = comm._core.exchange("all_to_all", json.dumps([*sent]).encode(), comm.timeout)
        counts: list[list[int]] = [json.loads(row) for row in told]
        for rank, row in enumerate(counts):
            if row[self.rank] != taken[rank]:
                raise error(
                    "mismatch",
                    f"rank {rank} sends {row[self.rank]} elements to rank {self.rank}, which "
                    f"expects {taken[rank]}",
                )
        return counts


def _alike(tensors: Sequence[Any]) -> None:
    """What is joined or cut must have one dtype: a copy would convert it."""
    if len({tensor.dtype for tensor in tensors}) > 1:
        names = ", ".join(sorted({str(tensor.dtype) for tensor in tensors}))
        raise error("invalid", f"the tensors' dtypes differ: {names}")


def _pieces(parts: Sequence[Any], whole: Any, counts: Sequence[int]) -> list[tuple[Any, Any]]:
    return [
        (part, piece.view(part.shape))
        for part, piece in zip(parts, whole.split(counts), strict=True)
    ]
