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
        for given, wrong in (
            ((), "pass ctypes values of [8, 4] bytes, not none"),
            ((where,), "pass ctypes values of [8, 4] bytes, not c_ulong"),
            ((where, where), "pass ctypes values of [8, 4] bytes, not c_ulong, c_ulong"),
            ((where, 7), "pass ctypes values of [8, 4] bytes, not c_ulong, int"),
        ):
            code, text = code_of(lambda: kernels.launch("toucher", 1, 1, *given))
            assert code == "invalid" and wrong in text, (code, text)
    assert len(asked) == 1 and asked[0][0] == "a source" and asked[0][1].startswith("sm_"), asked
    """)
        == ""
    )


COMPILED = """
from offcore.device import cuda
kinds = b"spinner", b"toucher"
ptx = b".version 8.0 .target sm_90" + b"".join(b" .entry " + one + b"(" for one in kinds)
cuda.compile_cubin = lambda *_: ptx
"""


def test_kernels_are_unloaded_once_they_have_ended() -> None:
    """One that still runs keeps its code."""
    code = """
    comm = opened(1)
    window = comm.window(4096)
    at = [ctypes.c_uint64(window.address() + 64 * k) for k in range(2)]
    kernels = cuda.Kernels("", 0)
    kernels.launch("spinner", 1, 1, *at, ctypes.c_uint64(60 * 10**9))
    before = calls("cuModuleUnload")
    code, text = code_of(lambda: kernels.close(0.05))  # it runs
    assert code == "timeout", (code, text)
    assert calls("cuModuleUnload") == before
    window.write(np.ones(1, np.uint32).view(np.uint8))
    kernels.close(10)
    kernels.close()
    assert calls("cuModuleUnload") == before + 1
    """
    assert run(code, prelude=COMPILED) == ""


def test_an_older_driver_cannot_check_arguments() -> None:
    code = """
    comm = opened(1)
    window = comm.window(4096)
    where = ctypes.c_uint64(window.address())
    with cuda.Kernels("", 0) as kernels:
        kernels.launch("toucher", 1, 1, where, ctypes.c_uint32(7))
        code, text = code_of(lambda: kernels.launch("toucher", 1, 1, where, 7))
        assert code == "invalid" and "pass ctypes values, not c_ulong, int" in text, (code, text)
    assert look(window).view(np.uint32)[0] == 7 and calls("cuFuncGetParamInfo") == 0
    """
    assert run(code, prelude=COMPILED, OFFCORE_FAKE_CUDA_DRIVER="12030") == ""


def test_without_a_driver_there_are_no_kernels() -> None:
    code = """
    os.environ["OFFCORE_LIBCUDA"] = "libabsent.so.1"
    code, text = code_of(lambda: cuda.Kernels("", 0))
    assert code == "unavailable" and "libabsent.so.1" in text, (code, text)
    """
    assert run(code, prelude=COMPILED) == ""
