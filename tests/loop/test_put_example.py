"""The kernel of examples/nvrtc_put.py as host code, a thread a rank: what it computes, without a
GPU."""

import ctypes
import re
import subprocess
import threading
from pathlib import Path

import generated
import numpy as np
import pytest

import offcore

EXAMPLE = generated.ROOT / "examples" / "nvrtc_put.py"
DEVICE = r"""
#define __global__
namespace offcore {
using proxy::kNone;
using proxy::PutTicket;
using proxy::RequestPort;
template <typename... Args>
PutTicket put_signal(const Args&... args) { return proxy::HostCalls::put_signal(args...); }
template <typename... Args>
unsigned wait(const Args&... args) { return proxy::HostCalls::wait(args...); }
template <typename... Args>
unsigned wait_sent(const Args&... args) { return proxy::HostCalls::wait_sent(args...); }
}
"""
COUNT, ROUNDS, CHUNK = 1024, 150, 1024


def compiled(folder: Path) -> ctypes.CDLL:
    [source] = re.findall(r'^SOURCE = r"""(.*?)"""', EXAMPLE.read_text("utf-8"), re.S | re.M)
    text = generated.SHIM + DEVICE + source.replace("#include <offcore/device.cuh>", "")
    command = ["c++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"-I{generated.ROOT}"]
    command += ["-x", "c++", "-", "-o", str(folder / "put.so")]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[:3000]
    return ctypes.CDLL(str(folder / "put.so"))


@pytest.mark.needs("c++")
@pytest.mark.parametrize("spoiled", [False, True])
def test_ranks_exchange_and_look_at_every_word(tmp_path: Path, spoiled: bool) -> None:
    library = compiled(tmp_path)
    with offcore.Communicator(backend="host", ranks=2) as comm:
        send, receive, told = (comm.empty(one, np.uint32) for one in (2 * COUNT, 2 * COUNT, 2))
        with comm.requests([send, receive], chunk=CHUNK, limit=20.0) as requests:

            def kernel(rank: int) -> None:
                words = [ctypes.c_void_p(one[rank].ctypes.data) for one in (send, receive)]
                last = ctypes.c_uint32(ROUNDS), ctypes.c_void_p(told[rank].ctypes.data)
                library.exchange(
                    ctypes.c_void_p(requests.port(rank)),
                    ctypes.c_uint32(rank if spoiled else 1 - rank),
                    *words,
                    ctypes.c_uint32(COUNT),
                    ctypes.c_uint64(4 * COUNT // CHUNK),
                    *last,
                )

            threads = [threading.Thread(target=kernel, args=(rank,)) for rank in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert [one.tolist() for one in told] == [[3 if spoiled else 0, 0]] * 2
        if not spoiled:
            last = np.arange(COUNT, dtype=np.uint32) * ROUNDS
            for rank in range(2):
                half = receive[rank].reshape(2, COUNT)[ROUNDS % 2]
                assert (half == last + (1 - rank)).all()
