"""Pinned memory that is let go of while the GPUs are busy. On the stand-in driver."""

from test_cuda import run


def test_host_memory_is_let_go_of_beside_parked_programs() -> None:
    """To unregister it would wait for the whole device, hence for ever: it serves whoever asks for
    as much, and goes when nothing is parked."""
    code = """
    comm = opened(2)
    out = comm.window(2000)
    for _ in range(2):
        parked = comm.all_gather(out, variant="prelaunch_fan").wait()
    assert parked.armed_ahead
    before = calls("cuMemHostRegister"), calls("cuMemHostUnregister")
    for turn in range(5):
        array = comm.host_array(100_000, "uint8")
        assert not array.any(), turn  # also where somebody had it
        array[:] = 7
        del array
    after = calls("cuMemHostRegister"), calls("cuMemHostUnregister")
    assert after == (before[0] + 1, before[1]), (before, after)
    assert comm.all_gather(out, variant="prelaunch_fan").wait().armed_ahead
    comm.close()
    del comm, out
    deadline = time.monotonic() + 10
    while any(live().values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert calls("cuMemHostUnregister") > before[1]
    assert not any(live().values()), live()
    """
    assert run(code) == ""


def test_host_memory_is_let_go_of_beside_work_that_waits() -> None:
    """The driver takes it back once the device is idle; nobody waits long for that."""
    code = """
    comm = opened(2)
    watch = offcore._core.GpuTimer(0)
    arrays = [comm.host_array(10_000 * n, "uint8") for n in (1, 2, 3)]
    before = calls("cuMemHostUnregister"), live()["registrations"]
    watch.shut()
    watch.start()
    took = []
    for _ in range(3):
        began = time.monotonic()
        arrays.pop()
        took.append(time.monotonic() - began)
    assert 1 < took[0] < 10 and max(took[1:]) < 1, took
    assert live()["registrations"] == before[1]
    parked = [comm.all_gather(comm.window(64), variant="prelaunch_fan").wait() for _ in range(2)]
    watch.open()
    deadline = time.monotonic() + 10
    comm.close()
    while live()["registrations"] > before[1] - 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    del comm, parked, watch
    assert calls("cuMemHostUnregister") >= before[0] + 3
    """
    assert run(code) == ""


def test_a_fork_that_drops_host_memory_ends() -> None:
    code = """
    comm = opened(2)
    array = comm.host_array(10_000, "uint8")
    if (child := os.fork()) == 0:
        began = time.monotonic()
        del array
        os._exit(0 if time.monotonic() - began < 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    """
    assert run(code) == ""
