"""A GEMM behind an all-gather of its input, or in front of a reduce-scatter of its result: by ranks
that are threads, and on streams that note what is ordered in them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import needs
import offcore
from stores import as_ranks

needs.require("torch")
import torch  # noqa: E402

from offcore.torch import all_gather_matmul, matmul_reduce_scatter, matmul_shard  # noqa: E402
from offcore.torch_matmul import _places  # noqa: E402


def whole_numbers(rows: int, columns: int, seed: int, dtype: Any = torch.float32) -> Any:
    """Small ones, whose products and sums are exact in any order."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, (rows, columns), generator=made).to(dtype)


SIZES = pytest.mark.parametrize(
    ("m", "k", "n", "chunks"),
    [
        *((12, 5, 7, chunks) for chunks in (1, 2, 3, 4, 12)),
        (7, 3, 1, 7),
        (1, 1, 1, 1),
        (30, 129, 65, 5),
        (6, 4, 0, 2),
        (6, 0, 4, 3),
        (0, 4, 3, 2),
    ],
)


@SIZES
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_row_is_multiplied(ranks: int, m: int, k: int, n: int, chunks: int) -> None:
    """Of two calls in a row, whose rows pass through the same memory."""

    def work(comm: offcore.Communicator, rank: int) -> None:
        weight = whole_numbers(k, n, 100 + rank)
        kept = torch.full((ranks * m, n), 99.0)
        for turn in range(2):
            shards = [whole_numbers(m, k, 10 * turn + one) for one in range(ranks)]
            wanted = torch.mm(torch.cat(shards), weight)
            made = all_gather_matmul(comm, shards[rank], weight, chunks=chunks)
            assert torch.equal(made, wanted)
            assert all_gather_matmul(comm, shards[rank], weight, out=kept, chunks=chunks) is kept
            assert torch.equal(kept, wanted)
        assert len(_places[comm]) == 1

    as_ranks(ranks, work)


@SIZES
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_product_is_added(ranks: int, m: int, k: int, n: int, chunks: int) -> None:
    def work(comm: offcore.Communicator, rank: int) -> None:
        kept = torch.full((m, n), 99.0)
        for turn in range(2):
            inputs = [whole_numbers(ranks * m, k, 10 * turn + one) for one in range(ranks)]
            weights = [whole_numbers(k, n, 100 + 10 * turn + one) for one in range(ranks)]
            products = [torch.mm(*pair) for pair in zip(inputs, weights, strict=True)]
            wanted = torch.stack(products).sum(0)[rank * m : (rank + 1) * m]
            given = inputs[rank], weights[rank]
            assert torch.equal(matmul_reduce_scatter(comm, *given, chunks=chunks), wanted)
            assert matmul_reduce_scatter(comm, *given, out=kept, chunks=chunks) is kept
            assert torch.equal(kept, wanted)
        assert len(_places[comm]) == 1

    as_ranks(ranks, work)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32])
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_rounded_once(dtype: Any, ranks: int) -> None:
    """bfloat16 has 256 and 258, but not 257: sums of two would lose both ones."""

    def work(comm: offcore.Communicator, rank: int) -> None:
        for lane in (0, 1):
            value = torch.full((2 * ranks, 1), 256 if rank == 0 else 1, dtype=dtype)
            out = matmul_reduce_scatter(comm, value, torch.ones(1, 3, dtype=dtype), lane=lane)
            assert out.dtype == dtype
            assert torch.equal(out, torch.full((2, 3), 255 + ranks).to(dtype))

    as_ranks(ranks, work)


def test_calls_of_both_kinds_keep_their_memory() -> None:
    """A shard in its place stays, whatever other calls have the same shape."""

    def work(comm: offcore.Communicator, rank: int) -> None:
        placed = matmul_shard(comm, 6, 5, torch.float32)
        shards = [whole_numbers(6, 5, one) for one in range(2)]
        placed.copy_(shards[rank])
        weight, inp = whole_numbers(5, 5, 7), whole_numbers(12, 5, 8)
        for _ in range(2):
            summed = matmul_reduce_scatter(comm, inp, weight)
            assert torch.equal(summed, 2 * torch.mm(inp, weight)[rank * 6 : (rank + 1) * 6])
            assert torch.equal(
                all_gather_matmul(comm, placed, weight), torch.mm(torch.cat(shards), weight)
            )

    as_ranks(2, work)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32])
def test_dtypes_shapes_and_lanes_have_memory_of_their_own(dtype: Any) -> None:
    def work(comm: offcore.Communicator, rank: int) -> None:
        for m, lane in ((4, 0), (6, 0), (4, 1), (4, 0)):
            shards = [whole_numbers(m, 5, m + one, dtype) for one in range(2)]
            weight = whole_numbers(5, 3, rank, dtype)
            out = all_gather_matmul(comm, shards[rank], weight, chunks=2, lane=lane)
            assert out.dtype == dtype
            assert torch.equal(out, torch.mm(torch.cat(shards), weight))
        assert len(_places[comm]) == 3

    as_ranks(2, work)


def test_a_shard_in_its_place_is_not_copied() -> None:
    def work(comm: offcore.Communicator, rank: int) -> None:
        placed = matmul_shard(comm, 6, 5, torch.float32)
        assert (placed.shape, placed.dtype) == ((6, 5), torch.float32)
        again = matmul_shard(comm, 6, 5, torch.float32)
        assert again.data_ptr() == placed.data_ptr()
        assert matmul_shard(comm, 6, 5, torch.float32, lane=1).data_ptr() != placed.data_ptr()
        assert matmul_shard(comm, 6, 5).dtype == torch.bfloat16
        for turn in range(3):
            shards = [whole_numbers(6, 5, 3 * turn + one) for one in range(3)]
            weight = whole_numbers(5, 4, rank)
            placed.copy_(shards[rank])
            out = all_gather_matmul(comm, placed, weight)
            assert torch.equal(out, torch.mm(torch.cat(shards), weight))
            assert torch.equal(placed, shards[rank])
            # The same rows are also a shard like any other.
            out = all_gather_matmul(comm, placed, weight, chunks=3)
            assert torch.equal(out, torch.mm(torch.cat(shards), weight))

    as_ranks(3, work)


SHARD, WEIGHT = torch.ones(6, 4), torch.ones(4, 3)


@pytest.mark.parametrize(
    ("shard", "weight", "more", "words"),
    [
        (SHARD, torch.ones(5, 3), {}, r"shard is \(6, 4\), weight \(5, 3\)"),
        (torch.ones(24), WEIGHT, {}, r"shard is \(24,\)"),
        (SHARD, torch.ones(4, 3, 1), {}, r"weight \(4, 3, 1\)"),
        (SHARD, WEIGHT.double(), {}, "of weight's dtype"),
        (torch.ones(4, 6).t(), WEIGHT, {}, "shard must be contiguous"),
        (SHARD, WEIGHT, {"chunks": 4}, "4 chunks do not divide 6 rows"),
        (SHARD, WEIGHT, {"chunks": 7}, "7 chunks do not divide 6 rows"),
        (SHARD, WEIGHT, {"chunks": 0}, "0 chunks"),
        (SHARD, WEIGHT, {"chunks": -1}, "chunks is -1"),
        (SHARD, WEIGHT, {"chunks": 1.5}, "chunks must be a whole number"),
        (SHARD, WEIGHT, {"out": torch.ones(5, 3)}, r"out must be contiguous, of shape \(6, 3\)"),
        (SHARD, WEIGHT, {"out": torch.ones(6, 3).double()}, "out must be"),
        (SHARD, WEIGHT, {"out": torch.ones(3, 6).t()}, "out must be"),
    ],
)
def test_refusals(shard: Any, weight: Any, more: dict[str, Any], words: str) -> None:
    with offcore.Communicator(backend="host", ranks=1) as comm:
        with pytest.raises(offcore.Error, match=words) as refused:
            all_gather_matmul(comm, shard, weight, **more)
        assert refused.value.code == "invalid"
        assert comm not in _places


@pytest.mark.parametrize(
    ("inp", "weight", "more", "words"),
    [
        (SHARD, torch.ones(5, 3), {}, r"inp is \(6, 4\), weight \(5, 3\)"),
        (SHARD, WEIGHT.double(), {}, "of weight's dtype"),
        (torch.ones(4, 6).t(), WEIGHT, {}, "inp must be contiguous"),
        (torch.ones(5, 4), WEIGHT, {}, "5 rows of inp are no multiple of 2 ranks"),
        (SHARD, WEIGHT, {"chunks": 2}, "2 chunks do not divide 3 rows"),
        (SHARD, WEIGHT, {"chunks": 0}, "0 chunks"),
        (SHARD, WEIGHT, {"out": torch.ones(6, 3)}, r"out must be contiguous, of shape \(3, 3\)"),
    ],
)
def test_refusals_of_products(inp: Any, weight: Any, more: dict[str, Any], words: str) -> None:
    def work(comm: offcore.Communicator, _: int) -> None:
        with pytest.raises(offcore.Error, match=words) as refused:
            matmul_reduce_scatter(comm, inp, weight, **more)
        assert refused.value.code == "invalid"
        assert comm not in _places

    as_ranks(2, work)


@pytest.mark.parametrize("call", [all_gather_matmul, matmul_reduce_scatter])
def test_several_ranks_in_a_process_are_refused(call: Any) -> None:
    with offcore.Communicator(backend="host", ranks=2) as comm:
        with pytest.raises(offcore.Error, match="one rank in each process") as refused:
            call(comm, SHARD, WEIGHT)
        assert refused.value.code == "invalid"


class Stream:
    """One that notes what is ordered in it. What an event stands for has come only then."""

    here: "Stream"

    def __init__(self, _: Any = None) -> None:
        self.did: list[Any] = []

    def wait_stream(self, other: "Stream") -> None:
        self.did.append(("behind", other))

    def wait_event(self, event: "Event") -> None:
        assert event.stream is not self
        self.did.append("arrival")
        for arrive in event.arrivals:
            arrive()


class Event:
    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or Stream.here
        self.arrivals = [one for one in self.stream.did if callable(one)]


class Gathers:
    """Rank 1 of 3. Rows of the others are in their place once a stream has waited for them."""

    ranks, local_ranks = 3, (1,)

    def __init__(self, shards: list[Any], chunks: int) -> None:
        self.parts = [shard.chunk(chunks) for shard in shards]
        self.gathered = 0

    def empty(self, count: int, dtype: str) -> Any:
        return torch.full((count,), 255, dtype=getattr(torch, dtype))

    def all_gather(self, rows: Any, *, lane: int) -> None:
        assert (rows.is_contiguous(), lane) == (True, 2)
        number = self.gathered % len(self.parts[0])
        self.gathered += 1
        assert torch.equal(rows[1], self.parts[1][number])  # its own are in front of the call

        def arrive() -> None:
            rows[0], rows[2] = self.parts[0][number], self.parts[2][number]

        Stream.here.did.append(arrive)


@pytest.fixture(name="current")
def _current(monkeypatch: pytest.MonkeyPatch) -> Stream:
    @contextlib.contextmanager
    def within(stream: Stream) -> Iterator[None]:
        before, Stream.here = Stream.here, stream
        yield
        Stream.here = before

    Stream.here = Stream()
    mm = torch.mm

    def noted(*given: Any, **more: Any) -> Any:
        Stream.here.did.append("gemm")
        return mm(*given, **more)

    monkeypatch.setattr(torch, "mm", noted)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream.here)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return Stream.here


@pytest.mark.parametrize("chunks", [1, 2, 6])
def test_chunks_are_copied_in_a_stream_beside_the_gemms(current: Stream, chunks: int) -> None:
    shards = [whole_numbers(6, 5, rank) for rank in range(3)]
    weight = whole_numbers(5, 4, 9)
    comm: Any = Gathers(shards, chunks)
    wanted = torch.cat(shards).double() @ weight.double()
    for _ in range(2):
        out = all_gather_matmul(comm, shards[1], weight, chunks=chunks, lane=2)
        assert torch.equal(out.double(), wanted)
        assert Stream.here is current
        # Its own rows first, and those of a chunk as soon as it has arrived.
        assert current.did == ["gemm", *["arrival", "gemm", "gemm"] * chunks]
        current.did.clear()
        [place] = _places[comm].values()
        assert isinstance(place.stream, Stream)
        # Behind what made the shard, and behind the GEMMs of the call before.
        assert place.stream.did[0] == ("behind", current)
        assert len(place.stream.did) == 1 + chunks
        place.stream.did.clear()
        place.rows[:, [0, 2]] = 77.0
    assert comm.gathered == 2 * chunks


def test_a_shard_in_its_place_on_a_stream(current: Stream) -> None:
    shards = [whole_numbers(6, 5, rank) for rank in range(3)]
    weight = whole_numbers(5, 4, 9)
    comm: Any = Gathers(shards, 1)
    placed = matmul_shard(comm, 6, 5, torch.float32, lane=2)
    placed.copy_(shards[1])
    [place] = _places[comm].values()
    assert placed.data_ptr() == place.rows[0, 1].data_ptr()
    version = place.memory._version
    out = all_gather_matmul(comm, placed, weight, lane=2)
    assert torch.equal(out.double(), torch.cat(shards).double() @ weight.double())
    assert place.memory._version == version + 2  # the rows of two others, and no copy of its own
    assert current.did == ["gemm", "arrival", "gemm", "gemm"]


def test_a_call_in_another_stream_comes_behind_the_one_before(current: Stream) -> None:
    """Its copies would overwrite what GEMMs of that one still read."""
    shards = [whole_numbers(6, 5, rank) for rank in range(3)]
    weight = whole_numbers(5, 4, 9)
    comm: Any = Gathers(shards, 1)
    other, alone = Stream(), ["gemm", "arrival", "gemm", "gemm"]
    for stream, behind in (
        (current, []),
        (other, ["arrival"]),
        (other, []),
        (current, ["arrival"]),
    ):
        with torch.cuda.stream(stream):
            all_gather_matmul(comm, shards[1], weight, lane=2)
        assert stream.did == [*behind, *alone]
        stream.did.clear()


class Exchanges:
    """Rank 1 of 3. Products of the others are in their slots once a stream has waited for them."""

    ranks, local_ranks = 3, (1,)

    def __init__(self, current: Stream, products: list[list[Any]]) -> None:
        self.current, self.products = current, products  # by chunk: sent to 0 and 2, from both
        self.exchanged = 0

    def empty(self, count: int, dtype: str) -> Any:
        return torch.full((count,), 255, dtype=getattr(torch, dtype))

    def all_to_all_v(self, came: Any, sent: Any, counts: list[list[int]], *, lane: int) -> None:
        assert lane == 2
        most = came.numel() // 2
        assert counts == [[0, most, most], [most, 0, most], [most, most, 0]]
        # Behind the GEMMs of what is sent, and in front of all others.
        assert Stream.here.did[-1] == ("behind", self.current)
        assert self.current.did == ["gemm"] * 2 * (self.exchanged + 1)
        wanted, arrives = self.products[self.exchanged]
        self.exchanged += 1
        assert torch.equal(sent, wanted.flatten())
        Stream.here.did.append(lambda: came.copy_(arrives.flatten()))


@pytest.mark.parametrize("chunks", [1, 2, 6])
def test_products_are_copied_in_a_stream_beside_the_gemms(current: Stream, chunks: int) -> None:
    inputs = [whole_numbers(18, 5, rank) for rank in range(3)]
    weight = whole_numbers(5, 4, 9)
    parts = [torch.mm(one, weight).view(3, chunks, -1, 4) for one in inputs]
    current.did.clear()
    exchanged = [
        (
            torch.stack([parts[1][0, chunk], parts[1][2, chunk]]),
            torch.stack([parts[0][1, chunk], parts[2][1, chunk]]),
        )
        for chunk in range(chunks)
    ]
    comm: Any = Exchanges(current, exchanged)
    out = matmul_reduce_scatter(comm, inputs[1], weight, chunks=chunks, lane=2)
    assert torch.equal(out.view(-1), sum(one[1] for one in parts).flatten())
    assert Stream.here is current
    assert comm.exchanged == chunks
    assert current.did == ["gemm"] * 3 * chunks + ["arrival"] * chunks


def test_weights_that_want_gradients_get_none() -> None:
    def work(comm: offcore.Communicator, rank: int) -> None:
        weight = torch.nn.Parameter(whole_numbers(4, 3, 1))
        for call in (all_gather_matmul, matmul_reduce_scatter):
            assert not call(comm, whole_numbers(6, 4, rank), weight).requires_grad

    as_ranks(2, work)
