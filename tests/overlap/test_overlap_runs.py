"""Plans carried out: in threads, and on streams of a torch that records what is asked of it."""

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

import offcore
from offcore import overlap
from offcore.overlap import Collective, Place, Plan, run, sms

TABLES = overlap.load("mi300x-8")
PRODUCT = overlap.gemm(8192, 8192, 8192, memory_bytes=1e9)
GATHER = Collective("all_gather", 896 << 20, 8)


class Later:
    """A handle."""

    ended = False

    def wait(self) -> None:
        self.ended = True


def test_threads_wait_for_handles_and_tell_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for strategy in Plan([PRODUCT, GATHER], TABLES).choices:
        plan = Plan([PRODUCT, GATHER], TABLES, allowed=[strategy])
        places: dict[str, Place] = {}
        handle = Later()

        def gather(place: Place, places: Any = places, handle: Any = handle) -> Later:
            places["gather"] = place
            return handle

        plan.run({PRODUCT.name: lambda at, p=places: p.update(g=at), GATHER.name: gather})
        assert handle.ended
        assert places["gather"].engines == (strategy.startswith("ConCCL"))
        assert places["g"] == Place(False, plan.cores.get(PRODUCT.name))
    with pytest.raises(offcore.Error, match=r"missing .*, extra ") as caught:
        plan.run({GATHER.name: gather, "another": gather})
    assert caught.value.code == "invalid"

    def broken(_: Place) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        plan.run({PRODUCT.name: broken, GATHER.name: gather})


class Recorder:
    """Of torch what a plan uses. Streams are named by their priority."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.now = self.Stream(0, name="caller")
        self.cuda = self
        self.device = types.SimpleNamespace(index=0)

    def Stream(self, device: int, priority: int = 0, name: str = "") -> Any:  # noqa: N802
        made = types.SimpleNamespace(
            name=name or f"stream {priority}", device=types.SimpleNamespace(index=device)
        )
        made.wait_stream = lambda other: self.told.append((made.name, "behind", other.name))
        return made

    def is_available(self) -> bool:
        return True

    def current_stream(self) -> Any:
        return self.now

    def current_blas_handle(self) -> int:
        return 1

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


def test_on_streams_in_order_with_sms_kept_from_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Recorder()
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    monkeypatch.setattr(run, "_streams", {})
    targets: list[int] = []
    monkeypatch.setattr(sms, "_target", lambda: lambda _, count: targets.append(count.value) or 0)
    calls = {
        PRODUCT.name: lambda at: torch.told.append((torch.now.name, "gemm")),
        GATHER.name: lambda at: torch.told.append((torch.now.name, "gather")),
    }
    plan = Plan([PRODUCT, GATHER], TABLES, allowed=["sp_rp"])
    plan.run(calls)
    assert torch.told == [
        ("stream -1", "behind", "caller"),
        ("stream -1", "gather"),
        ("stream 0", "behind", "caller"),
        ("stream 0", "gemm"),
        ("caller", "behind", "stream -1"),
        ("caller", "behind", "stream 0"),
    ]
    assert targets == [plan.cores[PRODUCT.name], 0]
    torch.told.clear()
    Plan([PRODUCT, GATHER], TABLES, allowed=["serial"]).run(calls)
    assert [one[0] for one in torch.told] == ["caller", "caller"]
    monkeypatch.setattr(sms, "_target", lambda: lambda *_: 7)
    with pytest.raises(offcore.Error, match="returned status 7"):
        plan.run(calls)


def test_chunks_in_front_of_a_gemm() -> None:
    """None where the GEMM hides the gather; more, the longer the gather is beside it."""
    assert overlap.chunks_of(PRODUCT, Collective("all_gather", 16 << 20, 8), TABLES) == 1
    long = Collective("all_gather", 4 << 30, 8)
    assert overlap.chunks_of(PRODUCT, long, TABLES) > 1
    with pytest.raises(offcore.Error) as caught:
        overlap.chunks_of(PRODUCT, Collective("all_reduce", 1 << 30, 8), TABLES)
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize(("machine", "ranks"), [("h200-2", 2), ("mi300x-8", 8)])
def test_each_chunk_adds_the_time_of_a_small_gather(machine: str, ranks: int) -> None:
    """Also where engines are faster than the share of the peak that a roofline is taken at."""
    tables = overlap.load(machine)
    for power in range(10, 37):
        gather = Collective("all_gather", 1 << power, ranks)
        assert overlap.chunks_of(overlap.gemm(64, 64, 64), gather, tables) == 1
    chosen: set[int] = set()
    for rows in (1024, 8192, 65536):
        product = overlap.gemm(rows, 8192, 8192)
        gathers = [Collective("all_gather", 1 << power, ranks) for power in range(16, 37)]
        found = [overlap.chunks_of(product, gather, tables) for gather in gathers]
        assert found == sorted(found)
        chosen |= set(found)
    assert chosen == {1, 2, 4, 8}  # as docs/overlap.md says
