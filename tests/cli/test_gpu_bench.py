"""`offcore gpu bench`: on backend host in full; on cuda what is told before and when it fails."""

import contextlib
import ctypes
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_library import fake_cuda_library

from offcore import device
from offcore.errors import Error
from offcore.tools.driven import held, host, nccl, sections, simulated
from offcore.tools.driven.rows import MESSAGES, SIZES


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("ping-pong", {("ping-pong", e, n) for e in ("proxy", "memcpy") for n in SIZES}),
        (
            "throughput",
            {
                ("throughput", e, n)
                for e in ("contiguous", "apart", "memcpy loop")
                for n in MESSAGES
            },
        ),
    ],
)
def test_rows_of_host(section, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "MOVED", 4 << 20)
    [(rows, failures)] = sections.run("host", [section], 3, 1.0)
    assert failures == []
    assert {(row["what"], row["engine"], row["bytes"]) for row in rows} == expected
    assert all(row["value"] > 0 for row in rows)


def test_simulated_rows(offcore_cli, tmp_path):
    """Those of cuda that it can have, marked, and the same each time."""
    told = []
    for turn in range(2):
        file = tmp_path / f"{turn}.jsonl"
        words = "--only", "ping-pong,push", "--rounds", "3", "--json", file
        ran = offcore_cli("gpu", "bench", "--machine", "v100-8", *words)
        assert ran.status == 0, ran.err
        assert "ping-pong, v100-8, simulated" in ran.out
        assert "every byte right" in ran.out
        told.append([json.loads(line) for line in file.read_text("utf-8").splitlines()])
    assert all(row["simulated"] and row["machine"] == "v100-8" for row in told[0])
    values = [[row["value"] for row in rows] for rows in told]
    assert values[0] == values[1]
    kinds = {(row["what"], row["engine"], row["bytes"]) for row in told[0]}
    engines = (*simulated.ENGINES, "events")
    assert kinds > {("ping-pong", engine, nbytes) for engine in engines for nbytes in SIZES}
    assert {row["unit"] for row in told[0] if row["section"] == "push"} > {"M requests/s"}


def test_simulated_throughput(monkeypatch):
    monkeypatch.setattr(simulated, "MOVED", 16 << 20)
    [(rows, failures)] = sections.run("sim", ["throughput"], 3, 1.0, "h200-2")
    assert failures == []
    forms = ("contiguous", "apart", "device", "memcpy loop")
    expected = {("throughput", form, nbytes) for form in forms for nbytes in MESSAGES}
    assert {(row["what"], row["engine"], row["bytes"]) for row in rows} == expected
    assert all(row["value"] > 0 for row in rows)


def test_wrong_simulated_bytes_are_told(monkeypatch):
    look = simulated.Bench.looked_at
    monkeypatch.setattr(simulated, "MESSAGES", (1024,))
    monkeypatch.setattr(simulated.Bench, "looked_at", lambda *args: look(*args[:3], args[3] + 1))
    [(rows, failures)] = sections.run("sim", ["throughput"], 3, 1.0, "h200-2")
    assert len(rows) == 4
    assert failures[0] == "throughput: contiguous messages of 1024: wrong bytes"


def test_wrong_bytes_are_told(monkeypatch):
    look = host.Bench.looked_at
    monkeypatch.setattr(host, "MESSAGES", (1024,))
    monkeypatch.setattr(host, "MOVED", 1 << 14)
    monkeypatch.setattr(host.Bench, "looked_at", lambda *args: look(*args[:3], args[3] + 1))
    [(rows, failures)] = sections.run("host", ["throughput"], 3, 1.0)
    assert len(rows) == 3
    assert failures[0] == "throughput: contiguous messages of 1024: wrong bytes"


def test_rows_in_a_file_and_a_table(offcore_cli, tmp_path):
    file = tmp_path / "rows.jsonl"
    ran = offcore_cli("gpu", "bench", "--backend", "host", "--only", "push", "--json", file)
    assert ran.status == 0, ran.err
    assert "every byte right" in ran.out
    assert "M requests/s" in ran.out
    assert '"section": "push"' in file.read_text("utf-8")


def test_nvcc_compiles_the_kernels(tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    folder = Path(sections.__file__).parent
    command = [nvcc, "-std=c++17", "-arch=sm_90", "-ptx", "-o", str(tmp_path / "made.ptx")]
    command += [f"-I{device.include_path()}", f"-I{folder}", str(folder / "kernels.cu")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "made.ptx").read_text("utf-8")
    names = re.findall(
        r"^KERNELS = \((.*?)^\)", (folder / "gpu.py").read_text("utf-8"), re.M | re.S
    )
    for name in re.findall(r'"(\w+)"', names[0]):
        assert f".entry {name}(" in text, name


def test_what_cannot_run_says_why(offcore_cli, gpu_cli):
    ran = offcore_cli("gpu", "bench", "--backend", "host", "--only", "contention")
    assert ran.status == 2
    assert "ping-pong" in ran.err
    ran = offcore_cli("gpu", "bench", "--backend", "sim", "--machine", "host-2")
    assert "unsupported: requests: machine host-2 does not say what they cost" in ran.err
    ran = offcore_cli("gpu", "bench", "--backend", "host", "--machine", "h200-2")
    assert ran.err.startswith("offcore: invalid: --machine: backend host is this one")
    ran = gpu_cli("gpu", "bench", "--backend", "cuda")
    assert ran.err.startswith("offcore: unavailable: gpu bench: cupy is missing")


def test_a_section_that_does_not_end(tmp_path):
    found = sections._on_cuda("proxy", 1, tmp_path / "rows", 0.01)
    assert found == ["proxy: it did not end within 0.01 s"]


class Stuck:
    """A stream that waits for a word which no kernel raises any more."""

    ptr, done = 0, False

    def __init__(self, **_):
        pass

    def synchronize(self):
        raise AssertionError("this would wait for ever")


class Faulty:
    """A bench whose kernels end with a fault. What it is asked for otherwise is 0."""

    def __init__(self, *_):
        self.failures = []
        window = SimpleNamespace(address=lambda rank: 0, write=lambda *_, rank: None)
        self.windows = [window] * 2
        self.comm = SimpleNamespace(host_array=np.zeros)
        self.launch = self.address = lambda *_: 0

    def end(self, what):
        self.failures.append(f"{what}: rank 0: fault 1")


def test_forms_end_after_a_fault(monkeypatch, tmp_path, capsys):
    """What is parked for kernels that have failed waits in vain; the fault is told."""
    cuda = SimpleNamespace(Device=lambda rank: contextlib.nullcontext(), Stream=Stuck)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    names = [f"offcore.tools.driven.{name}" for name in ("gpu", "by_cpu", "contention", "forms")]
    for name in (*names, "offcore.tools.driven.__main__"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    main = importlib.import_module("offcore.tools.driven.__main__")
    forms = importlib.import_module(names[-1])
    monkeypatch.setattr(main, "Bench", Faulty)
    monkeypatch.setattr(main.os, "_exit", sys.exit)
    monkeypatch.setattr(forms, "Streams", object)
    monkeypatch.setattr(forms, "park", lambda *_: None)
    monkeypatch.setattr(forms, "LIMIT_S", 0.01)
    with pytest.raises(SystemExit) as ended:
        main.main("forms", 1, tmp_path / "rows")
    assert ended.value.code == 1
    assert capsys.readouterr().err.splitlines() == [
        "forms: form [wait] flag: rank 0: fault 1",
        "forms: RuntimeError: form [wait] flag: 0.01 s later its streams still wait",
    ]


def test_sends_and_receives_of_nccl(monkeypatch):
    """On a stand-in that counts calls. On GPUs their bytes are compared."""
    stand_in = ctypes.CDLL(str(fake_cuda_library().with_name("libnccl.so.2")))
    monkeypatch.setattr(nccl, "library", lambda: stand_in)
    made = nccl.Nccl(2)
    assert made.version == "2.28.9"
    for sender in range(3):
        made.way(sender % 2, 1 - sender % 2, 1 << 40, 2 << 40, 4096, [11, 12])
    made.close()
    asked = ["CommInitAll", "GroupStart", "Send", "Recv", "GroupEnd", "CommDestroy"]
    counted = [stand_in.fakenccl_calls(f"nccl{name}".encode()) for name in asked]
    assert counted == [1, 3, 3, 3, 3, 2]
    monkeypatch.setattr(stand_in, "ncclGroupEnd", lambda: 5)
    with pytest.raises(Error, match=r"ncclGroupEnd: stand-in \(5\)"):
        made.way(0, 1, 0, 0, 0, [0, 0])


class HostArray(np.ndarray):
    """Of a GPU, as cupy has it."""

    get = np.ndarray.copy

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


class Timed:
    """A context, a stream and an event."""

    ptr = 5

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def synchronize(self, *_):
        pass

    record = synchronize


@pytest.mark.parametrize("lost", [False, True])
def test_trips_by_nccl(monkeypatch, lost):
    """There and back, all enqueued while rank 0's stream is shut. What does not arrive is told."""
    cuda = SimpleNamespace(Device=Timed, Event=Timed, get_elapsed_time=lambda *_: 0.8)
    made = {name: lambda *args, of=name: getattr(np, of)(*args).view(HostArray)
            for name in ("asarray", "zeros")}  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, **made))
    for name in ("gpu", "by_cpu", "by_nccl"):
        monkeypatch.delitem(sys.modules, f"offcore.tools.driven.{name}", raising=False)
    by_nccl = importlib.import_module("offcore.tools.driven.by_nccl")
    told, rows, notes = [], [], []

    def way(sender, receiver, src, dst, nbytes, streams):
        told.append(f"{sender}{receiver}")
        if not (lost and sender == 1):
            ctypes.memmove(dst, src, nbytes)

    def shut(_):
        told.append("shut")
        return lambda: told.append("open")

    stand_in = SimpleNamespace(version="2.28.9", way=way, close=lambda: told.append("closed"))
    monkeypatch.setattr(by_nccl, "Nccl", lambda ranks: stand_in)
    monkeypatch.setattr(by_nccl, "shut", shut)
    bench = SimpleNamespace(streams=[Timed(), Timed()], failures=[], end=lambda what: None)
    bench.note, bench.add = notes.append, lambda *row: rows.append(row)
    by_nccl.by_nccl(bench)
    trips = ["01", "10"] * by_nccl.ROUNDS
    of_a_size = trips + ["shut", *trips, "open"] * by_nccl.SPANS
    assert told == of_a_size * len(SIZES) + ["closed"]
    assert [row[:3] for row in rows] == [
        ("ping-pong", name, size) for size in SIZES for name in ("nccl", "nccl host")
    ]
    assert rows[0][3] == pytest.approx(800 / (2 * by_nccl.ROUNDS))
    assert notes == ["NCCL 2.28.9"]
    assert bench.failures == ([f"nccl: wrong bytes of {size}" for size in SIZES] if lost else [])


def test_nccl_is_looked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(nccl.ctypes, "CDLL", str)
    monkeypatch.setattr(nccl.sys, "path", [str(tmp_path)])
    assert nccl.library() == "libnccl.so.2"
    path = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    path.parent.mkdir(parents=True)
    path.touch()
    assert nccl.library() == str(path)


@pytest.mark.parametrize("wrong", [[], ["7 blocks had gone before the ping-pong ended"]])
def test_a_ping_pong_without_held_sms_is_no_row(monkeypatch, wrong):
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.delitem(sys.modules, "offcore.tools.driven.gpu", raising=False)
    gpu = importlib.import_module("offcore.tools.driven.gpu")
    one = SimpleNamespace(gpu=1, start=list, end=lambda: list(wrong))
    monkeypatch.setattr(gpu, "Holders", lambda *_: one)
    monkeypatch.setattr(gpu, "ping_pong", lambda *_: 9.5)
    rows = []
    bench = SimpleNamespace(
        kernels=[0, 1], rounds=3, failures=[], add=lambda *row: rows.append(row)
    )
    gpu.held(bench, None, "armed", 4096, 1)
    assert rows == ([] if wrong else [("held", "armed", 4096, 9.5, "us one way")])
    assert bench.failures == [f"held, armed: rank 1: {text}" for text in wrong] * 2


def held_words(sms):
    """As the blocks leave them where all but one SM were held."""
    words = np.zeros(held.WORDS, np.uint32)
    words[held.STARTED] = sms - 1
    words[held.HELD : held.HELD + sms - 1] = 1
    words[held.ROAMED + sms - 1] = held.SMALL * sms
    return words


@pytest.mark.parametrize(
    ("word", "value", "told"),
    [
        (held.ENDED, 3, "3 blocks had gone before the ping-pong ended"),
        (held.STARTED, 130, "130 blocks held 131 of 132 SMs"),
        (held.HELD + 5, 0, "131 blocks held 130 of 132 SMs"),
        (held.ROAMED + 131, 1055, "1055 of 1056 small blocks ran on the SM that was free"),
        (held.ROAMED + 7, 2, "2 small blocks ran on SMs that were held"),
    ],
)
def test_sms_that_were_not_held_are_told(word, value, told):
    words = held_words(132)
    assert held.faults(words, 132) == []
    words[word] = value
    assert told in held.faults(words, 132)
