"""What a rank keeps of a large collective is copied by engines that pushes leave free."""

import signal

import pytest
import test_refused
from test_cuda import finish, run, start

from stores import free_store

MIB = 1 << 20

PRELUDE = (
    test_refused.PRELUDE
    + """
MIB = 1 << 20
def by_spares():
    return np.array(done("to_host_engine", "from_host_engine"))

def exchanged(comm, nbytes, plain=False, **options):
    '''All-to-all of so many bytes a rank; its result, and what spare engines copied of it.'''
    ranks, part = comm.ranks, nbytes // comm.ranks
    data = [np.random.default_rng(rank).integers(0, 256, nbytes, np.uint8) for rank in range(ranks)]
    inputs = [Plain(rank, nbytes) for rank in range(ranks)]
    for one, values in zip(inputs, data):
        one.write(values)
    outs = [Plain(rank, nbytes) for rank in range(ranks)] if plain else comm.window(nbytes)
    before = by_spares()
    result = comm.all_to_all(outs, inputs, **options).wait()
    taken = by_spares() - before
    for rank in range(ranks):
        came = outs[rank].read() if plain else look(outs, rank)
        wanted = np.concatenate([one[rank * part :][:part] for one in data])
        assert (came[:nbytes] == wanted).all(), rank
    return result, taken
"""
)


@pytest.mark.parametrize(
    ("ranks", "nbytes", "plain", "least", "most"),
    [
        (2, 64 * MIB, False, 0.4, 0.6),  # half of what it keeps: the other engine has pushes, too
        (2, 64 * MIB + 4098, False, 0.4, 0.6),
        (4, 64 * MIB, False, 1, 1),  # they are through before the pushes
        (2, 80 * MIB, True, 0.6, 0.9),  # and here it drains slots as well
    ],
)
def test_they_copy_beside_pushes(
    ranks: int, nbytes: int, plain: bool, least: float, most: float
) -> None:
    code = """
    ranks, nbytes, plain, least, most = eval(sys.argv[1])
    result, taken = exchanged(opened(ranks), nbytes, plain)
    assert (result.own_copy, result.native, result.staged) == ("engines", True, plain), result
    assert done("same_device") == [0]
    kept = nbytes  # by all ranks together
    assert least * kept <= taken.sum() <= most * kept, (taken, kept)
    assert taken.min() > 0.45 * taken.sum(), taken
    """
    assert run(code, repr((ranks, nbytes, plain, least, most)), prelude=PRELUDE) == ""


def test_small_ones_and_those_by_sms_or_one_engine_stay_in_one_stream() -> None:
    code = """
    result, taken = exchanged(opened(), 8 * MIB)
    assert (result.own_copy, taken.sum()) == ("engine", 0), (result, taken)
    result, taken = exchanged(opened(own_copy="sm"), 64 * MIB)
    assert (result.own_copy, taken.sum()) == ("sm", 0), (result, taken)
    result, taken = exchanged(opened(own_copy="engine"), 64 * MIB)
    assert (result.own_copy, taken.sum()) == ("engine", 0), (result, taken)
    """
    assert run(code, prelude=PRELUDE) == ""


def test_what_does_not_exist_is_told() -> None:
    code = """
    for own_copy in ("engine,sm", "", None, 3):
        code, told = code_of(lambda: opened(own_copy=own_copy))
        assert code == "invalid" and f"own_copy '{own_copy}': engines, engine or sm" in told, told
    code, told = code_of(lambda: opened(signals=None))
    assert code == "invalid" and "signal form 'None': auto, fenced or copy_order" in told, told
    """
    assert run(code, prelude=PRELUDE) == ""


def test_where_the_trial_is_refused_one_engine_copies_all() -> None:
    code = """
    comm = opened()
    result, taken = exchanged(comm, 64 * MIB)
    assert (result.own_copy, result.native, taken.sum()) == ("engine", True, 0), (result, taken)
    """
    for fault in ("cuMemcpy2DAsync:1:1,cuMemcpy2DAsync:2:1", "cuMemcpyAsync:1,cuMemcpyAsync:3"):
        assert run(code, prelude=PRELUDE, OFFCORE_FAKE_CUDA_FAIL=fault) == "", fault


# Calls behind those of the trial.
LATER = ",".join(f"cuMemcpy2DAsync:{number}:1" for number in range(6, 300, 2))


def test_what_a_spare_engine_is_refused_another_one_copies() -> None:
    code = """
    result, taken = exchanged(opened(), 64 * MIB)
    assert result.own_copy in ("engines", "hint", "sm") and not result.native, result
    assert taken.sum() > 0
    """
    assert run(code, prelude=PRELUDE, OFFCORE_FAKE_CUDA_FAIL=LATER) == ""


# Engines for copies to and from the host have copies of others before them until `free` is called.
# Contexts of the GPUs go on whatever is closed, as they do beside torch.
BUSY = """
def free():
    lib.fakecuda_hold_host_engines(0)

lib.cuInit(0)
for device in range(3):
    use(device)
lib.fakecuda_hold_host_engines(1)
"""


def test_opening_does_not_wait_for_copies_of_others() -> None:
    """They keep the trial from ending: one engine copies all, and the next communicator's may."""
    code = """
    comm = opened()
    windows = [comm.window(MIB) for _ in range(3)]
    free()
    result, taken = exchanged(comm, 64 * MIB)
    assert (result.own_copy, result.native, taken.sum()) == ("engine", True, 0), (result, taken)
    result, taken = exchanged(opened(), 64 * MIB)
    assert result.own_copy == "engines" and taken.sum() > 0, (result, taken)
    """
    assert run(code, prelude=PRELUDE + BUSY) == ""


def test_closing_does_not_either() -> None:
    code = """
    opened().close()
    free()
    result, taken = exchanged(opened(), 64 * MIB)
    assert result.own_copy == "engines" and taken.sum() > 0, (result, taken)
    """
    assert run(code, prelude=PRELUDE + BUSY) == ""


def test_what_a_service_still_works_on_stays_where_opening_fails() -> None:
    """Three ranks try strided copies. The second time what fills a window stands behind these."""
    code = """
    for _ in range(2):
        code, told = code_of(lambda: opened(3))
        assert code == "driver" and "something else holding it" in told, (code, told)
    free()
    result, taken = exchanged(opened(3), 48 * MIB)
    assert result.own_copy == "engines", result
    """
    assert run(code, prelude=PRELUDE + BUSY) == ""


def test_a_wait_ends_in_time_where_a_gpu_does_not_tell_where_it_is() -> None:
    """Words are read by the engine that others keep busy, for ever or until they are through."""
    code = """
    free()
    comm = opened(timeout=30)
    inp, out = comm.window(32 * MIB), comm.window(32 * MIB)
    comm.all_to_all(out, inp).wait()
    inp.write(np.arange(32 * MIB, dtype=np.uint8), rank=1)
    lib.fakecuda_hold_host_engines(1)
    handle = comm.all_to_all(out, inp)
    late = threading.Timer(20, free)
    late.start()
    code, told = code_of(lambda: handle.wait(0.1))
    assert code == "timeout" and "something else holding it" in told, (code, told)
    late.cancel()
    free()
    assert handle.wait().own_copy == "engines"
    assert (look(out)[16 * MIB :] == np.arange(16 * MIB, dtype=np.uint8)).all()
    """
    assert run(code, prelude=PRELUDE + BUSY) == ""


def test_a_peer_that_is_killed_amid_their_copies() -> None:
    code = """
    store, rank = sys.argv[1], int(sys.argv[2])
    comm = offcore.Communicator(backend="cuda", store=store, rank=rank, world_size=2, timeout=30)
    inp, out = comm.window(32 * MIB), comm.window(32 * MIB)
    assert comm.all_to_all(out, inp).wait().own_copy == "engines"
    if rank == 0:
        lib.fakecuda_hold_host_engines(1)
        handle = comm.all_to_all(out, inp)
    print("ready", flush=True)
    if rank == 1:
        time.sleep(60)
    threading.Timer(1, lib.fakecuda_hold_host_engines, (0,)).start()
    code, told = code_of(handle.wait)
    assert code == "peer" and "rank 1" in told, (code, told)
    comm.close()
    del comm, inp, out, handle
    assert not any(live().values()), live()
    result, taken = exchanged(opened(), 32 * MIB)
    assert result.own_copy == "engines" and taken.sum() > 0, (result, taken)
    """
    store = free_store()
    group = [start(code, store, str(rank), prelude=PRELUDE) for rank in range(2)]
    for process in group:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    group[1].send_signal(signal.SIGKILL)
    assert finish(group, {0: 0, 1: -signal.SIGKILL})


def test_signals_of_reductions_keep_a_stream_that_never_copies() -> None:
    """In a stream that has copied, an engine would send them when it is through with the data."""
    code = """
    comm = opened()
    outs, inputs = comm.window(32 * MIB), comm.window(64 * MIB)

    def late():
        before = done("late_writes")[0]
        comm.reduce_scatter(outs, inputs, dtype="float32").wait()
        return done("late_writes")[0] - before

    late()  # slots grow
    alone, writes = late(), done("writes")[0]
    for nbytes in (8 * MIB, 64 * MIB):
        exchanged(comm, nbytes)
        assert late() == alone, (nbytes, alone)
    gathered(comm, 64 * MIB)
    assert late() == alone
    assert done("writes")[0] > writes
    """
    assert run(code, prelude=PRELUDE) == ""
