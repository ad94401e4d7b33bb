"""Ends of batches on the stand-in driver: what they let go of, and what fails with them."""

from test_batch_copy import PRELUDE
from test_cuda import run

STUCK = """
    class Row:
        def __init__(self, at, n=64):
            self.__cuda_array_interface__ = dict(
                data=(at, False), shape=(n,), strides=None, typestr="|u1", version=3)
    import gc, weakref
    memory, timer = Memory(), offcore._core.GpuTimer(0)
    other = memory.gpus.streams()[0]
    entries = scattered(20, 64, room=1 << 15)
"""


def test_batches_let_go_of_their_tensors() -> None:
    """Nobody waits for them: the next call finds which have ended, behind one that has not too."""
    code = """
    timer.shut()
    stuck = memory.copy(entries[:1], stream=timer.stream)
    kept = []
    for turn in range(5):
        row = Row(memory.at(0, 64 * turn))
        kept.append(weakref.ref(row))
        batch_copy([row], [memory.host[:64]], stream=other)
        del row
    assert memory.gpus.settle([other])
    batch_copy([Row(memory.at(0, 640))], [memory.host[:64]], stream=other).wait()
    memory.copy(entries[:1], stream=other).wait()
    gc.collect()
    assert [ref() for ref in kept] == [None] * 5
    assert not stuck.done()
    timer.open()
    stuck.wait()
    """
    assert run(STUCK + code, prelude=PRELUDE) == ""


def test_a_batch_that_fails_fails_alone() -> None:
    code = """
    timer.shut()
    before = memory.fill(1)
    stuck = memory.copy(entries, stream=timer.stream)
    half = memory.room // 2
    behind = [((-1, to + half), (0, at + half), n)
              for (_, to), (_, at), n in scattered(200, 64, seed=2, room=half)]
    code, told = code_of(lambda: memory.copy(behind, stream=other))
    assert code == "memory" and "cuMemcpyBatchAsync" in told, (code, told)
    assert not stuck.done()
    timer.open()
    stuck.wait()
    memory.gpus.driver("cuCtxSynchronize")  # the other one's copies that had been enqueued, too
    assert (memory.look()[0] == after(before, entries)[0]).all()
    memory.copy(behind, stream=other).wait()
    memory.copy(entries, stream=timer.stream).wait()
    assert same(memory.look(), after(after(before, entries), behind))
    """
    failing = {"OFFCORE_FAKE_CUDA_FAIL": "cuMemcpyBatchAsync:3"}
    assert run(STUCK + code, prelude=PRELUDE, **failing) == ""


def test_a_batch_of_two_gpus_that_fails() -> None:
    """What it left of its lane's words is no later batch's."""
    code = """
    memory = Memory(2)
    half = memory.room // 2
    entries = [((r, to + half), (1 - r, at), n) for r in (0, 1)
               for (_, to), (_, at), n in scattered(9, 64, room=half, seed=r)]
    def settle():  # what had been enqueued of a call that failed goes on
        for context in memory.gpus.contexts:
            memory.gpus.driver("cuCtxSetCurrent", context)
            memory.gpus.driver("cuCtxSynchronize")
    for turn in range(6):
        before = memory.fill(turn)
        code, told = code_of(lambda: memory.copy(entries).wait())
        if turn == 1:
            assert (code, "cuMemcpyBatchAsync" in told) == ("memory", True), (code, told)
            settle()
        else:
            assert code == "", (turn, told)
            assert same(memory.look(), after(before, entries)), turn
    """
    failing = {"OFFCORE_FAKE_CUDA_FAIL": "cuMemcpyBatchAsync:4"}
    assert run(code, prelude=PRELUDE, **failing) == ""
