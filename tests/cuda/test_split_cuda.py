"""Groups of a communicator's ranks on the stand-in driver: each rank keeps its GPU, and the groups
and the communicator that they come from work side by side."""

import textwrap

import pytest
from test_capture import RANK, code
from test_cuda import finish, run, start

from stores import free_store

WORK = """
def cases_of(comm):
    ranks = comm.ranks
    for op in ("all_gather", "all_to_all", "broadcast", "scatter", "gather"):
        for place, part in (("window", 0), ("window", 1003), ("array", 77)):
            yield Captured(comm, equal_case(op, ranks, part, root=ranks - 1), place), {}
    yield Captured(comm, equal_case("all_gather", ranks, 500, True), "window"), {"variant": "b2b"}
    prelaunched = {"variant": "prelaunch_fan"}
    yield Captured(comm, equal_case("all_to_all", ranks, 500), "window"), prelaunched
    if ranks > 1:
        yield Captured(comm, equal_case("all_to_all", ranks, 64, True), "window"), {}

def calls_of(comm, group, turns=3):
    ours, theirs = list(cases_of(comm)), list(cases_of(group))
    for turn in range(turns):
        for number, one in enumerate(ours):
            both = [one, theirs[number % len(theirs)]]
            for part, how in both:
                part.fill(turn)
            comm.barrier()  # all have filled
            handles = [part.start(**how) for part, how in both]
            for handle in handles:
                handle.wait()
            comm.barrier()  # all have ended
            for part, how in both:
                part.check(f"{how} of {part.comm.ranks} ranks")

def members_of(group, own):
    window = group.window(group.ranks)
    window.write(np.full(1, own, np.uint8), group.local_ranks[0])
    group.all_gather(window).wait()
    group.barrier()
    return look(window, group.local_ranks[0]).tolist()

def replays_of(comm, gpus):
    ring = Captured(comm, equal_case("all_gather", comm.ranks, 300), "window")
    with gpus.graph(comm.given, THREAD_LOCAL) as graph:  # other ranks are elsewhere
        ring.start()
    for turn in range(10):
        ring.fill(turn)
        comm.barrier()
        graph.replay()
        comm.barrier()
        while gpus.driver.code("cuStreamQuery", comm.given[0]):
            time.sleep(0.0005)
        ring.check("replay")
        comm.barrier()
    graph.destroy()

def views_of(comm):
    part = comm.window(1000)
    mine = comm.local_ranks[0]
    for turn in range(9):
        part.write(np.full(100, 16 * turn + mine, np.uint8))
        view = comm.all_gather_view(part.region(0, 100))
        view.wait()
        window, offset = view._pending.view
        got = np.empty(100 * comm.ranks, np.uint8)
        address = got.__array_interface__["data"][0]
        window.read(address, mine, offset, got.size)
        assert (got.reshape(comm.ranks, 100).T == 16 * turn + np.arange(comm.ranks)).all()
        comm.barrier()
"""

GROUPS = """
comm, gpus = joined(device=None)
assert comm._gpus == [rank]
group = comm.split(rank % 2, key=ranks - rank)
wanted = [other for other in reversed(range(ranks)) if other % 2 == rank % 2]
with group:
    assert group._gpus == comm._gpus, (group._gpus, rank)
    assert (group.ranks, group.local_ranks) == (len(wanted), [wanted.index(rank)])
    assert members_of(group, rank) == wanted
    calls_of(comm, group)
    replays_of(group, gpus)
    replays_of(comm, gpus)
    views_of(group)
    lone = group.split(group.local_ranks[0])
    assert (lone.ranks, lone._gpus) == (1, [rank])
    assert members_of(lone, rank) == [rank]
    lone.close()
    assert (group.split(None if rank < 2 else 7) is None) == (rank < 2)
views_of(comm)  # and goes on
comm.close()
"""


@pytest.mark.parametrize("ranks", [3, 4])
def test_ranks_as_processes(ranks: int) -> None:
    store = free_store()
    body = code(RANK) + textwrap.dedent(WORK) + textwrap.dedent(GROUPS)
    group = [start(body, store, str(rank), str(ranks)) for rank in range(ranks)]
    assert finish(group, dict.fromkeys(range(ranks), 0))


def test_ranks_as_threads() -> None:
    text = """
    import builtins
    ranks, store, errors = 3, sys.argv[1], []

    def main(rank):
        try:
            exec(compile(GROUPS, "groups", "exec"), globals() | {
                "rank": rank,
                "joined": lambda **how: joined(rank, **how),
            })
        except BaseException as error:
            errors.append(f"rank {rank}: {error!r}")

    def joined(rank, **how):
        comm = Streamed(backend="cuda", store=store, rank=rank, world_size=ranks, timeout=20, **how)
        gpus = Gpus([rank])
        comm.given = gpus.streams()
        return comm, gpus

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    """
    body = code(WORK) + f"\nGROUPS = {GROUPS!r}\n" + textwrap.dedent(text)
    assert run(body, free_store()) == ""


@pytest.mark.needs("torch")
@pytest.mark.not_tsan("gloo's threads are built without it")
def test_groups_of_torch() -> None:
    """Communicators of torch's groups, and groups of them; torch here has no GPU of its own."""
    text = """
    import types
    import torch, torch.distributed as dist
    import offcore.torch
    from foreign import Exchange, plain
    store, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"tcp://{store}", rank=rank, world_size=ranks)
    gpus = Gpus([rank])
    streams = gpus.streams()
    asked = []
    torch.cuda.current_device = lambda: rank
    torch.cuda.current_stream = lambda device: (
        asked.append(device), types.SimpleNamespace(cuda_stream=streams[0]))[1]

    comm = offcore.torch.Communicator(timeout=20)
    colors = [[other for other in range(ranks) if other % 2 == color] for color in range(2)]
    groups = [dist.new_group(members) for members in colors]
    theirs = offcore.torch.Communicator(groups[rank % 2], timeout=20)
    ours = comm.split(rank % 2)
    for group in (theirs, ours):
        assert isinstance(group, offcore.torch.Communicator)
        assert group.local_ranks == [colors[rank % 2].index(rank)]
        assert (group._gpus, group.timeout) == ([rank], 20)
        assert members_of(group, rank) == colors[rank % 2]
        calls_of(comm, group, turns=1)
        group.given = streams
        replays_of(group, gpus)
        tensor = plain(rank, 50_000)
        with group.register(tensor):
            if group.ranks > 1:
                Exchange(group, [tensor], 3000).everything(5)
        group.close()
    assert set(asked) == {rank}
    comm.close()
    dist.destroy_process_group()
    """
    store = free_store()
    body = code(WORK) + textwrap.dedent(text)
    group = [start(body, store, str(rank), "3") for rank in range(3)]
    assert finish(group, dict.fromkeys(range(3), 0))
