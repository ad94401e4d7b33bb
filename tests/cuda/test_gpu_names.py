"""Which machine the GPUs are taken for, by what the driver calls them, and what is told of that."""

import json

import pytest
from test_cuda import run

TAKEN = """
import json
from offcore import machines
names = [machines.for_gpus(ranks) for ranks in (1, 2, 3, 4, 5, 8, 9)]
comm = opened(2)
result = comm.all_gather(comm.window(2000)).wait()
loaded = machines.load(comm.machine)
print(json.dumps([names, comm.machine, result.tuned, loaded.name, len(loaded.tuned) > 0]))
"""
DOCTOR = """
from offcore.tools.cli.main import main
sys.argv = ["offcore", "doctor", *sys.argv[1:]]
main()
"""
ASSUMED = "its costs are assumed, not measured on these GPUs"
UNTUNED = "no tuned table: run `offcore tune --backend cuda`"
KNOWN = [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200")]
OTHERS = [
    "NVIDIA H100 PCIe",
    "NVIDIA H100 NVL",
    "NVIDIA H200 NVL",
    "NVIDIA H2000",
    "NVIDIA GH200 480GB",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA B200",
    "another GPU",
]


@pytest.mark.parametrize(("gpu", "card"), [*KNOWN, *((gpu, "nvidia") for gpu in OTHERS)])
def test_the_machine_of_a_gpu_s_name(gpu: str, card: str) -> None:
    """The least that has as many ranks; tables were measured on the cards known by name alone."""
    told = run(TAKEN, OFFCORE_FAKE_CUDA_NAME=gpu, OFFCORE_FAKE_CUDA_DEVICES="2")
    names, machine, tuned, loaded, has_table = json.loads(told)
    assert names == [f"{card}-{count}" for count in (2, 2, 4, 4, 8, 8, 9)]
    assert machine == loaded == f"{card}-2"
    assert tuned == has_table == (card != "nvidia")


@pytest.mark.parametrize(
    ("gpu", "count", "machine", "notes"),
    [
        ("NVIDIA H100 80GB HBM3", 2, "h100-2", ["a tuned table"]),
        ("NVIDIA H200", 2, "h200-2", ["a tuned table"]),
        ("NVIDIA H200", 3, "h200-4", ["a tuned table"]),
        ("NVIDIA H100 80GB HBM3", 8, "h100-8", [UNTUNED]),
        ("NVIDIA B200", 1, "nvidia-2", [ASSUMED, UNTUNED]),
        ("NVIDIA B200", 8, "nvidia-8", [ASSUMED, UNTUNED]),
    ],
)
def test_doctor_tells_what_was_not_measured(
    gpu: str, count: int, machine: str, notes: list[str]
) -> None:
    env = {"OFFCORE_FAKE_CUDA_NAME": gpu, "OFFCORE_FAKE_CUDA_DEVICES": str(count)}
    found = json.loads(run(DOCTOR, "--json", "-", **env))["cuda"]
    assert (found["machine"], found["machine_notes"]) == (machine, notes)
    assert found["assumed"] == machine.startswith("nvidia-")
    shown = " ".join(run(DOCTOR, **env).split())
    assert "; ".join([machine, *notes]) in shown


def test_a_table_of_one_s_own_leaves_the_costs_assumed(tmp_path) -> None:
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "nvidia-2.json").write_text("[]")
    env = {"OFFCORE_FAKE_CUDA_NAME": "NVIDIA B200", "OFFCORE_MACHINES": str(tmp_path)}
    found = json.loads(run(DOCTOR, "--json", "-", **env, OFFCORE_FAKE_CUDA_DEVICES="2"))["cuda"]
    assert found["machine_notes"] == [ASSUMED, "a tuned table"]
