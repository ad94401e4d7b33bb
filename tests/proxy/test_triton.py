"""The Triton form of the device API: its numbers are ring.h's, and its PTX assembles."""

import ast
import ctypes
import importlib.util
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import offcore

MODULE = Path(offcore.device.__file__).with_name("triton.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "triton_put.py"


def numbers() -> dict[str, int]:
    """The module's constants, by name; without importing Triton."""
    found = {}
    for line in ast.parse(MODULE.read_text("utf-8")).body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Call):
            value = line.value.args[0]
            if not (isinstance(value, ast.Constant) and isinstance(value.value, str)):
                found[ast.unparse(line.target)] = eval(ast.unparse(value))
    return found


def test_fields_lie_where_the_port_has_them() -> None:
    at = numbers()
    with offcore.Communicator(backend="host", ranks=3) as comm:
        windows = [comm.window(4096) for _ in range(2)]
        with comm.requests(windows, chunk=256, slots=128, limit=5.0) as requests:
            port = requests.proxies[1].port

            def word(name: str, kind: str = "Q") -> int:
                return int(struct.unpack_from(f"<{kind}", port, at[name])[0])

            def seen(name: str, index: int = 0) -> int:
                return ctypes.c_uint64.from_address(word(name) + 8 * index).value

            assert [word(f"_{one}", "I") for one in ("SLOTS_LOG2", "RANK", "RANKS")] == [7, 1, 3]
            assert word("_BUFFER_COUNT", "I") == 2
            assert word("_LIMIT_NS") == 5_000_000_000
            assert word("_START") == word("_SCHEDULE") == 0
            assert len(port) == at["_PERIOD"] + 4 * 64 == at["_FIRST"] + 2 * 4 * 64
            host = requests.host_port(1)
            ticket = host.put_signal(2, 1, 0, 5, 3)
            assert host.wait_sent(ticket) == 0
            assert seen("_TAIL") == seen("_SENT", 2) == ticket.position == 1
            lap, op = 1 << 63, at["_PUT_SIGNAL"] << 60
            place = 5 << at["_CHUNK_BITS"] | 3
            assert seen("_SLOTS") == lap | op | 2 << 54 | 1 << 48 | place
            other = requests.proxies[2].port
            received = struct.unpack_from("<Q", other, at["_RECEIVED"])[0]
            index = 1 * at["_BUFFERS"] + 1
            assert ctypes.c_uint64.from_address(received + 8 * index).value == 1
            assert [seen(f"_{one}") for one in ("HEAD", "FAULT_HERE")] == [0, 0]
            assert host.put(2, 5, 0, 0, 1).fault == at["_INVALID"]
            complaints = word("_COMPLAINTS") + 4 * at["_INVALID"]
            assert ctypes.c_uint32.from_address(complaints).value == 1
            assert host.wait(2, 1, 1) == at["_INVALID"]
            assert seen("_FAULT_HERE") == at["_INVALID"]
            ends = time.monotonic() + 5  # the engine tells ranks of it behind its own word
            while seen("_FAULT", 1) == 0 and time.monotonic() < ends:
                time.sleep(0.001)
            assert seen("_FAULT", 1) == at["_INVALID"]
            assert seen("_HEAD") == at["_CLOSED"]


class Number(int):
    """Triton's scalars, as far as the calls' arithmetic goes."""

    def __add__(self, other: int) -> "Number":
        return Number(int(self) + int(other))

    def to(self, kind: Any) -> Any:
        return kind.from_address(self)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module as plain Python: `waits` has the words that it waits for."""
    waits: list[int] = []

    def asm(text: str, _: str, args: list[int], **__: Any) -> int:
        if "FAILED:" in text:
            waits.append(args[0])
        else:
            ctypes.c_uint32.from_address(args[0]).value = 1  # a complaint
        return 0

    def same(one: Any) -> Any:
        return one

    language = {"constexpr": same, "pointer_type": same, "inline_asm_elementwise": asm}
    language |= {"int32": ctypes.c_uint32, "int64": ctypes.c_uint64}
    language |= {"cast": lambda one, _: Number(one), "load": lambda at: Number(at.value)}
    language |= {"atomic_add": lambda at, *_, **__: Number(at.value)}
    stub: Any = ModuleType("triton")
    stub.jit, stub.language = same, SimpleNamespace(**language)
    monkeypatch.setitem(sys.modules, "triton", stub)
    monkeypatch.setitem(sys.modules, "triton.language", stub.language)
    spec = importlib.util.spec_from_file_location("as_python", MODULE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return SimpleNamespace(module=module, waits=waits)


def test_ranks_and_buffers_that_there_are_not(calls: Any) -> None:
    at = numbers()
    invalid, module = at["_INVALID"], calls.module
    with offcore.Communicator(backend="host", ranks=2) as comm:
        made = comm.requests([comm.window(4096)], limit=5.0)
        port = ctypes.create_string_buffer(made.proxies[0].port)
        complaints = (ctypes.c_uint32 * 8)()
        start = (ctypes.c_uint64 * 64)()
        struct.pack_into("<2Q", port, at["_COMPLAINTS"], ctypes.addressof(complaints), 0)
        place = ctypes.addressof(port)
        for armed in (False, True):
            struct.pack_into("<Q", port, at["_START"], ctypes.addressof(start) if armed else 0)
            bad = [module.wait(place, peer, 0, 1) for peer in (-1, 2)]
            bad += [module.wait(place, 1, buffer, 1) for buffer in (-1, 1)]
            bad += [module.wait_sent(place, peer, 7) for peer in (-1, 2)]
            bad += [module.flush(place, peer) for peer in (-1, 0, 2)]
            assert bad == [invalid] * 9
            assert [*complaints] == [0, 0, 0, 1, 0, 0, 0, 0]
            complaints[invalid] = 0
        assert not calls.waits
        assert module.wait(place, 1, 0, 1) == module.flush(place, 1) == 0
        assert module.wait_sent(place, 1, -4) == 4
        assert len(calls.waits) == 2
        assert not any(complaints)
        made.stop()


@pytest.mark.needs("torch", "triton")
def test_the_example_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    spec = importlib.util.spec_from_file_location("triton_put", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    ptx = example.compiled_for(90)  # which assembles it, too
    assert "st.release.sys.global.u64" in ptx
    assert "ld.acquire.sys.global.u64" in ptx
    if shutil.which("ptxas"):
        file = tmp_path / "kernel.ptx"
        file.write_text(ptx, "utf-8")
        subprocess.run(["ptxas", "-arch=sm_90a", str(file), "-o", str(tmp_path / "o")], check=True)
