"""What a loop asks of the driver, on the stand-in, which runs no generated kernel."""

from test_cuda import run


def test_the_driver_of_a_loop() -> None:
    """Memory, words and a stream; all is given back, and what fails is told."""
    assert (
        run("""
    import numpy as np
    from offcore.device.cuda.driver import Driver
    before = live()
    driver = Driver(0)
    assert driver.sms > 0 and driver.arch.startswith("sm_")
    data = np.arange(1000, dtype=np.uint32)
    at = driver.place(data.tobytes())
    got = np.zeros_like(data)
    driver.read(got.ctypes.data, at, got.nbytes)
    assert (got == data).all()
    driver.fill(at, 400)
    driver.read(got.ctypes.data, at, got.nbytes)
    assert (got[:100] == 0).all() and (got[100:] == data[100:]).all()
    words = ctypes.c_uint64.from_address(driver.host_words(8))
    assert words.value == 0
    try:
        driver.load(b"no code")
    except offcore.Error as error:
        assert error.code == "driver" and "cuModule" in str(error), error
    else:
        raise AssertionError("it was loaded")
    driver.close()
    driver.close()
    assert live() == before, (before, live())
    """)
        == ""
    )


def test_kernels_compiled_at_run_time() -> None:
    """They are loaded by name, launched in their order, and unloaded. What compiles them is not
    here: the stand-in reads PTX of kernels that it knows."""
    assert (
        run("""
    from offcore.device import cuda
    asked = []
    def compiled(source, arch):
        asked.append((source, arch))
        return b".version 8.0 .target sm_90 .entry toucher("
    cuda.compile_cubin = compiled
    comm = opened(1)
    window = comm.window(4096)
    with cuda.Kernels("a source", 0) as kernels:
        for value in (7, 9):
            where = ctypes.c_uint64(window.address() + 4 * (value - 7))
            kernels.launch("toucher", 1, 1, where, ctypes.c_uint32(value))
        kernels.wait()
        assert look(window).view(np.uint32)[:4].tolist() == [7, 0, 9, 0]
        code, text = code_of(lambda: kernels.launch("toucher_of_another", 1, 1))
        assert code == "driver" and "cuModuleGetFunction" in text, (code, text)
    assert len(asked) == 1 and asked[0][0] == "a source" and asked[0][1].startswith("sm_"), asked
    """)
        == ""
    )
