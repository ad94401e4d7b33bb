"""One collective after the other on windows that are kept: fill, launch, wait, check.

The local ranks of one communicator are served: all of them on `sim`, one a process on `host`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from offcore.errors import error
from offcore.tools.bench.layout import ROOT, Bytes, Layout
from offcore.tools.bench.values import Values

# One collective call: takes the variant, gives the handle to wait for.
Launch = Callable[[str], Any]


class CollectiveRunner:
    """windows: an output and an input that are large enough; by default they are allocated.
    meet: returns when all ranks have called it; needed where not all of them are local."""

    def __init__(
        self,
        comm: Any,
        op: str,
        in_place: bool,
        nbytes_max: int,
        protocol: str,
        phantom: bool,
        windows: tuple[Any, Any] | None = None,
        meet: Callable[[], None] = lambda: None,
        values: Values | None = None,
    ) -> None:
        if in_place and op in ("scatter", "gather"):
            raise error("unsupported", f"{op} has no in-place form: omit --in-place")
        self.comm = comm
        self._meet = meet
        self.op = op
        self.in_place = in_place or op == "broadcast"
        self.protocol = protocol
        self.phantom = phantom
        self._values = values
        largest = self.layout(nbytes_max)
        if windows is None:
            out = comm.window(max(1, largest.out_bytes))
            windows = out, None if self.in_place else comm.window(max(1, largest.in_bytes))
        self._out = windows[0]
        self._inp = None if self.in_place else windows[1]
        # Phantom memory has no addresses by which to name a part of each rank's own.
        apart = comm.phantom and op == "reduce_scatter" and in_place
        self._apart = comm.window(max(1, *largest.counts)) if apart else None

    def layout(self, nbytes: int) -> Layout:
        return Layout(self.op, self.comm.ranks, nbytes, self.in_place, self._values)

    def facts_of(self, result: Any) -> dict[str, Any]:
        """What a result of these calls tells, and of a reduction what is reduced, and how."""
        if self._values is None:
            return facts_of(result)
        more = {"in_place": self.in_place, "sms": result.sms if result.backend == "cuda" else None}
        return facts_of(result) | more | self._values.facts

    def launch_of(self, layout: Layout, released: bool = True) -> Launch:
        """The call that runs this layout; what varies between calls is bound once, here.

        released: with protocol credits, whether the output is released as soon as it is there.
        """
        if self.protocol == "view":
            return self._view_of(layout)
        call = self._call_of(layout)
        if self.protocol != "credits" or not released:
            return call

        def released_at_once(variant: str) -> Any:
            handle = call(variant)
            handle.release()
            return handle

        return released_at_once

    def _view_of(self, layout: Layout) -> Launch:
        if layout.op not in ("all_gather", "all_to_all") or not layout.even:
            raise error("unsupported", "only even all-gathers and all-to-alls have views")
        comm, part = self.comm, layout.in_bytes
        if self._inp is None:
            if layout.op == "all_to_all":
                raise error("unsupported", "an all-to-all has no view in place")
            return lambda variant: comm.all_gather_view(self._next_input(part), variant=variant)
        function = getattr(comm, layout.op + "_view")
        own = self._inp.region(0, part)
        return lambda variant: function(own, variant=variant)

    def _next_input(self, part: int) -> Any:
        """Where the next view's input goes, as an operation takes it; no torch is needed."""
        window, offset = self.comm._core.next_input(0, part, self.comm.timeout)
        first = self.comm.local_ranks[0]
        if len(self.comm.local_ranks) == 1:
            return window.region(offset + first * part, part)
        return [window.view(r, offset + r * part, part) for r in self.comm.local_ranks]

    def _call_of(self, layout: Layout) -> Launch:
        if layout.values is not None:
            return self._reduction_of(layout, layout.values)
        out = self._out.region(0, layout.out_bytes)
        inp = None if self._inp is None else self._inp.region(0, layout.in_bytes)
        name = layout.op if layout.even else layout.op + "_v"
        function = getattr(self.comm, name)
        protocol = self.protocol
        if layout.op == "broadcast":
            return lambda variant: function(out, root=ROOT, variant=variant, protocol=protocol)
        args: list[Any] = [out, inp]
        options: dict[str, Any] = {"protocol": protocol}
        if not layout.even:
            args.append(layout.matrix if layout.op == "all_to_all" else layout.counts)
        if layout.op in ("scatter", "gather"):
            options["root"] = ROOT
        return lambda variant: function(*args, variant=variant, **options)

    def _reduction_of(self, layout: Layout, values: Values) -> Launch:
        name = layout.op if layout.even else layout.op + "_v"
        function = getattr(self.comm, name)
        out = self._out.region(0, layout.out_bytes)
        inp = out if self._inp is None else self._inp.region(0, layout.in_bytes)
        args: list[Any] = [out, inp]
        if layout.op == "reduce_scatter" and self._inp is None:
            args[0] = self._own_parts(layout)
        elif layout.op == "all_reduce" and self._inp is None:
            args[1] = None
        if not layout.even:
            args.append(layout.counts)
        options = {"dtype": values.dtype, "scale": values.scale, "protocol": self.protocol}
        if layout.op == "reduce":
            options["root"] = ROOT
        return lambda variant: function(*args, values.reduction, variant=variant, **options)

    def _own_parts(self, layout: Layout) -> Any:
        """Each local rank's own part of its input, as an output."""
        if self._apart is not None:
            return self._apart.region(0, max(layout.counts))
        parts = {rank: layout.reduced_by(rank) for rank in self.comm.local_ranks}
        if len(parts) == 1:
            return self._out.region(*next(iter(parts.values())))
        return [self._out.array(rank)[at : at + n] for rank, (at, n) in parts.items()]

    def fill(self, layout: Layout, seed: int) -> None:
        for rank in self.comm.local_ranks:
            self._fill(layout, rank, seed)

    def wrong(self, layout: Layout, seed: int) -> int:
        return sum(
            layout.wrong(rank, self._outcome(rank, layout.out_bytes), seed)
            for rank in self.comm.local_ranks
        )

    def checked_call(self, layout: Layout, variant: str, seed: int) -> tuple[Any, int | None]:
        """A call on fresh inputs: its result, and the number of wrong bytes (None: phantom).

        The first call of a prelaunched program arms the engines before it starts them; the second
        finds them armed, which is what prelaunch is for. Both are checked.
        """
        result, wrong = self._call(layout, variant, seed)
        if result.variant.startswith("prelaunch_") and not result.armed_ahead:
            result, more = self._call(layout, variant, seed + self.comm.ranks)
            wrong = None if wrong is None or more is None else wrong + more
        return result, wrong

    def _call(self, layout: Layout, variant: str, seed: int) -> tuple[Any, int | None]:
        launch = self.launch_of(layout, released=False)
        if self.phantom:
            return launch(variant).wait(), None
        self.fill(layout, seed)
        if self.protocol == "view":
            return self._call_view(layout, launch, variant, seed)
        self._meet()  # no peer writes before the last outcome has been looked at
        result = launch(variant).wait()
        return result, self.wrong(layout, seed)

    def _call_view(
        self, layout: Layout, launch: Launch, variant: str, seed: int
    ) -> tuple[Any, int]:
        """The output is lent: it is looked at where it lies."""
        if layout.in_place:
            window, at = self.comm._core.next_input(0, layout.in_bytes, self.comm.timeout)
            for rank in self.comm.local_ranks:
                offset, nbytes = layout.input_of(rank)
                own = self._outcome(rank, offset + nbytes)[offset:].copy()
                window.write(rank, at + offset, own.ctypes.data, nbytes)
        handle = launch(variant)
        result = handle.wait()
        wrong = 0
        for rank in self.comm.local_ranks:
            seen = np.empty(layout.out_bytes, np.uint8)
            handle.read(seen, rank=rank)
            wrong += layout.wrong(rank, seen, seed)
        return result, wrong

    def _fill(self, layout: Layout, rank: int, seed: int) -> None:
        window = self._inp or self._out
        if window.host_visible:
            layout.fill(rank, window.array(rank, np.uint8), seed)
            return
        offset, nbytes = layout.input_of(rank)
        host = np.zeros(offset + nbytes, np.uint8)
        layout.fill(rank, host, seed)
        window.write(host[offset:], offset, rank)

    def _outcome(self, rank: int, nbytes: int) -> Bytes:
        if self._out.host_visible:
            seen: Bytes = self._out.array(rank, np.uint8)
            return seen
        copied = np.empty(nbytes, np.uint8)
        self._out.read(copied, rank=rank)
        return copied


def facts_of(result: Any) -> dict[str, Any]:
    """What a result tells, as plain values that travel between processes."""
    return {
        "machine": result.machine,
        "in_place": result.in_place,
        "variant": result.variant,
        "native": result.native,
        "protocol": result.protocol,
        "signals": result.signals if result.backend == "cuda" else None,
        "own_copy": result.own_copy if result.backend == "cuda" else None,
        "staged": result.staged,
        "tuned": result.tuned,
        "armed_ahead": result.armed_ahead,
        # The modes of a plan are finer; a reader of results asks only whether a graph ran it.
        "mode": "graph" if result.mode == "capture" else "eager",
        "commands": result.commands,
        "engines": result.engines,
        "syncs": result.syncs,
        "phases": {
            name: round(float(getattr(result.phases, name)), 4)
            for name in ("control_us", "schedule_us", "copy_us", "sync_us")
        },
    }
