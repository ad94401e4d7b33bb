"""`offcore reproduce` and `offcore explain`, as a user runs them."""

import base64
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

import needs
import offcore
from offcore import _core, machines
from offcore.errors import Error
from offcore.tools import explain
from offcore.tools.papers import driven_figures, driven_model, gpu_driven, reproduce
from offcore.tools.papers.findings import tally
from offcore.tools.papers.latte import figures, rows

ROOT = Path(__file__).parents[2]
NAMES = [f"figure-{n}" for n in (1, 7, 13, 14, 15, 16, 17)] + ["table-2", "table-3"]


def offcore_command(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        (sys.executable, "-m", "offcore.tools.cli", *words),
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, float]:
    needs.require("matplotlib")
    folder = tmp_path_factory.mktemp("reproduced")
    start_s = time.monotonic()
    ran = offcore_command("reproduce", "latte", "--out", "out", "--json", "rows.jsonl", cwd=folder)
    assert ran.returncode == 0, ran.stderr
    return folder, ran.stdout, time.monotonic() - start_s


def test_every_figure_is_there_as_png_and_svg(reproduced: tuple[Path, str, float]) -> None:
    folder, _, took_s = reproduced
    assert [one.name for one in figures.FIGURES] == NAMES
    for name in NAMES:
        png, svg = ((folder / "out" / f"{name}.{kind}").read_bytes() for kind in ("png", "svg"))
        assert png.startswith(b"\x89PNG")
        assert len(png) > 8000
        assert b"<svg" in svg
    assert took_s < 60


def test_the_page_holds_everything_and_needs_nothing(reproduced: tuple[Path, str, float]) -> None:
    folder, _, _ = reproduced
    html = (folder / "out" / "latte.html").read_text("utf-8")
    images = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert len(images) == len(NAMES) == html.count("<img")
    for name, image in zip(NAMES, images, strict=True):
        assert base64.b64decode(image) == (folder / "out" / f"{name}.svg").read_bytes()
    outside = re.sub(r'src="data:[^"]+"', "", html)
    assert not re.search(r"(https?:)?//|<script|@import|<link", outside)
    assert "absolute times are uncertain by about 25 %" in html
    for row in rows.ROWS:
        assert row.claim in html


def test_claims_and_residuals_are_printed(reproduced: tuple[Path, str, float]) -> None:
    folder, out, _ = reproduced
    told = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert {one["key"] for one in told} >= {"L1", "L16", "L20", "P3", "K3"}
    assert all(one["met"] for one in told)
    tally = "none predicted, 47 of 47 fitted, 5 of 5 by construction"
    held_out = "left out of the fit, 29 of 33 ratios are predicted within 15 %"
    for words in ("left out", "wake_ns", "uncertain by about 25 %", tally, held_out):
        assert words in " ".join(out.split())
    html = (folder / "out" / "latte.html").read_text("utf-8")
    for words in (
        tally,
        held_out,
        "4 parameters and 3 assumed constants for 4 numbers",
        "5 parameters and 4 assumed constants for 5 numbers",
        "At the limit of what is allowed: layer_us, cpu_ms",
    ):
        assert words in html


@pytest.mark.needs("matplotlib")
def test_a_model_that_is_wrong_does_not_pass(tmp_path: Path) -> None:
    data = json.loads((ROOT / "machines" / "mi300x-8.json").read_text())
    data["cost"]["doorbell_ns"] *= 3
    (tmp_path / "mi300x-8.json").write_text(json.dumps(data))
    ran = offcore_command("reproduce", "latte", cwd=tmp_path, OFFCORE_MACHINES=str(tmp_path))
    assert ran.returncode == 1
    assert "not met" in ran.stdout
    assert (tmp_path / "reproduce-out" / "latte.html").read_text().count("not met") >= 3


def test_known_papers_are_listed(tmp_path: Path) -> None:
    listed = offcore_command("reproduce", cwd=tmp_path)
    assert listed.stdout.startswith("latte: DMA-Latte's figures 1, 7, 13 to 17 and tables 2 and 3")
    with pytest.raises(offcore.Error, match="unknown paper 'mocha': known are latte") as raised:
        reproduce.run("mocha", tmp_path, None)
    assert raised.value.code == "invalid"


CASES = [
    ("all_gather", "mi300x-8", 8, 4096, True),
    ("all_gather", "mi300x-8", 8, 1 << 28, True),
    ("all_to_all", "mi300x-8", 5, 1 << 20, False),
    ("broadcast", "h200-4", 4, 1 << 16, True),
    ("gather", "host-2", 2, 12345, False),
]


@pytest.mark.parametrize(("op", "machine", "ranks", "nbytes", "in_place"), CASES)
def test_phases_add_up_to_the_simulated_time(
    op: str, machine: str, ranks: int, nbytes: int, in_place: bool
) -> None:
    why = explain.explain(op, machine=machine, ranks=ranks, nbytes=nbytes, in_place=in_place)
    session = _core.Session("sim", machines.load(machine), ranks, phantom=True)
    for case in (why.chosen, why.runner_up, *why.others):
        program = offcore.show_program(
            op,
            machine=machine,
            ranks=ranks,
            nbytes=nbytes,
            variant=case.variant,
            in_place=in_place,
            protocol="promise",
        )
        assert sum(case.phases.values()) == pytest.approx(
            session.run(program).time_ns / 1e3, abs=2e-3
        )
        assert case.syncs == program.counts().syncs
    chosen = offcore.show_program(
        op, machine=machine, ranks=ranks, nbytes=nbytes, in_place=in_place, protocol="promise"
    )
    assert why.chosen.variant == chosen.variant
    assert not why.runner_up.ahead
    assert all(case.time_us >= why.runner_up.time_us for case in why.others if not case.ahead)


def test_explain_says_why(tmp_path: Path) -> None:
    words = ("explain", "all_gather", "--bytes", "256M", "--machine", "mi300x-8", "--in-place")
    shown = offcore_command(*words, cwd=tmp_path)
    assert shown.returncode == 0
    for part in ("pcpy *", "bcst", "control", "schedule", "copy", "sync", "total", "reason"):
        assert part in shown.stdout
    assert "times as fast" in shown.stdout
    assert "uncertain by about 25 %" in shown.stdout
    record = json.loads(offcore_command(*words, "--json", "-", cwd=tmp_path).stdout)
    assert (record["chosen"]["variant"], record["runner_up"]["variant"]) == ("pcpy", "bcst")
    assert record["chosen"]["time_us"] < record["runner_up"]["time_us"]
    refused = offcore_command(
        "explain", "all_gather", "--bytes", "1K", "--ranks", "9", cwd=tmp_path
    )
    assert refused.returncode == 1
    assert refused.stderr == "offcore: invalid: machine mi300x-8 has 8 ranks, not 9\n"


def test_gpu_driven_beside_what_was_recorded(tmp_path: Path) -> None:
    """Every published number has a row; what was not measured says so and counts for nothing."""
    needs.require("matplotlib")
    findings = reproduce.run("gpu-driven", tmp_path, Console(width=200))
    told = {one.published for one in findings}
    assert told > {"39.3 us", "11.2 us", "3.5x", "4.32 us", "9.1x", "4 MB", "3.87x", "3.68"}
    assert told > {"151.6 us", "2.35x", "2.00x", "2.46x", "2.12x", "64.5 %", "9.10 GB/s, 1.82x"}
    assert told > {"1364 (0.32 %), 13 (0.48 %)", "1.96 TB/s; 99.2 %"}
    assert all(one.met is None for one in findings if one.basis == "not measured")
    assert "9 measured, not counted, 13 not measured, not counted" in tally(findings)
    html = (tmp_path / "gpu-driven.html").read_text("utf-8")
    assert "11.42 us (11.04 us at 71dc787)" in html
    for name in ("figure-1", "figure-4", "figure-4-right", "figure-5"):
        assert (tmp_path / f"{name}.png").stat().st_size > 8000
        assert (tmp_path / f"{name}.svg").read_bytes().startswith(b"<?xml")
    assert html.count("<figure>") == len(driven_figures.FIGURES) == 4


LINK, PAYLOAD, ASKED, HEADER = 15754, 128, 512, 24  # bytes a us; of a packet, a read, a header


def writes(payload: int = PAYLOAD) -> float:
    """GB/s of writes alone."""
    return LINK * payload / (payload + HEADER) / 1e3


def writes_and_reads(payload: int = PAYLOAD) -> float:
    """Of writes and requests to read in one direction."""
    return LINK * ASKED / (ASKED + (ASKED // payload + 1) * HEADER) / 1e3


def test_what_was_fitted_to_paper_003() -> None:
    """The machine's file, by arithmetic from what the paper and PCIe say."""
    machine = machines.load("v100-8")
    of, cost, nbytes = machine.requests, machine.cost, 8192
    assert machine.links.link_gbps == pytest.approx(writes(), rel=1e-4)
    assert of.device_gbps == pytest.approx(writes_and_reads(), rel=1e-4)
    assert (of.reach_ns, cost.sync_ns, of.device_trip_ns) == (2500, 2500, 2000)
    assert of.event_ns == 3800 + 11600
    # Fitted: one way, 3.87 times cudaMemcpy, saturated from 8 KiB.
    starts = cost.control_ns + cost.doorbell_ns + cost.wake_ns + cost.fetch_ns + cost.setup_ns
    assert starts == pytest.approx(11200 - 2 * 2500)
    assert cost.setup_ns == pytest.approx(
        3.87 * nbytes / writes_and_reads() - nbytes / writes(), rel=1e-3
    )
    alone_ns = of.device_trip_ns + nbytes / of.device_gbps
    piped = [count * nbytes / alone_ns for count in (of.device_overlap - 1, of.device_overlap)]
    assert piped[0] < 0.99 * of.device_gbps <= piped[1]


def test_the_model_of_paper_003s_engines(tmp_path: Path) -> None:
    """What was fitted agrees by construction; the rest is predicted, and may fail."""
    found = {one.claim: one for one in driven_model.findings(driven_model.Model())}
    assert {one.basis for one in found.values()} == {"fitted", "predicted"}
    assert all(one.met for one in found.values())
    hardware = "model: hardware engine: one way, us"
    assert found[hardware].basis == "predicted"
    # No number that it predicts went into it: of another machine it says something else.
    given = json.loads(machines.path_of("v100-8").read_text("utf-8"))
    given["requests"] |= {"device_trip_ns": 3000, "device_gbps": writes_and_reads(256)}
    for key in ("link_gbps", "egress_gbps", "ingress_gbps", "engine_gbps"):
        given["links"][key] = writes(256)
    path = tmp_path / "v100-8.json"
    path.write_text(json.dumps(given), "utf-8")
    model = driven_model.Model(str(path))
    off = {one.claim: one for one in driven_model.findings(model)}
    assert off[hardware].model == "6.005"
    assert not off[hardware].met
    peaks = "model: hardware engine's peak below the software's (packets of 128 B), %"
    largest = 1 << 24
    memcpy = largest / (machines.load("v100-8").cost.setup_ns + largest / writes(256))
    assert float(off[peaks].model) == pytest.approx(
        100 * (1 - writes_and_reads(256) / memcpy), 0.01
    )
    assert model.software(1 << 10) < model.software(1 << 20) < writes(256)
    assert model.hardware(1 << 24) == pytest.approx(writes_and_reads(256), rel=1e-3)


def test_gpu_driven_needs_what_was_recorded(tmp_path: Path) -> None:
    for read in (gpu_driven.recorded, gpu_driven.trained):
        with pytest.raises(Error, match="is missing"):
            read(tmp_path)
    (tmp_path / "train-h200-2.txt").write_text("8. At 2f72b22: another text", "utf-8")
    with pytest.raises(Error, match="has no such run"):
        gpu_driven.trained(tmp_path)


def test_the_runs_of_training_are_the_recorded_ones() -> None:
    first, last = gpu_driven.trained(Path(__file__).parents[2] / "benchmarks" / "results")
    assert (first.commit, first.nccl_ms, first.offcore_ms, first.speed) == ("2f72b22", 56, 61, 0.92)
    assert (first.nccl_alone, first.nccl_beside, first.offcore_beside) == (76.4, 46.4, 38.4)
    assert (last.commit, last.alone_ms, last.nccl_ms, last.speed) == ("a888dca", 40.7, 48, 0.87)
    assert (last.nccl_alone, last.nccl_beside, last.offcore_beside) == (74, 30, 52)


def test_the_help_names_every_paper(tmp_path: Path) -> None:
    ran = offcore_command("reproduce", "--help", cwd=tmp_path, COLUMNS="200")
    assert ran.returncode == 0
    words = set(re.findall(r"[\w-]+", ran.stdout))
    assert words >= set(reproduce.PAPERS)
