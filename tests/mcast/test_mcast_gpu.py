"""Multicast of arrays on GPUs, on the stand-in driver: ranks are threads, all on one GPU."""

import threading
import types
from pathlib import Path
from typing import Any

import pytest
from test_cuda import run

from offcore.errors import Error, error
from offcore.mcast import gpu

TESTS = Path(__file__).parents[1]

WORLD = f"""
sys.path += [{str(TESTS)!r}, {str(TESTS / "fakes")!r}, {str(TESTS / "mcast")!r}]
import random
from cuda_driver import Driver
from crews import at_once
from offcore.mcast import gpu
from stores import free_store
driver = Driver(os.environ["OFFCORE_LIBCUDA"])
driver.start(0)
RANKS, PIECE = 3, 4096

class Array:
    \"\"\"On the GPU, with other bytes around it that nobody may touch.\"\"\"

    def __init__(self, given):
        self.shape, self.dtype, self.nbytes = given.shape, given.dtype, given.nbytes
        self.base = driver.memory((given.nbytes + (4 << 20) - 1) >> 21 << 21)
        self.at = self.base + 1024
        driver.put(self.base, bytes([77]) * (given.nbytes + 2048))
        driver.put(self.at, given.tobytes())
        self.__cuda_array_interface__ = dict(data=(self.at, False), shape=given.shape,
            strides=None, typestr=given.dtype.str, version=3)

    def read(self):
        told = driver.read(self.base, self.nbytes + 2048)
        assert told[:1024] == told[-1024:] == bytes([77]) * 1024
        return np.frombuffer(told[1024:-1024], self.dtype).reshape(self.shape)

def on_ranks(body, **options):
    address = free_store()
    def one(rank):
        driver.start(0)  # its context is this thread's too
        with gpu.Communicator(address, rank=rank, world_size=RANKS, interface="lo", timeout=20.0,
                              piece_bytes=PIECE, receive_workers=0, send_workers=0) as comm:
            return body(comm, rank)
    results = at_once([lambda rank=rank: one(rank) for rank in range(RANKS)])
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results

def drawn(seed, count, dtype):
    return np.random.default_rng(seed).integers(0, 100, count).astype(dtype)
"""


def test_every_byte_arrives() -> None:
    code = """
    def body(comm, rank):
        for turn, size in enumerate([0, 1, 1281, 9000]):
            whole = np.concatenate([drawn(9 * turn + r, size, np.uint8) for r in range(RANKS)])
            own = whole[rank * size : (rank + 1) * size]
            out, place = Array(np.zeros_like(whole)), Array(np.zeros_like(whole))
            driver.put(place.at + rank * size, own.tobytes())
            parts = [drawn(turn + r, size * r // 2, np.float32) for r in range(RANKS)]
            uneven = Array(np.zeros(sum(map(len, parts)), np.float32))
            root = turn % RANKS
            told = Array(whole if rank == root else np.zeros_like(whole))
            rows = [drawn(50 * turn + r, size * RANKS, np.float32) for r in range(RANKS)]
            sums = Array(np.zeros(size, np.float32))
            handles = [
                comm.all_gather(out, Array(own)),
                comm.all_gather(place),
                comm.all_gather_v(uneven, Array(parts[rank]), [len(one) for one in parts]),
                comm.reduce_scatter(sums, Array(rows[rank])),
                comm.broadcast(told, root),
                comm.barrier(),
            ]
            results = [handle.wait() for handle in handles]
            assert all(handle.done() for handle in handles)
            for one in (out, place, told):
                assert (one.read() == whole).all()
            assert (uneven.read() == np.concatenate(parts)).all()
            assert (sums.read() == sum(rows)[rank * size : (rank + 1) * size]).all()
            assert [one.bytes for one in results[:2]] == [whole.size] * 2
            assert (results[0].path == "none") == (size == 0)
        bits = [np.full(300 * RANKS, value, np.uint16) for value in (0x3F80, 0x4000, 0x4040)]
        half = Array(np.zeros(300, np.uint16))
        comm.reduce_scatter(half, Array(bits[rank]), dtype="bfloat16").wait()
        assert (half.read() == 0x40C0).all()  # 1 + 2 + 3
        return comm.counters["operations"]
    assert min(on_ranks(body)) > 60
    """
    assert run(code, prelude=WORLD) == ""


def test_refusals_leave_it_usable() -> None:
    code = """
    def body(comm, rank):
        small, large = Array(np.zeros(5, np.uint8)), Array(np.zeros(16, np.uint8))
        whole, elsewhere = Array(np.zeros(24, np.uint8)), Array(np.zeros(8, np.uint8))
        elsewhere.__cuda_array_interface__["data"] = (whole.at + (12, 0, 4)[rank], False)
        for call, words in [
            (lambda: comm.all_gather(large, small), "out has 16 bytes, inp 5"),
            (lambda: comm.all_gather_v(large, small, [5, 5, 5]), "out has 16 bytes"),
            (lambda: comm.reduce_scatter(small, large), "out has 5 bytes, inp 16"),
            (lambda: comm.broadcast(small, RANKS), "root"),
            (lambda: comm.all_gather(large, np.zeros(5, np.uint8)), "host memory"),
            (lambda: comm.all_gather(whole, Array(np.zeros(4, np.float16))), "inp float16"),
            (lambda: comm.all_gather(whole, elsewhere), "overlaps"),
            (lambda: comm.reduce_scatter(elsewhere, whole), "overlaps"),
            (lambda: comm.reduce_scatter(Array(np.zeros(8, np.uint8)), whole, "mul"), "mul"),
            (lambda: comm.reduce_scatter(Array(np.zeros(8, bool)), Array(np.zeros(24, bool))),
             "bool"),
        ]:
            code, told = code_of(call)
            assert code == "invalid" and words in told, told
        comm.barrier().wait()
        comm.close()
        code, told = code_of(comm.barrier)
        assert code == "cancelled" and "closed" in told, told
    on_ranks(body)
    code, told = code_of(lambda: gpu.Communicator(free_store(), rank=0, world_size=1,
                                                  interface="lo", piece_bytes=100))
    assert code == "invalid" and "piece_bytes" in told, told
    """
    assert run(code, prelude=WORLD) == ""


def test_a_rank_that_leaves_ends_the_others_calls() -> None:
    code = """
    def body(comm, rank):
        comm.barrier().wait()
        if rank == 0:
            return ""
        array = Array(np.zeros(1 << 20, np.uint8))
        first = code_of(comm.broadcast(array, 0).wait)[0]
        assert code_of(lambda: comm.barrier().wait())[0]
        return first
    told = on_ranks(body)
    assert told[0] == "" and set(told[1:]) <= {"peer", "cancelled"}, told
    """
    assert run(code, prelude=WORLD) == ""


def test_steps_of_neighbouring_pieces_run_beside_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    did: list[str] = []

    class Stream:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def wait_event(self, event: str) -> None:
            did.append(f"after {event}")

    class Step:
        def __init__(self, name: str) -> None:
            self.name = name
            did.append(name)

        def wait(self) -> None:
            did.append(f"{self.name} ended")

    lane: Any = object.__new__(gpu._Lane)
    lane._streams, lane._rows, lane._device = [None, None], [*range(4)], 0
    monkeypatch.setattr(gpu, "_cuda", lambda: types.SimpleNamespace(Stream=Stream))
    lane._copy = lambda entries, direction: Step(f"{'enter' if direction else 'leave'} {entries}")
    rows = []

    def cut(row: Any, at: int) -> Any:
        rows.append(row)
        return at, lambda: Step(f"cross {at}"), at

    lane.move(cut, range(6), "the caller's work")
    assert did[:2] == ["after the caller's work"] * 2  # both streams of copies
    assert rows == [0, 1, 2, 3, 0, 1]
    for piece in range(6):
        at = {name: did.index(f"{name} {piece}") for name in ("leave", "cross", "enter")}
        assert did.index(f"leave {piece} ended") < at["cross"]
        assert did.index(f"cross {piece} ended") < at["enter"]
        if piece < 5:  # the next one is on its way before this one has arrived
            assert did.index(f"leave {piece + 1}") < at["cross"]
            assert did.index(f"cross {piece + 1}") < did.index(f"cross {piece} ended")
        if piece < 2:  # the buffer is free
            assert did.index(f"enter {piece} ended") < did.index(f"leave {piece + 4}")


class Copy:
    """A copy that has failed, or has not ended."""

    def __init__(self, ended: bool) -> None:
        self.ended = ended

    def wait(self, timeout: float = 1.0) -> None:
        raise error("driver" if self.ended else "timeout", "no")

    def done(self) -> bool:
        return self.ended


@pytest.mark.parametrize("ended", [True, False])
def test_a_copy_that_fails_ends_the_group_and_keeps_what_it_may_write(
    ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []
    closed: list[bool] = []
    monkeypatch.setattr(gpu, "_held", held)
    monkeypatch.setattr(gpu, "_GRACE_S", 0.0)
    lane: Any = object.__new__(gpu._Lane)
    lane.failure, lane.settled, lane._rows = None, True, [*range(4)]
    lane._net = types.SimpleNamespace(close=lambda: closed.append(True))
    lane._copy = lambda entries, direction: Copy(ended)
    kept = object()
    handle = gpu.Handle("all_gather", 1.0, None, range(3), lambda *_: (1, None, 2), kept)
    handle.run(lane)
    with pytest.raises(Error) as told:
        handle.wait()
    assert lane.failure is told.value
    assert closed == [True]  # peers hear of it, and no later call meets their rest of this one
    assert [one[1] for one in held] == ([] if ended else [kept])

    comm: Any = object.__new__(gpu.Communicator)
    comm._net = types.SimpleNamespace(counters={}, ranks=2, rank=0)
    comm._device, comm._lock, comm._lanes = 0, threading.Lock(), {"gathers": lane}
    with pytest.raises(Error, match="dead since"):
        comm.barrier()


def test_a_capture_is_refused_before_anything_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = types.SimpleNamespace(is_current_stream_capturing=lambda: True)
    monkeypatch.setattr(gpu, "_cuda", lambda: cuda)
    comm: Any = object.__new__(gpu.Communicator)
    comm._net = types.SimpleNamespace(counters={})
    comm._device = 0
    with pytest.raises(Error) as told:
        comm.barrier()
    assert told.value.code == "unsupported"
