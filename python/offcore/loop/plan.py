"""What each block of a loop kernel executes: lists of instructions, with counters between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from offcore.comm.requests import Put
from offcore.errors import error
from offcore.loop.graph import Graph, Operator, conflict

TILE = 64  # of a gemm, rows and columns
PART = 4096  # elements of a map or reduce that one block takes at least
RUN, AWAIT, ARRIVED, SENT, STAMP = range(5)


class Instruction(NamedTuple):
    """RUN operator, tile. AWAIT operator, tiles, lag: of iteration i - lag. ARRIVED peer, buffer,
    lag, nth, signals an iteration. SENT operator, peer. STAMP number."""

    kind: int
    a: int
    b: int = 0
    lag: int = 0
    nth: int = 0
    each: int = 0


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def tiles_of(one: Operator, blocks: int) -> int:
    """0: a wait, which who needs it makes itself."""
    if one.kind in ("put", "signal", "stamp"):
        return 1
    if one.kind == "wait":
        return 0
    if one.kind == "gemm":
        m, n, _ = one.sizes
        return _ceil(m, TILE) * _ceil(n, TILE)
    assert one.out is not None
    return min(blocks, _ceil(one.out.count, PART))


class Plan:
    """blocks[b]: the instructions of block b; tail: block 0's after the last iteration.

    Operators of one tile, sends among them, are block
    0's, in the order of the graph; tiles of others go round the blocks from block 1 on.

    Dependencies are between whole operators: on earlier ones of the iteration, and on the
    iteration before. One that another one implies is left out."""

    def __init__(self, graph: Graph, blocks: int) -> None:
        if blocks < 1:
            raise error("invalid", f"loop: blocks is {blocks}; it must be 1 or more")
        self.graph = graph
        self.blocks: list[list[Instruction]] = [[] for _ in range(blocks)]
        self.tiles = [tiles_of(one, blocks) for one in graph.operators]
        self.stamps = sum(one.kind == "stamp" for one in graph.operators)
        self._ops = graph.operators
        self._each = Counter((one.peer, one.buffer) for one in self._ops if one.kind == "wait")
        self._nth: dict[int, int] = {}
        seen: Counter[tuple[int, int]] = Counter()
        for number, one in enumerate(self._ops):
            if one.kind == "wait":
                self._nth[number] = seen[one.peer, one.buffer]
                seen[one.peer, one.buffer] += 1
        self._known: list[set[tuple[int, int]]] = [set() for _ in range(blocks)]
        stamp = 0
        for number, one in enumerate(self._ops):
            wanted = self._needs(number)
            for tile in range(self.tiles[number]):
                block = self._block(number, tile)
                self._wait_for(block, wanted)
                if one.kind == "stamp":
                    self.blocks[block].append(Instruction(STAMP, stamp))
                self.blocks[block].append(Instruction(RUN, number, tile))
            stamp += one.kind == "stamp"
        waits = [(n, 0) for n, one in enumerate(self._ops) if one.kind == "wait"]
        self._wait_for(0, waits)  # an iteration ends when all has arrived
        self.tail = [
            Instruction(SENT, n, one.peer) for n, one in enumerate(self._ops) if one.kind == "put"
        ]

    def _block(self, number: int, tile: int) -> int:
        if self.tiles[number] == 1 or len(self.blocks) == 1:
            return 0
        return 1 + tile % (len(self.blocks) - 1)

    def _needs(self, number: int) -> list[tuple[int, int]]:
        """(operator, lag), the latest first."""
        one = self._ops[number]
        earlier = [(n, 0) for n in range(number) if conflict(self._ops[n], one)]
        later = [(n, 1) for n in range(number, len(self._ops)) if conflict(self._ops[n], one)]
        return earlier[::-1] + later[::-1]

    def _wait_for(self, block: int, wanted: list[tuple[int, int]]) -> None:
        known = self._known[block]
        for number, lag in wanted:
            if (number, lag) in known:
                continue
            known.add((number, lag))
            one, out = self._ops[number], self.blocks[block]
            if one.kind == "wait":
                each = self._each[one.peer, one.buffer]
                nth = self._nth[number]
                out.append(Instruction(ARRIVED, one.peer, one.buffer, lag, nth, each))
                continue
            tiles = self.tiles[number]
            if any(self._block(number, tile) != block for tile in range(tiles)):
                out.append(Instruction(AWAIT, number, tiles, lag))
            if one.kind == "put":
                out.append(Instruction(SENT, number, one.peer))


def schedule_of(graphs: Sequence[Graph]) -> list[list[Put]]:
    """Returns the puts of all ranks, for `comm.requests(schedule=...)`: the armed engine."""
    return [
        [_planned(graph, one) for one in graph.operators if one.kind in ("put", "signal")]
        for graph in graphs
    ]


def in_chunks(graph: Graph, one: Operator) -> tuple[int, int] | None:
    """First chunk and chunks; None: whole chunks at equal places these are not."""
    assert one.out is not None
    (_, begin, end), (_, first, _) = one.out.place, one.inputs[0].place
    if begin != first or begin % graph.chunk or end % graph.chunk:
        return None
    return begin // graph.chunk, (end - begin) // graph.chunk


def _planned(graph: Graph, one: Operator) -> Put:
    if one.kind == "signal":
        return Put(one.peer, one.buffer)
    place = in_chunks(graph, one)
    if place is None:
        raise error("invalid", "loop: a schedule has puts of whole chunks at equal places only")
    src = one.inputs[0].buffer.number
    return Put(one.peer, one.buffer, 0 if src is None else src, *place)


def check_ranks(graphs: Sequence[Graph]) -> None:
    """Each rank's k-th put or signal to a peer's buffer is that peer's k-th wait there."""

    def places(graph: Graph, kinds: tuple[str, ...], peer: int) -> list[object]:
        found = [one for one in graph.operators if one.kind in kinds and one.peer == peer]
        found.sort(key=lambda one: one.buffer)
        return [(one.buffer, None if one.out is None else one.out.place) for one in found]

    for rank, graph in enumerate(graphs):
        if (graph.rank, graph.ranks, graph.chunk) != (rank, len(graphs), graphs[0].chunk):
            raise error("invalid", "loop: one graph for each rank, in order, of one chunk")
        for peer, other in enumerate(graphs):
            if places(graph, ("put", "signal"), peer) != places(other, ("wait",), rank):
                raise error("invalid", f"loop: rank {rank}'s puts to rank {peer} are not its waits")
