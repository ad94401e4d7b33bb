"""What the thread sanitizer sees of the stand-in driver: copies that nothing puts in order, long
after each other too."""

import pytest
from cuda_library import sanitizer
from test_capture import BEGIN
from test_cuda import start

pytestmark = pytest.mark.skipif(sanitizer() != "tsan", reason="of the thread sanitizer's build")
REPORTED = 66

CODE = """
ordered = sys.argv[1]
comm = offcore.Communicator(backend="cuda", ranks=1)
window, word = comm.window(1 << 16), comm.host_array(1, "uint32")
gpus = Gpus([0])
driver, (one, other) = gpus.driver, [gpus.streams()[0] for _ in range(2)]
first = window.address(0)
driver("cuMemcpyAsync", first + 8192, first, 8192, one)
if ordered == "event":
    event = driver.get(c_uint64, "cuEventCreate", 2)
    driver("cuEventRecord", event, one)
    driver("cuStreamWaitEvent", other, event, 0)
elif ordered == "word":
    driver("cuStreamWriteValue32", one, c_uint64(word.ctypes.data), 1, 0)
    driver("cuStreamWaitValue32", other, c_uint64(word.ctypes.data), 1, 0)
elif ordered == "host":
    driver("cuStreamSynchronize", one)
time.sleep(0.1)  # it has long ended
driver("cuMemcpyAsync", first + 16384, first + 8192, 8192, other)
assert gpus.settle([one, other])
comm.close()
"""


@pytest.mark.parametrize("ordered", ["event", "word", "host", "by nothing"])
def test_a_copy_of_what_another_stream_writes(ordered: str) -> None:
    process = start(CODE, ordered, prelude=BEGIN, TSAN_OPTIONS="die_after_fork=0")
    told, _ = process.communicate(timeout=60)
    assert process.returncode == (REPORTED if ordered == "by nothing" else 0), told
    assert ("data race" in told) == (ordered == "by nothing"), told
