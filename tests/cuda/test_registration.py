"""Tensors that others allocated, registered, on the stand-in driver: every byte checked. A process
for each test, since a driver is set up once."""

import textwrap
from typing import Any

import pytest
from test_capture import PATHS, RANK
from test_cuda import finish, run, start

from stores import free_store

BEGIN = f"""
sys.path[:0] = {PATHS!r}
from graphs import THREAD_LOCAL, Gpus, Streamed
from foreign import *
"""
NBYTES = 3 << 20  # over two allocations and into a third


def alone(text: str, *args: str, **env: str) -> str:
    return run(BEGIN + textwrap.dedent(text), *args, **env)


def together(text: str, ranks: int, codes: Any = None, **env: str) -> bool:
    """A process a rank; whether they ended as they should."""
    store = free_store()
    body = BEGIN + RANK + textwrap.dedent(text)
    group = [start(body, store, str(rank), str(ranks), **env) for rank in range(ranks)]
    return finish(group, codes or dict.fromkeys(range(ranks), 0))


def test_all_forms_in_one_process() -> None:
    """VMM memory whose allocations differ from rank to rank lies at a constant stride where it
    begins at one place of a granule. Other such memory, and cuMemAlloc's, has none."""
    text = f"""
    ranks, nbytes = 3, {NBYTES}
    forms = {{
        "vmm": [vmm(0, nbytes, 700), vmm(1, nbytes, 2 * MIB + 700), vmm(2, nbytes, 700, (6, 2))],
        "vmm, skewed": [vmm(rank, nbytes, 512 * rank) for rank in range(ranks)],
        "plain": [plain(rank, nbytes, 100 * rank) for rank in range(ranks)],
        "mixed": [plain(0, nbytes, 9), vmm(1, nbytes), vmm(2, nbytes, 64)],
    }}
    comm = opened(ranks)
    for form, tensors in forms.items():
        with comm.register(tensors):
            for part, first in ((1, 0), (1000, 2 * MIB - 1500), (300 << 10, 11)):
                strided = form == "vmm"
                work = Exchange(comm, tensors, part)
                results = work.everything(first)
                told = [(one.op, one.variant, one.native) for one in results]
                fans = [native for _, variant, native in told if variant in ("fan", "bcst")]
                assert fans and all(native == strided for native in fans), (form, told)
                assert results[0].native and results[1].native, (form, told)
            # Reductions have no parked form, others are parked where that can be undone.
            kept = []
            for turn in range(3):
                kept.append(work.all_gather(first, True, variant="prelaunch_pcpy"))
            assert kept[2].armed_ahead == strided, (form, kept)
        after = work.all_gather(first, True)
        assert (after.staged, after.registered) == (True, False), form
    comm.close()
    """
    assert alone(text) == ""


@pytest.mark.parametrize("form", ["vmm", "plain"])
def test_ranks_as_processes(form: str) -> None:
    """And nothing is left of a registration, here or at a peer."""
    text = f"""
    form = {{form!r}}
    comm, gpus = joined()
    make = vmm if form == "vmm" else plain
    tensor = make(rank, {NBYTES}, 2 * MIB - 4096)
    before = live()
    for turn in range(2):
        with comm.register(tensor):
            work = Exchange(comm, [tensor], 77 << 10)
            results = work.everything(3000)
            assert all(one.native for one in results) == (form == "vmm"), results
            # Into a graph, which keeps what it needs.
            with gpus.graph(comm.given, THREAD_LOCAL) as graph:
                recorded = work.start_gather(0, True).wait()
            assert (recorded.registered, recorded.mode) == (True, "capture")
            for _ in range(3):
                work.fill_gather(0, True)
                graph.replay()
                assert gpus.settle(comm.given)
                work.check_gather(0)
        work.fill_gather(0, True)
        graph.replay()
        assert gpus.settle(comm.given)
        work.check_gather(0)
        graph.destroy()
        comm.barrier()
        assert comm.all_gather(tensor.part(0, 3000)).wait().staged
    comm.barrier()
    left = {{kind: live()[kind] - before[kind] for kind in ("reservations", "registrations")}}
    assert left["registrations"] <= 1, left
    comm.close()
    """
    text = text.replace("{form!r}", repr(form))
    assert together(text, 3)


def test_what_cannot_be_registered() -> None:
    """Each refusal says why and what to do, on all ranks; the communicator works on."""
    text = """
    comm, gpus = joined()
    good = vmm(rank, MIB)
    work = Exchange(comm, [good], 5000)
    pinned = comm.host_array(MIB)
    private = vmm(rank, MIB, types=0)
    hole = vmm(rank, 8 * MIB)
    driver("cuMemUnmap", hole.address + 2 * MIB, 4 * MIB)
    gone = plain(rank, 6 * MIB)
    driver("cuMemFree", gone.address)
    wrong = {
        "unsupported managed": managed(rank, MIB),
        "unsupported cudaMallocAsync": pooled(rank, MIB),
        "unsupported pinned": pinned,
        "unsupported ordinary host": np.zeros(MIB, np.uint8),
        "unsupported POSIX": private,
        "unsupported ordinary": gone,
        "invalid leaves its memory": hole,
        "invalid leaves its memory by": plain(rank, 2 * MIB).part(5, 2 * MIB),
        "invalid no bytes": good.part(0, 0),
        "invalid NoneType": None,
        "invalid tensor for each": comm.window(64),
        "invalid contiguous": np.zeros((4, 4), np.uint8)[:, 1],
    }
    for number, (expected, tensor) in enumerate(wrong.items()):
        kind, _, words = expected.partition(" ")
        alike = number % 2 == 0  # all ranks, or the last one alone
        given = tensor if alike or rank == ranks - 1 else good
        found, told = code_of(lambda: comm.register(given))
        assert found == kind, (expected, found, told)
        assert words in told or (words == "NoneType" and "tensor for each" in told), told
        assert "rank" in told
        if found == "unsupported" and words != "POSIX":
            assert "expandable_segments" in told and "memory_pool" in told, told
    found, told = code_of(lambda: comm.register(good.part(0, 4096 + rank)))
    assert found == "mismatch" and "4096" in told and "4097" in told, told
    with comm.register(good):
        work.everything(0)
    comm.close()
    found, told = code_of(lambda: comm.register(good))
    assert found == "invalid" and "closed" in told, told
    """
    assert together(text, 2)


def test_a_driver_that_fails_in_the_middle() -> None:
    """Whatever fails on one rank, all raise, nothing is left, and the next time works."""
    text = """
    comm, gpus = joined()
    make = vmm if os.environ["FORM"] == "vmm" else plain
    tensor = make(rank, 3 * MIB)
    before = live()
    found, told = code_of(lambda: comm.register(tensor))
    assert found in ("memory", "driver") and "rank 1" in told, (found, told)
    assert live() == before, (before, live())
    with comm.register(tensor):
        Exchange(comm, [tensor], 5000).everything(0)
    comm.close()
    """

    def group_of(text: str, **env: str) -> list[Any]:
        store, body = free_store(), BEGIN + RANK + textwrap.dedent(text)
        fault = {"OFFCORE_FAKE_CUDA_FAIL": env.pop("FAULT", "")}
        told = [env, env | fault]
        return [start(body, store, str(rank), "2", **told[rank]) for rank in range(2)]

    imports = "cuMemImportFromShareableHandle"
    group = group_of(f"joined(); print(calls({imports!r}))")
    before = int(group[1].communicate(timeout=40)[0])
    assert group[0].wait(40) == 0
    for form, fault in (("vmm", f"{imports}:{before + 2}"), ("plain", "cuIpcOpenMemHandle:1")):
        assert finish(group_of(text, FORM=form, FAULT=fault), {0: 0, 1: 0})


def test_other_memory_at_the_same_address() -> None:
    """A registered address is not believed once its owner has other memory there: neither by calls
    nor by the next registration."""
    text = """
    ranks = 2
    comm = opened(ranks)
    own = [vmm(rank, 4 * MIB, pieces=(2, 2)) for rank in range(ranks)]
    first = comm.register(own)
    work = Exchange(comm, own, 4000)
    work.everything(0)
    for gpu, tensor in enumerate(own):
        handle = driver.create(2 * MIB, gpu)
        driver("cuMemUnmap", tensor.address, 2 * MIB)
        driver("cuMemMap", tensor.address, 2 * MIB, 0, handle, 0)
        driver("cuMemRelease", handle)
        assert driver.set_access(tensor.address, 2 * MIB, [gpu]) == 0
    again = work.all_gather(0, True)
    assert (again.staged, again.registered) == (True, False)
    assert work.all_gather(2 * MIB, True).registered  # the other allocation is the same
    allocations = live()["allocations"]
    second = comm.register(own)
    assert live()["allocations"] == allocations  # those that are there are held, not copied
    work.everything(0)
    first.close()
    work.everything(2 * MIB)
    second.close()
    assert work.all_gather(2 * MIB, True).staged

    own = [plain(rank, 4 * MIB) for rank in range(ranks)]
    work = Exchange(comm, own, 4000)
    with comm.register(own):
        work.everything(0)
        for tensor in own:
            driver.start(tensor.gpu)
            driver("cuMemFree", tensor.address)
            assert plain(tensor.gpu, 4 * MIB).address == tensor.address
        assert work.all_gather(0, True).staged
        with comm.register(own):
            work.everything(0)
    comm.close()
    """
    assert alone(text) == ""


def test_registrations_are_counted() -> None:
    text = """
    ranks = 2
    comm = opened(ranks)
    own = [vmm(rank, 4 * MIB, 100) for rank in range(ranks)]
    work = Exchange(comm, own, 4000)
    first = comm.register(own)
    before = live()
    windows = comm._core.kept[1]
    again = comm.register(own)
    found, told = code_of(lambda: comm.register([tensor.part(9, 0) for tensor in own]))
    assert found == "invalid" and "no bytes" in told, told
    part = comm.register([tensor.part(5, MIB) for tensor in own])  # lies in it
    assert (live(), comm._core.kept[1]) == (before, windows)
    apart = comm.register([tensor.part(5 + rank, MIB) for rank, tensor in enumerate(own)])
    assert comm._core.kept[1] == windows + 1  # elsewhere on each rank: a window of its own
    apart.close()
    for one in (first, first, again):  # a second close is none
        one.close()
        assert work.all_gather(0, True).registered
    part.close()
    assert work.all_gather(0, True).staged
    assert comm._core.kept[1] == windows - 1
    # Beyond what is registered, and where two of them overlap.
    halves = [comm.register([t.part(at, 2 * MIB) for t in own]) for at in (0, MIB)]
    assert work.all_gather(0, True).registered
    assert work.all_gather(MIB + 5, True).registered
    assert work.all_gather(2 * MIB + 5, True).registered
    assert work.all_gather(3 * MIB - 100, True).staged
    halves[0].close()
    assert work.all_gather(MIB + 5, True).registered
    assert work.all_gather(0, True).staged
    # What is registered is kept, until the communicator is closed; handles do not matter.
    class Kept(Tensor):
        pass
    kept = [Kept(t.gpu, t.address, t.nbytes) for t in own]
    seen = weakref.ref(kept[0])
    comm.register(kept)
    del kept
    assert seen() is not None
    comm.close()
    halves[1].close()
    for _ in range(100):
        if seen() is None:
            break
        time.sleep(0.01)
    assert seen() is None
    """
    assert alone(text) == ""


def test_closed_while_operations_are_under_way() -> None:
    text = """
    ranks = 2
    comm = opened(ranks)
    for turn in range(12):
        make = vmm if turn % 2 else plain
        own = [make(rank, 4 * MIB) for rank in range(ranks)]
        registration = comm.register(own)
        work = Exchange(comm, own, MIB + 5)
        work.fill_gather(7, True)
        handle = work.start_gather(7, True, protocol="promise")
        registration.close()
        if turn % 4 >= 2:  # the owner lets go as well: the memory stays until the end
            handle.wait()
        result = handle.wait()
        assert result.registered
        work.check_gather(7)
        for tensor in own:
            if make is plain:
                driver.start(tensor.gpu)
                driver("cuMemFree", tensor.address)
    comm.close()
    del comm, handle, work, registration, result
    assert live()["registrations"] == 0
    """
    assert alone(text) == ""


def test_one_rank_closes_alone() -> None:
    """The next call is told apart, and nothing is written."""
    text = """
    comm, gpus = joined()
    tensor = vmm(rank, MIB)
    registration = comm.register(tensor)
    work = Exchange(comm, [tensor], 5000)
    work.all_gather(0, True)
    if rank == 0:
        registration.close()
    tensor.put(np.full(MIB, 7))
    comm.barrier()
    again = lambda: comm.all_gather(tensor.part(0, 2 * 5000), protocol="barrier")
    found, told = code_of(lambda: again().wait())
    assert found in ("mismatch", "peer"), (found, told)
    registration.close()  # also of a dead communicator
    comm.close()
    """
    assert together(text, 2)


def test_a_peer_that_dies_meanwhile() -> None:
    text = """
    comm, gpus = joined()
    tensor = plain(rank, MIB)
    registration = comm.register(tensor)
    Exchange(comm, [tensor], 5000).everything(0)
    if rank == 1:
        os._exit(3)
    found, told = code_of(lambda: comm.register(tensor.part(0, 100)))
    assert found == "peer", (found, told)
    registration.close()
    comm.close()
    """
    assert together(text, 2, {0: 0, 1: 3})


def test_ranks_as_threads_of_one_process() -> None:
    """IPC opens nothing of its own process: such ranks use the address that they all have."""
    text = """
    ranks, errors = 2, []

    def main(rank, store):
        try:
            comm = Streamed(backend="cuda", store=store, rank=rank, world_size=ranks, device=rank,
                            timeout=20)
            comm.given = Gpus([rank]).streams()
            for make in (plain, vmm):
                tensor = make(rank, MIB)
                with comm.register(tensor):
                    Exchange(comm, [tensor], 5000).everything(0)
            comm.close()
        except BaseException as error:
            errors.append(f"rank {rank}: {error!r}")

    threads = [threading.Thread(target=main, args=(rank, sys.argv[1])) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    """
    assert alone(text, free_store()) == ""


def test_after_a_fork() -> None:
    text = """
    comm = opened(2)
    own = [plain(rank, MIB) for rank in range(2)]
    registration = comm.register(own)
    child = os.fork()
    if child == 0:
        registration.close()  # does nothing
        found, told = code_of(lambda: comm.register(own))
        os._exit(0 if found == "invalid" else 1)
    assert os.waitpid(child, 0)[1] == 0
    Exchange(comm, own, 5000).everything(0)
    registration.close()
    """
    assert alone(text) == ""
