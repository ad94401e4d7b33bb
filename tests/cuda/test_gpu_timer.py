"""What times work on a GPU, on the stand-in driver."""

from test_cuda import run


def test_the_gate_holds_what_is_enqueued_until_it_opens() -> None:
    code = """
    from offcore import _core
    assert _core.gpus() == 4
    watch = _core.GpuTimer(0)
    assert watch.stream > 2
    for turn in range(3):
        watch.shut()
        watch.start()
        watch.stop()
        assert code_of(lambda: watch.elapsed_us(0.1))[0] == "timeout"
        watch.open()
        assert 0 <= watch.elapsed_us(5) < 5e6
    assert code_of(lambda: _core.GpuTimer(4)) == ("invalid", "GPU 4 does not exist: there are 4")
    watch.shut()
    watch.start()
    assert live()["streams"] == 2 and live()["registrations"] == 1  # its own, and the GPU's
    del watch  # opens the gate, and leaves nothing
    assert set(live().values()) == {0}
    """
    assert run(code) == ""


def test_a_chain_of_calls_is_timed_on_the_callers_stream() -> None:
    code = """
    from offcore import _core
    watches = [_core.GpuTimer(rank) for rank in range(2)]

    class Timed(offcore.Communicator):
        def _streams(self):
            return [watch.stream for watch in watches]

    comm = Timed(backend="cuda", ranks=2, timeout=5)
    out = comm.window(4096)
    comm.all_gather(out).wait()
    for watch in watches:
        watch.shut()
    handles = [comm.all_gather(out)]
    for watch in watches:
        watch.start()
    handles += [comm.all_gather(out) for _ in range(10)]
    for watch in watches:
        watch.stop()
    time.sleep(0.1)
    assert not handles[0].done()
    for watch in watches:
        watch.open()
    assert all(0 < watch.elapsed_us(5) < 5e6 for watch in watches)
    assert {handle.wait().signals for handle in handles} == {"fenced"}
    comm.close()
    """
    assert run(code) == ""


def test_programs_behind_a_gate_are_timed_from_its_opening() -> None:
    code = """
    from offcore import _core, machines
    session = _core.Session("cuda", machines.load("h200-2"), 2)
    gate = _core.GpuTimer(0)
    program = _core.Program.parse('''\\
program copy machine=m ranks=2 variant=v mode=eager protocol=promise native=yes flags=4 span=1
buffer w window 64
queue 0.0
 copy w[1]+0 <- w[0]+0 bytes=64
''')
    arrays = [np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)]
    held = session.run(program, {"w": arrays}, repeat=5, checked=False, gate=gate)
    assert (arrays[1] == arrays[0]).all()
    assert len(held.times_ns) == len(held.controls_ns) == 5
    assert all(0 < time < 5e9 for time in held.times_ns)
    # A program that never ends does not leave the gate shut.
    stuck = _core.Program.parse('''\\
program copy machine=m ranks=2 variant=v mode=eager protocol=promise native=yes flags=4 span=1
queue 0.0
 poll flag[0]:1 >= 2
''')
    code, message = code_of(
        lambda: session.run(stuck, timeout_s=0.2, checked=False, gate=gate)
    )
    assert code == "timeout", (code, message)
    session.run(program, {"w": arrays}, checked=False, gate=gate)
    """
    assert run(code) == ""
