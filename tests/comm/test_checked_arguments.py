"""Arguments that only the interpreter or numpy used to refuse."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import offcore
from offcore import kv, mcast
from stores import as_ranks

Comm = offcore.Communicator
PLACE = "127.0.0.1:1"
NO_TIME = [math.nan, -1, -0.5]


def refusal(work: Callable[[], Any]) -> str:
    with pytest.raises(offcore.Error) as failed:
        work()
    assert failed.value.code == "invalid"
    return str(failed.value)


@pytest.mark.parametrize("shape", [-1, (2, -1), "a", (2, "b"), 1.5, None, (1 << 40, 1 << 40)])
def test_shapes(shape: Any) -> None:
    with Comm(backend="host", ranks=2) as comm:
        assert "empty: " in refusal(lambda: comm.empty(shape))
        assert "host_array: " in refusal(lambda: comm.host_array(shape))
        assert "next_input: " in refusal(lambda: comm.next_input(shape))


@pytest.mark.parametrize("dtype", ["U", "S", "V", "foo", object, {"a": 1}, [("a", "O")]])
def test_dtypes_without_a_size(dtype: Any) -> None:
    with Comm(backend="host", ranks=2) as comm:
        assert "dtype" in refusal(lambda: comm.empty(4, dtype))
        assert "dtype" in refusal(lambda: comm.host_array(4, dtype))
        assert "dtype" in refusal(lambda: comm.next_input(4, dtype))
        assert comm._core.kept[1] == 0  # no window was made


def test_a_refused_dtype_is_no_part_of_the_order_of_windows() -> None:
    def work(comm: Comm, rank: int) -> None:
        if rank == 0:
            assert "dtype" in refusal(lambda: comm.empty(4, "U"))
        out = comm.empty(2)
        comm.all_gather(out, np.full(1, rank, np.uint8)).wait()
        assert out.tolist() == [0, 1]

    as_ranks(2, work)


@pytest.mark.parametrize("seed", [-1, 1 << 64, "a", 1.5])
def test_seeds(seed: Any) -> None:
    assert "seed" in refusal(lambda: Comm(backend="sim", ranks=2, seed=seed))


@pytest.mark.parametrize(
    "faults", [[{}], [{"kind": "lost_signal", "rank": -1}], [3], [{"kind": 5}], 5, [{"x": 1}]]
)
def test_faults(faults: Any) -> None:
    assert "kind" in refusal(lambda: Comm(backend="sim", ranks=2, faults=faults))


@pytest.mark.parametrize("timeout", NO_TIME)
def test_timeouts_of_a_communicator(timeout: float) -> None:
    assert "timeout" in refusal(lambda: Comm(backend="host", ranks=2, timeout=timeout))
    assert "timeout" in refusal(
        lambda: mcast.Communicator(PLACE, rank=0, world_size=1, timeout=timeout)
    )
    with Comm(backend="host", ranks=2) as comm:
        assert "timeout" in refusal(lambda: comm.barrier(timeout))
        handle = comm.all_gather(comm.empty(4))
        assert "timeout" in refusal(lambda: handle.wait(timeout))
        assert handle.wait().bytes == 4


@pytest.mark.parametrize("timeout", NO_TIME)
def test_timeouts_of_batches_and_transfers(timeout: float) -> None:
    src, dst = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    assert "timeout" in refusal(
        lambda: offcore.batch_copy([dst], [src], backend="host", timeout=timeout)
    )
    assert not dst.any()
    assert "timeout" in refusal(lambda: kv.HostPool(64, 2, backend="host", timeout=timeout))
    with kv.HostPool(64, 2, backend="host") as pool:
        assert "timeout" in refusal(lambda: pool.wait_ready(timeout))
        assert "timeout" in refusal(lambda: pool.allocate(1, timeout=timeout))
        pool.wait_ready()
        assert pool.free_blocks == 2


@pytest.mark.parametrize("value", ["abc", "nan", "-3"])
def test_timeouts_of_the_environment(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFCORE_TIMEOUT_S", value)
    assert "OFFCORE_TIMEOUT_S" in refusal(lambda: Comm(backend="host", ranks=2))
    assert "OFFCORE_TIMEOUT_S" in refusal(lambda: kv.HostPool(64, 2, backend="host"))
    assert "OFFCORE_TIMEOUT_S" in refusal(lambda: mcast.Communicator(PLACE, rank=0, world_size=1))
    dst, src = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
    assert "OFFCORE_TIMEOUT_S" in refusal(lambda: offcore.batch_copy([dst], [src], backend="host"))


@pytest.mark.parametrize("dtype", [object, [("a", "O"), ("b", "u1")]])
def test_a_cache_of_objects(dtype: Any) -> None:
    assert "Python objects" in refusal(lambda: kv.Layout(np.empty((4, 8), dtype)))
