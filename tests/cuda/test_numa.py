"""Host memory and threads near a GPU. The stand-in's GPUs have no files in sysfs; the tests give
some."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from test_cuda import run

from offcore import Error, _core
from offcore.comm import numa


def test_the_node_of_a_pci_device(tmp_path: Path) -> None:
    folder = tmp_path / "0000:1b:00.0"
    folder.mkdir()
    for text, node in (("1\n", 1), ("-1\n", -1), ("", -1), ("many\n", -1), ("70000\n", -1)):
        (folder / "numa_node").write_text(text)
        assert _core.numa_node(folder.name, str(tmp_path)) == node
    assert _core.numa_node("0000:99:00.0", str(tmp_path)) == -1


def test_memory_on_a_node() -> None:
    refusal = _core.try_node(0)
    assert refusal in (0, 1, 38), os.strerror(refusal)  # or forbidden, as in some containers
    assert _core.try_node(-1) == 22
    if refusal == 0:
        assert _core.try_node(1000) == 22  # no such node


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("0-1,4-5", {0, 1, 4, 5})],
)
def test_lists_of_cpus(text: str, cpus: set[int]) -> None:
    assert numa.cpus_in(text) == cpus


def test_a_thread_is_kept_near_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [{"ordinal": 0, "node": 1, "pci": "a"}, {"ordinal": 1, "node": -1, "pci": "b"}]
    monkeypatch.setattr(_core, "cuda_facts", lambda: {"gpus": gpus})
    own = min(os.sched_getaffinity(0))
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text(f"{own},100000-100001\n")
    seen: list[Any] = []

    def work() -> None:
        seen.append(numa.keep_near([0], tmp_path))
        seen.append(os.sched_getaffinity(0))
        for wrong, code in (([1], "unavailable"), ([7], "unsupported"), ([-1], "unsupported")):
            with pytest.raises(Error) as told:
                numa.keep_near(wrong, tmp_path)
            seen.append(told.value.code == code)
        (tmp_path / "node1" / "cpulist").write_text("100000\n")
        with pytest.raises(Error, match="any CPU near its GPU"):
            numa.keep_near([0], tmp_path)

    before = os.sched_getaffinity(0)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [{own}, {own}, True, True, True]
    assert os.sched_getaffinity(0) == before  # other threads stay where they were


def test_where_no_node_is_told() -> None:
    code = """
    before = os.sched_getaffinity(0)
    code, told = code_of(lambda: offcore.Communicator(backend="cuda", ranks=2, near_gpu=True))
    assert code == "unavailable" and "0000:10:00.0" in told, (code, told)
    code, told = code_of(lambda: offcore.Communicator(backend="host", ranks=2, near_gpu=True))
    assert code == "unsupported", (code, told)
    assert os.sched_getaffinity(0) == before
    """
    assert run(code) == ""
