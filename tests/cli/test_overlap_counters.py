"""Counters of GEMMs: what is made of ncu's lists, and what a user sees where there are none."""

import os
import sys
from pathlib import Path

import fake_ncu
import pytest

import needs
import offcore
from offcore.tools.overlap import counters
from offcore.tools.records import read_records

# A list of ncu 2025.3 has this form.
LISTED = """\
==PROF== Connected to process 812 (/usr/bin/python3.12)
==PROF== Profiling "spin_kernel" - 0: 0%....50%....100% - 1 pass
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",\
"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","812","python3.12","127.0.0.1","at::cuda::<unnamed>::spin_kernel(long)","1","7","(1, 1, 1)",\
"(1, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","7,424"
"1","812","python3.12","127.0.0.1","nvjet_tst, <""a"">","1","7","(384, 1, 1)",\
"(2, 66, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","1,180,160,256"
"1","812","python3.12","127.0.0.1","nvjet_tst, <""a"">","1","7","(384, 1, 1)",\
"(2, 66, 1)","0","9.0","Command line profiler metrics","dram__bytes_write.sum","Mbyte","134.50"
"1","812","python3.12","127.0.0.1","nvjet_tst, <""a"">","1","7","(384, 1, 1)",\
"(2, 66, 1)","0","9.0","Command line profiler metrics","lts__t_bytes.sum","byte","8,100,000,000"
"1","812","python3.12","127.0.0.1","nvjet_tst, <""a"">","1","7","(384, 1, 1)",\
"(2, 66, 1)","0","9.0","Command line profiler metrics","gpu__time_duration.sum","ns","1,425,600"
==PROF== Disconnected from process 812
"""
TOLD = [
    {"stage": {"cores": 132, "machine": "h200-2"}},
    {"gemm": "cb1", "m": 8192, "n": 8192, "k": 8192, "sms": 132, "marked": True},
]


def test_a_list_of_ncu_becomes_a_row() -> None:
    kernels = counters.kernels_of(LISTED)
    assert [(one.name[-9:], one.blocks) for one in kernels] == [
        ("nel(long)", 1),
        ('st, <"a">', 132),
    ]
    stage, row = counters.rows_of(TOLD, kernels, ())
    assert stage == TOLD[0]
    assert (row["dram_read_bytes"], row["dram_write_bytes"]) == (1_180_160_256, 134.5e6)
    assert (row["l2_bytes"], row["time_us"]) == (8.1e9, 1425.6)
    assert row["l2_gbps"] == pytest.approx(8.1e9 / 1425.6e-6 / 1e9, rel=1e-3)
    assert row["op_byte"] == pytest.approx(2 * 8192**3 / 1_314_660_256, rel=1e-3)
    assert (row["bound"], row["bound_by_name"], row["machine_op_byte"]) == ("cb", "cb", 206.0)


def test_a_class_is_by_bytes_and_not_by_name() -> None:
    few = [TOLD[0], TOLD[1] | {"m": 64}]
    row = list(counters.rows_of(few, counters.kernels_of(LISTED), ()))[-1]
    assert (row["bound"], row["bound_by_name"]) == ("mb", "cb")
    wide = list(counters.rows_of(few, counters.kernels_of(LISTED), (1.0, 4800.0, 450.0)))[-1]
    assert wide["bound"] == "cb"


def test_lists_that_are_not_of_what_ran_are_refused() -> None:
    kernels = counters.kernels_of(LISTED)
    with pytest.raises(offcore.Error, match="ncu lists 1 launches; there were 3"):
        list(counters.rows_of([*TOLD, TOLD[1], TOLD[1]], kernels, ()))
    lacking = LISTED.replace('"8,100,000,000"', '"n/a"')
    last = list(counters.rows_of(TOLD, counters.kernels_of(lacking), ()))[-1]
    assert last == {"failed": "cb1 on 132 SMs: ncu has no value of lts__t_bytes.sum"}
    last = list(counters.rows_of(TOLD, kernels[:1], ()))[-1]
    assert last == {"failed": "cb1 on 132 SMs: ncu lists no kernel"}
    for wrong in ('"Mbyte"', '"byte","1,180'):
        with pytest.raises(offcore.Error, match="not ncu's CSV"):
            counters.kernels_of(LISTED.replace(wrong, '"furlong","1,180'))


@pytest.fixture
def with_ncu(tmp_path: Path) -> dict[str, str]:
    """Environment of a machine of two GPUs where ncu is."""
    program = tmp_path / "bin" / "ncu"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_ncu.__file__} "$@"\n', "utf-8")
    program.chmod(0o755)
    return {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}


def characterise(gpu_cli, env, *words):
    return gpu_cli("overlap", "characterise", "--backend", "cuda", "--counters", *words, env=env)


def test_the_command(gpu_cli, with_ncu: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "counters.jsonl"
    ran = characterise(gpu_cli, with_ncu, "--json", file)
    assert ran.status == 0, ran.err
    rows = read_records(file)
    found = {(row["gemm"], row["sms"]): row for row in rows if "measure" in row}
    # 13 GEMMs less the two that do not fit, on all SMs and on 8, 16 and 32 fewer.
    assert len(found) == 11 * 4
    assert found["cb1", 124]["blocks"] == 124
    assert found["cb1", 124]["time_us"] > found["cb1", 132]["time_us"]
    assert found["m64_mb1", 132]["kernels"] == 2
    assert all(row["runs"] == counters.RUNS and row["commit"] for row in found.values())
    assert "failed cb5: MemoryError: out of memory" in ran.err
    assert "failed cb1 on 68 SMs: RuntimeError: cublasSetSmCountTarget(68)" in ran.err
    line = next(one for one in ran.out.splitlines() if "m64_cb1 " in one)
    assert line.split()[:3] == ["m64_cb1", "mb", "mb"]
    if not needs.missing("matplotlib"):
        to = tmp_path / "6.png"
        ran = gpu_cli("overlap", "plot", file, "--figure", "6", "--out", to)
        assert ran.status == 0, ran.err
        assert to.stat().st_size > 5000


def test_what_keeps_counters_from_being_read(gpu_cli, with_ncu, tmp_path: Path) -> None:
    for how, words in {
        "refused": "unavailable: this user may not read the GPU's counters (ERR_NVGPUCTRPERM)",
        "killed": "unavailable: ncu exited with status 9\n  what the process itself prints",
        "silent": "unavailable: no kernel ran",
    }.items():
        ran = characterise(gpu_cli, with_ncu | {"FAKE_NCU": how}, "--gemms", "cb1")
        assert ran.status == 1
        assert words in ran.err
    ran = characterise(gpu_cli, {"PATH": str(tmp_path)})
    assert "unavailable: no ncu, which reads the counters" in ran.err
    other = {"OFFCORE_FAKE_CUDA_NAME": "NVIDIA L40S"}
    assert "no peaks of nvidia-2 are known" in characterise(gpu_cli, with_ncu | other).err
    given = characterise(gpu_cli, with_ncu | other, "--gemms", "cb1", "--peaks", "362,864,32")
    assert given.status == 0, given.err
    for wrong in (("--out", tmp_path / "x.json"), ("--gemms", "cb9"), ("--peaks", "1,2")):
        assert characterise(gpu_cli, with_ncu, *wrong).status != 0
