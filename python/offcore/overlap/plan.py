"""Choice of strategy, cores and order (sections V-C, VI-F, VII-B1)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from offcore.errors import error
from offcore.overlap.kernels import Collective, Compute, Kernel
from offcore.overlap.run import Calls, Launch, Place, check_calls, run
from offcore.overlap.tables import Tables

# What can be done with kernels that could run at once, the simplest first.
STRATEGIES = {
    "serial": "one after the other",
    "base": "at once, the kernel with the most workgroups first",
    "sp": "at once, the kernel with the fewest workgroups first",
    "rp": "at once, each on cores of its own, the kernel with the most workgroups first",
    "sp_rp": "at once, each on cores of its own, the kernel with the fewest workgroups first",
    "ConCCL": "at once, collectives on engines",
    "ConCCL_rp": "the same, and memory-bound kernels on fewer cores",
}
_KERNELS_MOST = 5  # of which all splits are tried
Names = tuple[str, ...]
Cores = Mapping[str, int]  # by a kernel's name


@dataclass(frozen=True)
class Choice:
    """One strategy that was considered.

    cores: sizes of partitions, by the name of the kernel.
    engines: the collectives that run on engines.
    time_us: estimated from the tables.
    """

    order: Names
    cores: Cores
    engines: Names
    time_us: float


class Plan:
    """A plan for kernels that do not depend on each other.

    `strategy` has the lowest estimated time, or is the simplest within 1 %; `order`, `cores` and
    `engines` describe it. `choices` contains all strategies that were considered. base is never
    estimated: tables do not show how much a kernel starves that is launched after a large one.
    """

    def __init__(
        self, kernels: Sequence[Kernel], tables: Tables, *, allowed: Sequence[str] | None = None
    ) -> None:
        """allowed: of STRATEGIES; default all. Raises `Error`: invalid (kernels of one name,
        fewer than 2 or more than 5, an unknown strategy, none that can be had), unsupported
        (kernels of a class that the tables do not have)."""
        names = [one.name for one in kernels]
        if not 2 <= len(set(names)) == len(names) <= _KERNELS_MOST:
            raise error("invalid", f"a plan needs 2 to {_KERNELS_MOST} kernels with distinct names")
        unknown = [one for one in allowed or () if one not in STRATEGIES]
        if unknown:
            raise error("invalid", f"unknown strategy {unknown[0]!r}: {', '.join(STRATEGIES)}")
        self.tables = tables
        self.kernels = tuple(sorted(kernels, key=tables.workgroups_of))  # low to high
        weighed = {
            name: choice
            for name in STRATEGIES
            if (allowed is None or name in allowed) and (choice := self._weigh(name)) is not None
        }
        if not weighed:
            raise error("invalid", "no strategy of those allowed can be weighed for these kernels")
        self.choices: Mapping[str, Choice] = weighed
        least = min(one.time_us for one in weighed.values())
        self.strategy = next(n for n, one in weighed.items() if one.time_us <= least * 1.01)

    @property
    def order(self) -> Names:
        """Order of launches."""
        return self.choices[self.strategy].order

    @property
    def cores(self) -> Cores:
        """Cores of the kernels that have a partition."""
        return self.choices[self.strategy].cores

    @property
    def engines(self) -> Names:
        """The collectives that run on engines."""
        return self.choices[self.strategy].engines

    @property
    def time_us(self) -> float:
        """Estimated time."""
        return self.choices[self.strategy].time_us

    def run(self, calls: Calls) -> None:
        """Runs kernels according to the plan.

        calls: by the name of the kernel, a function that launches it. Its argument is a `Place`:
            `engines` selects Offcore for a collective, `cores` limits a library's CTAs.

        With torch on a GPU each kernel has a separate stream, forked from and joined to the current
        stream; the host does not wait. GEMMs of torch (cuBLAS) use the plan's SMs. Otherwise each
        kernel has a thread, returned handles are waited for, and all kernels have ended on return.
        Kernels are launched in the plan's order, those with few workgroups at a higher priority.
        Memory of other streams must outlive the kernels (tensors that are used later do). Raises
        `Error`: invalid if calls do not match the plan's kernels, and the exceptions of calls.
        """
        launches = [
            Launch(
                one,
                Place(one in self.engines, self.cores.get(one)),
                isinstance(self._kernel(one), Compute),
                self.strategy not in ("base", "rp") and one != self.order[-1],
            )
            for one in self.order
        ]
        check_calls(launches, calls)
        run(launches, calls, serial=self.strategy == "serial")

    def _kernel(self, name: str) -> Kernel:
        return next(one for one in self.kernels if one.name == name)

    def _weigh(self, strategy: str) -> Choice | None:
        names = tuple(one.name for one in self.kernels)
        if strategy == "serial":
            return Choice(names, {}, (), sum(map(self.tables.time_us, self.kernels)))
        if strategy == "sp":
            return Choice(names, {}, (), self._time_us(self._in_order, ()))
        if strategy in ("rp", "sp_rp"):
            cores = self._split(self.kernels)
            order = names if strategy == "sp_rp" else names[::-1]
            return Choice(order, cores, (), self._time_us(lambda _: cores, ()))
        moved = [one for one in self.kernels if self._can_move(one)]
        if strategy == "base" or not moved:
            return None
        return self._on_engines(names, moved, fewer=strategy == "ConCCL_rp")

    def _can_move(self, kernel: Kernel) -> bool:
        return isinstance(kernel, Collective) and self.tables.has_engines(kernel)

    def _in_order(self, running: Sequence[Kernel]) -> Cores:
        """Each kernel gets the cores for its workgroups, in this order, while there are any."""
        free, least, found = self.tables.cores.count, self.tables.cores.least, {}
        for one in running:
            if free >= least:
                found[one.name] = max(min(self.tables.workgroups_of(one), free), least)
                free -= found[one.name]
        return found

    def _time_us(self, cores_of: Callable[[Sequence[Kernel]], Cores], engines: Names) -> float:
        """Until the last kernel ends. Rates hold until one does; one without cores waits."""
        tables, now = self.tables, 0.0
        left = {one.name: 1.0 for one in self.kernels}
        while left:
            running = [one for one in self.kernels if one.name in left]
            cores = cores_of(running)
            at_work = [one for one in running if one.name in cores or one.name in engines]
            rates = {}
            for one in at_work:
                moved = one.name in engines
                slowdown = 1.0 if moved else tables.slowdown(one, cores[one.name])
                cost = 1 + sum(
                    tables.beside(one, other, engines=moved or other.name in engines) - 1
                    for other in at_work
                    if other is not one
                )
                rates[one.name] = 1 / (tables.time_us(one, engines=moved) * slowdown * cost)
            step = min(left[name] / rate for name, rate in rates.items())
            now += step
            left = {n: share - step * rates.get(n, 0.0) for n, share in left.items()}
            left = {n: share for n, share in left.items() if share > 1e-9}
        return now

    def _split(self, kernels: Sequence[Kernel]) -> Cores:
        """Of the least maximum of times, each slowed down as on its cores (section V-C). The
        kernel of the most workgroups has what powers of two leave."""
        found = ((self._longest_us(kernels, cores), cores) for cores in self._splits(len(kernels)))
        names = (one.name for one in kernels)
        return dict(zip(names, min(found, key=lambda one: one[0])[1], strict=True))

    def _longest_us(self, kernels: Sequence[Kernel], cores: Sequence[int]) -> float:
        return max(
            self.tables.time_us(one) * self.tables.slowdown(one, count)
            for one, count in zip(kernels, cores, strict=True)
        )

    def _splits(self, kernels: int) -> Iterator[tuple[int, ...]]:
        cores = self.tables.cores
        for powers in itertools.product(cores.splits(), repeat=kernels - 1):
            if (left := cores.count - sum(powers)) >= cores.least:
                yield (*powers, left)

    def _on_engines(self, names: Names, moved: Sequence[Kernel], *, fewer: bool) -> Choice | None:
        """What cannot move shares the cores as if it were alone; with `fewer`, a single
        memory-bound kernel leaves some idle."""
        left = [one for one in self.kernels if one not in moved]
        every = self.tables.cores.count
        own: Cores = {}
        if fewer:
            if len(left) != 1 or not self._is_memory_bound(left[0]):
                return None
            counts = (every, *(every - one for one in self.tables.cores.splits()))
            best = min(counts, key=lambda count: self._longest_us(left, (count,)))
            own = {left[0].name: best}
        elif len(left) > 1:
            own = self._split(left)
        cores = own or {one.name: every for one in left}
        gone = tuple(one.name for one in moved)
        return Choice(names, own, gone, self._time_us(lambda _: cores, gone))

    def _is_memory_bound(self, kernel: Kernel) -> bool:
        return isinstance(kernel, Compute) and self.tables.cores.bound_of(kernel) == "mb"


_CHUNKS_MOST = 8
_SMALL_LOSS = 0.02  # of its time that a GEMM loses with each cut


def chunks_of(product: Compute, gather: Collective, tables: Tables) -> int:
    """Returns the number of chunks for an all-gather on engines before a dependent GEMM
    (offcore.torch.all_gather_matmul): the fewest with the lowest estimated time.

    product: the GEMM of the rows of all ranks.

    A rank's own rows are multiplied first; chunk k is multiplied when it has arrived and chunk
    k - 1 is done. Each chunk adds the time of a small all-gather. Raises `Error`: unsupported
    (tables without engines)."""
    if not tables.has_engines(gather):
        raise error("unsupported", f"{tables.machine}: {gather.op} by engines was not measured")
    own_us = tables.time_us(product) / gather.ranks
    each_us = tables.time_us(Collective(gather.op, 1, gather.ranks), engines=True)
    wire_us = tables.time_us(gather, engines=True) - each_us

    def estimated(chunks: int) -> float:
        arrived, done = 0.0, own_us
        for _ in range(chunks):
            arrived += each_us + wire_us / chunks
            rest_us = own_us * (gather.ranks - 1) / chunks * (1 + _SMALL_LOSS * (chunks - 1))
            done = max(done, arrived) + rest_us
        return done

    return min((1 << power for power in range(_CHUNKS_MOST.bit_length())), key=estimated)
