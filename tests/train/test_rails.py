"""How calls that span hosts use a rail on GPUs: stand-ins note what they are asked."""

from typing import Any

import pytest

import needs

needs.require("torch")
import torch  # noqa: E402

import offcore.distributed.hosts as spanning  # noqa: E402
from offcore.distributed.hosts import Hosts, Place  # noqa: E402


class Ended:
    def done(self) -> bool:
        return True

    def wait(self, timeout: float) -> str:
        return "result"


class Inside:
    timeout = 60.0

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: Ended()


class Work:
    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


class Rail:
    def __init__(self, work: Work | None) -> None:
        self.work = work
        self.told: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> Work | None:
            self.told.append(given[-1])
            return self.work

        return call


CALLS = {
    "all_gather": lambda hosts, whole, part: hosts.all_gather(whole, part),
    "reduce_scatter": lambda hosts, whole, part: hosts.reduce_scatter(part, whole, "sum"),
    "all_reduce": lambda hosts, whole, _: hosts.all_reduce(whole, op="sum"),
    "all_to_all": lambda hosts, whole, _: hosts.all_to_all(whole.clone(), whole),
    "broadcast": lambda hosts, whole, _: hosts.broadcast(whole, root=0),
    "gather": lambda hosts, whole, part: hosts.gather(whole, part, root=0),
    "scatter": lambda hosts, whole, part: hosts.scatter(part, whole, root=0),
    "reduce": lambda hosts, whole, _: hosts.reduce(whole.clone(), whole, "sum", root=0),
}


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("work", [None, Work()], ids=["none", "work"])
def test_rails_of_gpus_take_the_current_stream(op: str, work: Work | None) -> None:
    """NCCL then makes no stream wait for another one, and has no work for it."""
    rail = Rail(work)
    hosts = Hosts(Inside(), rail, Place(0, 2, 0, 2), on_gpu=True)
    hosts.timeout = 60.0
    whole = torch.zeros(64)
    call = CALLS[op](hosts, whole, whole[:16].clone())
    assert call.done()
    (opts,) = rail.told
    assert opts.asyncOp is False
    assert work is None or work.waits == 1
    if work is not None:
        work.waits = 0


def test_a_rail_that_does_not_open_closes_what_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    inside = type("Inside", (), {"close": lambda _: closed.append(True)})()
    monkeypatch.setattr(spanning, "open_communicator", lambda *_: inside)
    monkeypatch.setattr(spanning.dist, "ProcessGroupGloo", lambda *_, **__: 1 // 0)
    store = torch.distributed.HashStore()
    with pytest.raises(ZeroDivisionError):
        spanning.open_ends(store, [[0], [1]], 0, 1.0, torch.device("cpu"), {})
    assert closed == [True]
