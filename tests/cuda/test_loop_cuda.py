"""What a loop asks of the driver, on the stand-in, which runs no generated kernel."""

from test_cuda import run


def test_the_driver_of_a_loop() -> None:
    """Memory, words and a stream; all is given back, and what fails is told."""
    assert (
        run("""
    import numpy as np
    from offcore.loop.driver import Driver
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
        driver.load(b"no code", "offcore_loop")
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
