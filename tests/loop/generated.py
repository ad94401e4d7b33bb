"""A plan's generated kernel as host code: threads as blocks of one thread, requests by a HostPort's
port. What the test of the text stands on, where there is no GPU."""

import ctypes
import subprocess
import threading
from pathlib import Path

import numpy as np

from offcore.loop.gpu import Args, Coded, Shared
from offcore.loop.source import body_of

ROOT = Path(__file__).parents[2]
SHIM = r"""
#include "core/proxy/host_calls.h"
#define __device__
#define __shared__ static thread_local
struct Index { unsigned x; };
static thread_local Index blockIdx{0};
static constexpr Index threadIdx{0}, blockDim{1};
static void __syncthreads() {}
static void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
template <typename T> static void atomicAdd(T* at, T more) {
  __atomic_fetch_add(at, more, __ATOMIC_RELEASE);
}
namespace offcore::loop {
using Memory = proxy::HostWords;
constexpr unsigned kThreads = 1;
}
"""
MAIN = r"""
extern "C" void run_block(const Args* args, unsigned number) {
  blockIdx.x = number;
  Block block{*args, 0, 0};
  block.run(operate);
}
"""


def compiled(plan, folder: Path, compiler: str) -> ctypes.CDLL:
    source, made = folder / "loop.cpp", folder / "loop.so"
    source.write_text(SHIM + body_of(plan) + MAIN, "utf-8")
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"-I{ROOT}"]
    command += [f"-I{ROOT / 'python/offcore/loop'}", str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[:3000]
    return ctypes.CDLL(str(made))


class Generated:
    """One rank's kernel. memory: numpy arrays by the names of buffers."""

    def __init__(self, plan, library, memory, port, limit=10.0):
        self.plan, self.library, self.memory = plan, library, memory
        lists = [Coded(*one) for block in (*plan.blocks, plan.tail) for one in block]
        sizes = [0, *(len(block) for block in plan.blocks), len(plan.tail)]
        first = np.cumsum(sizes).astype(np.uint32)
        places = np.array([memory[name].ctypes.data for name in plan.graph.buffers], np.uint64)
        words = np.zeros(2 * len(plan.tiles) + 3, np.uint64)
        times = np.zeros(4096 * (plan.stamps + 1), np.uint64)
        self.shared = Shared()
        coded = (Coded * len(lists))(*lists)
        self.kept = [coded, first, places, words, times]
        at = words.ctypes.data
        self.words = words
        self.args = Args(
            instructions=ctypes.addressof(coded),
            first=first.ctypes.data,
            memory=places.ctypes.data,
            port=port,
            shared=ctypes.addressof(self.shared),
            counters=at,
            tickets=at + 8 * len(plan.tiles),
            times=times.ctypes.data,
            fault=at + 16 * len(plan.tiles),
            until=at + 16 * len(plan.tiles) + 8,
            limit_ns=int(limit * 1e9),
            stamps=plan.stamps,
            blocks=len(plan.blocks),
        )

    def start(self, iterations=None):
        self.args.free_running = iterations is None
        self.args.end = self.args.base + (iterations or 0)
        self.words[-2:] = 0
        self.threads = [
            threading.Thread(target=self.library.run_block, args=(ctypes.byref(self.args), block))
            for block in range(len(self.plan.blocks))
        ]
        for thread in self.threads:
            thread.start()

    def join(self):
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()
        self.args.base = self.args.end
        return int(self.words[-3])
