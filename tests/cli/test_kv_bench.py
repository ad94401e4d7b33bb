"""`offcore kv bench` and `offcore kv plot`, on the host backend and on the stand-in driver; and the
check of bytes behind their column #wrong, which has to find what is wrong."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from offcore.tools import plot
from offcore.tools.kv.bench import Clock, Plan, run
from offcore.tools.kv.case import DIRECTIONS, LAYOUTS, Case
from offcore.tools.kv.models import MODELS, Geometry
from offcore.tools.kv.peers import open_way
from offcore.tools.kv.plot import rows_figure, speedups
from offcore.tools.records import read_records

ROOT = Path(__file__).parents[2]
FIELDS = {
    *("impl", "direction", "layout", "page_bytes", "layers", "blocks", "gbps", "ceiling_gbps"),
    *(
        "submit_us",
        "gemm_slowdown",
        "ceiling_gemm_slowdown",
        "wrong",
        "run",
        "versions",
        "commit",
        "date",
        "model",
    ),
}


def test_geometries() -> None:
    known = {name: (one.layers, one.page_bytes >> 10) for name, one in MODELS.items()}
    assert known["qwen2.5-0.5b"] == (24, 8)
    assert known["qwen2.5-1.5b"] == (28, 16)
    assert known["qwen2.5-7b"] == (28, 32)
    assert known["qwen2.5-14b"] == (48, 64)
    assert known["qwen2.5-32b"] == (64, 64)
    assert known["llama-3.2-1b"] == (16, 32)
    assert known["llama-3.2-3b"] == (28, 64)
    assert known["llama-3.1-8b"] == (32, 64)
    assert MODELS["qwen2.5-0.5b"].blocks(4096) == 256
    assert MODELS["qwen2.5-0.5b"].blocks(4097) == 257


@pytest.mark.needs("matplotlib")
def test_rows_and_a_plot_without_a_gpu(offcore_cli, tmp_path) -> None:
    rows = tmp_path / "kv.jsonl"
    words = ("--model", "qwen2.5-0.5b,qwen2.5-1.5b", "--tokens", "64", "--backend", "host")
    words += ("--direction", "load,store,both", "--baseline", "loop,batch,vllm", "--iters", "2")
    picture = tmp_path / "kv.png"
    ran = offcore_cli("kv", "bench", *words, "--json", rows, "--plot", picture)
    assert ran.status == 0, ran.err
    assert "batch is absent: backend host has no driver" in ran.out
    found = [json.loads(line) for line in rows.open()]
    absent = {row["impl"] for row in found if "absent" in row}
    assert absent == {"batch", "vllm"}
    measured = [row for row in found if "absent" not in row]
    assert {(r["impl"], r["model"], r["direction"]) for r in measured} == {
        (impl, model, direction)
        for impl in ("offcore", "loop")
        for model in ("qwen2.5-0.5b", "qwen2.5-1.5b")
        for direction in DIRECTIONS
    }
    for row in measured:
        assert row.keys() >= FIELDS
        assert (row["wrong"], row["gemm_slowdown"], row["blocks"]) == (0, None, 4)
        assert row["ceiling_gemm_slowdown"] is None
        assert min(row["gbps"], row["ceiling_gbps"], row["submit_us"]) > 0
    assert picture.stat().st_size > 0
    figure = tmp_path / "f.png"
    assert offcore_cli("kv", "plot", rows, "--figure", "16", "--out", figure).status == 0
    assert figure.stat().st_size > 0
    ran = offcore_cli("kv", "plot", rows, "--figure", "17", "--out", figure)
    assert (ran.status, "several requests at once" in ran.err) == (1, True)


def test_cases_without_a_model_are_told_apart() -> None:
    """By their pages, layers and blocks: none stands for another one."""
    same = {"run": "r", "model": "", "tokens": None, "direction": "load", "layout": "layers"}
    rows = [
        same
        | {"impl": impl, "layers": layers, "page_bytes": page, "blocks": blocks, "time_us": time}
        | {"requests": 1}
        for layers, page, blocks, own in ((28, 8192, 64, 1), (28, 16384, 64, 2), (1, 8192, 256, 4))
        for impl, time in (("loop", 8), ("offcore", own))
    ]
    assert speedups(rows, 16) == {
        "load": {
            "28 x 8K\n64 blocks": {"offcore": 8},
            "28 x 16K\n64 blocks": {"offcore": 4},
            "1 x 8K\n256 blocks": {"offcore": 2},
        }
    }


@pytest.mark.needs("matplotlib")
def test_a_plot_of_many_cases_can_be_read() -> None:
    """It is no wider than a page or a screen, and bars keep the room for their numbers."""
    records = read_records(ROOT / "benchmarks" / "results" / "cuda-kv.jsonl")
    figure = rows_figure(records, 16)
    width, height = figure.get_size_inches() * 140
    assert max(width, height) < 2500
    assert figure.get_suptitle() == "KV blocks: one request, 1 x NVIDIA H200"
    simulated = rows_figure([{**row, "backend": "sim"} for row in records], 16)
    assert simulated.get_suptitle() == "KV blocks: one request, simulated"
    told = [text.get_text() for axes in figure.axes for text in axes.get_xticklabels()]
    assert len(told) == sum(map(len, speedups(records, 16).values()))
    for axes in figure.axes:
        groups = len(axes.get_xticklabels())
        assert 1 <= groups <= 10
        inches = axes.get_window_extent().width / figure.dpi
        assert inches / (axes.get_xlim()[1] - axes.get_xlim()[0]) > 0.7
    plot.pyplot().close(figure)


def test_what_cannot_be_measured(offcore_cli) -> None:
    ran = offcore_cli("kv", "bench", "--backend", "host", "--with-gemm")
    assert (ran.status, "unsupported: --with-gemm needs a GPU" in ran.err) == (1, True)
    ran = offcore_cli("kv", "bench", "--backend", "sim")
    assert (ran.status, "on cuda and host" in ran.err) == (1, True)
    for words in (("--model", "gpt-9"), ("--tokens", "0"), ("--baseline", "nccl")):
        assert offcore_cli("kv", "bench", *words).status == 2


def test_every_way_on_a_gpu(gpu_cli, tmp_path) -> None:
    rows = tmp_path / "kv.jsonl"
    words = ("--model", "qwen2.5-0.5b", "--tokens", "32", "--iters", "1", "--requests", "2")
    words += ("--baseline", "loop,batch,kernel,vllm,triton", "--direction", "load,store,both")
    ran = gpu_cli("kv", "bench", "--backend", "cuda", *words, "--json", rows)
    assert ran.status == 0, ran.err
    found = [json.loads(line) for line in rows.open()]
    assert {row["impl"] for row in found if "absent" in row} == {"vllm", "triton"}
    assert "vllm is absent: it needs torch with a GPU" in ran.out
    measured = [row for row in found if "absent" not in row]
    assert {row["impl"] for row in measured} == {"offcore", "loop", "batch", "kernel"}
    for row in measured:
        assert (row["wrong"], row["requests"]) == (0, 2)
        both = row["direction"] == "both"
        paths = {"offcore": {"crossed"} | ({"strided"} if both else set()), "kernel": {"kernel"}}
        assert row["path"] in paths.get(row["impl"], {None})
        if row["impl"] == "offcore":
            assert row["calls"]["strided"] == (8 if both else 4)


def test_what_engines_have_on_the_host(gpu_cli, tmp_path) -> None:
    """SGLang's two planes, and LMCache's chunks, of which the last one is not full."""
    layouts, peers = ("page-first", "chunks"), ("batch-copy", "loop")
    plan = Plan("host", [Geometry("tiny", 3, 512)], blocks=[20], layouts=layouts, rounds=1)
    found = list(run(replace(plan, directions=DIRECTIONS, peers=peers, requests=2)))
    assert [row["wrong"] for row in found] == [0] * 2 * 3 * 3
    rows = tmp_path / "kv.jsonl"
    words = ("--layout", ",".join(layouts), "--tokens", "32", "--iters", "1")
    words += ("--baseline", "batch-copy,packed,loop", "--direction", "load,store")
    ran = gpu_cli("kv", "bench", "--backend", "cuda", *words, "--json", rows)
    assert ran.status == 0, ran.err
    assert {json.loads(line)["path"] for line in rows.open()} == {None, "packed"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_wrong_bytes_are_found(layout: str, direction: str) -> None:
    """Nothing copied, one byte too many or one that is off: each counts."""
    geometry = Geometry("tiny", 3, 512)
    case = Case("host", geometry, layout, 5, both=direction == "both")
    way, clock = open_way("offcore", case, 10.0), Clock("host", 10.0)

    def copied(turn: int) -> list[np.ndarray]:
        case.refresh(turn)
        before = case.rows()
        clock.measure(way, direction)
        return before

    assert case.wrong(direction, copied(1)) == 0
    case.refresh(2)
    missing = case.wrong(direction, case.rows())
    assert missing > 0.98 * case.nbytes
    assert case.wrong(direction, copied(3)) == 0
    before = copied(4)
    memory = case._memories[-1].tensor(0, (16,))
    memory[7] ^= 1
    case.parts(case.named(direction)[0][1][2])[0][0, 100] ^= 1
    assert case.wrong(direction, before) == 2
    assert case.wrong(direction, copied(5)) == 0
    way.close()
    case.close()


def test_blocks_and_rows_are_scattered() -> None:
    """Nothing that is measured may be contiguous by its order."""
    plan = Plan("host", [Geometry("tiny", 2, 512)], blocks=[64])
    geometry, layout, blocks, _ = next(iter(plan.cases()))
    case = Case("host", geometry, layout, blocks, both=True)
    for named in (*case.loads[0], *case.stores[0]):
        assert len(set(named.tolist())) == 64
        assert (np.diff(named) == 1).sum() < 8
    assert not set(case.loads[0][0]) & set(case.stores[0][0])
    assert not set(case.loads[0][1]) & set(case.stores[0][1])
    case.close()
    assert [row["impl"] for row in run(plan)] == ["offcore"]
