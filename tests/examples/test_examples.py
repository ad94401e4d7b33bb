"""The examples, and the Python that the documents show, run as they stand."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from offcore import device
from offcore.sizes import parse_bytes
from offcore.tools.bench import compare
from offcore.tools.report import format_us

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGES_WITH_PYTHON = (
    "README.md",
    "docs/quickstart.md",
    "docs/batch.md",
    "docs/kv.md",
    "docs/mcast.md",
    "docs/recipes.md",
)


def run(*words, env=None):
    done = subprocess.run(
        (sys.executable, *map(str, words)), capture_output=True, text=True, timeout=100, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks_of(name):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text("utf-8"), re.S | re.M)


def test_all_gather_tells_every_variant():
    lines = run(EXAMPLES / "all_gather.py").splitlines()
    names = [line.split()[0] for line in lines[1:]]
    assert names[0] == "pcpy"
    assert {"bcst", "b2b", "prelaunch_pcpy", "prelaunch_bcst", "prelaunch_b2b"} <= set(names)
    assert "swap" not in names


def test_ranks_start_themselves():
    env = {name: value for name, value in os.environ.items() if name != "RANK"}
    lines = sorted(run(EXAMPLES / "ranks.py", env=env).splitlines())
    assert [line.partition(";")[0] for line in lines] == [
        "rank 0 of 2: correct",
        "rank 1 of 2: correct",
    ]


def test_views_stay_while_the_next_layer_comes():
    assert run(EXAMPLES / "views.py").endswith("protocol view: correct\n")


def test_batches_are_compared_and_checked():
    lines = run(EXAMPLES / "batch.py").splitlines()
    assert lines[-1] == (
        "1792 entries of 4096 bytes, correct: 64 commands, 1792 entries folded, 0 merged"
    )
    times = [[float(cell) for cell in line.split()] for line in lines[2:-1]]
    assert len(times) == 5
    assert all(one_by_one > 1.5 * b2b for _, one_by_one, b2b, *_ in times)


def test_a_prompt_is_fetched():
    lines = run(EXAMPLES / "kv_fetch.py").splitlines()
    assert re.match(r" +store: 6144 pages in 256 commands \(strided\), ", lines[0])
    assert re.match(r"by layer: 6144 pages in \d{4} commands", lines[2].strip())
    assert lines[3].startswith("correct, on ")


def test_threads_ask_for_copies():
    assert sorted(run(EXAMPLES / "host_put.py").splitlines()) == [
        f"rank {rank}: 0 wrong bytes in 200 rounds" for rank in range(3)
    ]


def test_cuda_kernels_that_ask_for_copies(tmp_path):
    """Without GPUs it says so; nvcc reads what NVRTC would. Their bytes are checked on GPUs."""
    env = os.environ | {"OFFCORE_LIBCUDA": "libnone.so.1"}
    first, second = run(EXAMPLES / "nvrtc_put.py", env=env).splitlines()
    assert first.startswith("no two GPUs here (")
    assert re.match(r"compiled for sm_90: \d{4,} bytes of code|not compiled: .*nvrtc", second)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    [source] = re.findall(
        r'^SOURCE = r"""(.*?)"""', (EXAMPLES / "nvrtc_put.py").read_text(), re.S | re.M
    )
    (tmp_path / "put.cu").write_text(source, "utf-8")
    command = (nvcc, "-std=c++17", "-arch=sm_90", "-ptx", f"-I{device.include_path()}", "put.cu")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert ".entry exchange" in (tmp_path / "put.ptx").read_text("utf-8")


def test_multicast_between_processes():
    lines = sorted(run(EXAMPLES / "mcast.py").splitlines())
    assert [line.partition(";")[0] for line in lines] == [
        f"rank {r} of 3: correct" for r in range(3)
    ]
    assert all("3 MiB by multicast" in line for line in lines)


WEIGHTS = r"rank \d of \d: 3 tensors, 16 MiB in \d+ ms, (\d+ MiB sent once|received by multicast)"


def test_weights_are_broadcast():
    env = {name: value for name, value in os.environ.items() if name != "RANK"}
    lines = sorted(run(EXAMPLES / "weights_broadcast.py", env=env).splitlines())
    assert len(lines) == 3
    assert all(re.match(WEIGHTS, line) for line in lines), lines
    assert "16 MiB sent once for all" in lines[0]


@pytest.mark.needs("namespaces")
def test_weights_are_broadcast_on_the_testbed():
    command = ("-m", "offcore", "mcast", "testbed", "--hosts", "3", "--")
    lines = run(*command, sys.executable, EXAMPLES / "weights_broadcast.py").splitlines()
    assert len([line for line in lines if re.match(WEIGHTS, line)]) == 3, lines


def check_training(lines):
    first, last = re.match(r"losses agree: ([\d.]+) to ([\d.]+) in 6 steps", lines[0]).groups()
    assert float(last) < float(first)
    assert re.match(r"median step: [\d.]+ ms with gloo, [\d.]+ ms with offcore", lines[1])


@pytest.mark.needs("torch")
def test_models_are_trained():
    """Three examples, their ranks forked from one process: most of their time is torch's import."""
    ran = run(Path(__file__).with_name("training_ranks.py"))
    ddp, fsdp2, tensor = ran.split("---\n")
    check_training(ddp.splitlines())
    assert "'handed': {}" in ddp
    check_training(fsdp2.splitlines())
    gathers, reduces = fsdp2.splitlines()[2:]
    assert re.match(r"all_gather: \d+ calls, \d+ KiB, by {.*}, 0 staged, at most 0 SMs", gathers)
    assert reduces.startswith("reduce_scatter: 30 calls")
    agree, step, calls = tensor.splitlines()
    assert agree == "outputs and gradients agree on 2 ranks"
    assert re.match(r"median step: [\d.]+ ms", step)
    assert "'handed': {}" in calls


@pytest.mark.long
@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor_parallel"])
def test_training_starts_itself(name):
    env = {key: value for key, value in os.environ.items() if key != "RANK"}
    lines = run(EXAMPLES / f"{name}.py", env=env).splitlines()
    assert "agree" in lines[0]
    assert lines[1].startswith("median step")


def run_two_ranks(text):
    """As torchrun starts them, and with `rank` for those that name it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    text = text.replace("127.0.0.1:29400", f"127.0.0.1:{port}")
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    both = [
        subprocess.Popen(
            (sys.executable, "-c", f"rank = {rank}\n{text}"),
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=90) for process in both] == [0, 0]


WITH_TORCH = pytest.mark.needs("torch")
SHOWN = [
    pytest.param(
        block, marks=[WITH_TORCH] if "import torch" in block else [], id=f"{name}:{number}"
    )
    for name in PAGES_WITH_PYTHON
    for number, block in enumerate(blocks_of(name))
]


@pytest.mark.parametrize("block", SHOWN)
def test_documents_show_python_that_runs(block):
    if "rank=rank" in block or "init_process_group" in block or "MASTER_PORT" in block:
        run_two_ranks(block)
    else:
        assert run("-c", block)


def test_every_page_shows_python_that_runs():
    assert all(blocks_of(name) for name in PAGES_WITH_PYTHON)


def table_of(head: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The table of docs/performance.md whose second column is `head`: its columns and its rows."""
    text = (ROOT / "docs/performance.md").read_text("utf-8")
    row = r"^ +\d+[KMG](?: +[\d.,]+\*?)+\n"
    found = re.search(rf"^ +size +({head} .*)\n((?:{row})+)", text, re.M)
    assert found is not None
    rows = [line.split() for line in found[2].splitlines()]
    return found[1].replace(" +", "").split(), [(parse_bytes(r[0]), r[1:]) for r in rows]


def records_of(name: str) -> list[dict]:
    path = ROOT / "benchmarks" / "results" / name
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_performance_shows_recorded_times_of_the_simulator():
    rows = records_of("sim-mi300x-8-all_gather-in_place.jsonl")
    recorded = {(row["bytes"], row["variant"]): row["time_us"] for row in rows}
    names, shown = table_of("pcpy")
    assert len(shown) >= 4
    for size, cells in shown:
        times = {name: recorded[size, name] for name in names}
        best = min(times, key=times.get)
        assert cells == [format_us(times[name]) + "*" * (name == best) for name in names]


@pytest.mark.parametrize("page", ["docs/performance.md", "docs/measurements/cuda.md"])
def test_pages_show_recorded_times_of_gpus(page):
    text = (ROOT / page).read_text("utf-8")
    assert compare.filled(text, ROOT / "benchmarks" / "results") == text
    announced = re.findall(
        r"<!-- compare (\S+) [^>]*-->\n\n +size .*promised.*\n(?: +\d.*\n){4,}", text
    )
    assert len(announced) >= 2
    # A number that no row has is not kept.
    changed = re.sub(r"(-->\n\n.*\n +4K +)\d", r"\g<1>9", text)
    assert changed != text
    assert compare.filled(changed, ROOT / "benchmarks" / "results") == text


def test_performance_shows_recorded_times_of_host():
    rows = records_of("host-2-all_gather.jsonl")
    recorded = {(r["bytes"], r["impl"]): r["time_us"] for r in rows if r["run"] == rows[0]["run"]}
    names, shown = table_of("offcore")
    assert len(shown) >= 4
    for size, cells in shown:
        assert cells == [format_us(recorded[size, name]) for name in names]
