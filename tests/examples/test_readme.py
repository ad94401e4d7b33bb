"""The numbers of the README's first screen, each made of the rows that it stands for."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from offcore.sizes import format_bytes
from offcore.tools.bench import compare
from offcore.tools.overlap import summary
from offcore.tools.records import read_records

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/performance.md")


def rows(name: str) -> list[dict[str, Any]]:
    return read_records(RESULTS / name)


def text(name: str) -> str:
    return " ".join((ROOT / name).read_text("utf-8").split())


def reduction(op: str, size: str) -> tuple[str, str]:
    """Ours and NCCL's time, 12 SMs and NCCL as it chooses: the first of the file's tables."""
    found = re.search(
        rf"^ +{op} +{size} +([\d.]+) +[\d.]+ +[\d.]+ +([\d.]+)",
        (RESULTS / "reduce-h100-2.txt").read_text("utf-8"),
        re.M,
    )
    assert found is not None
    ours, nccl = (f"{float(one):.0f} us" for one in found.groups())
    return ours, nccl


def reductions() -> list[str]:
    ours, nccl = reduction("reduce_scatter", "256M")
    told = [f"256 MiB in bf16: {ours} | NCCL: {nccl}", f"256 MiB bf16 | {ours} | NCCL {nccl}"]
    for size, named in (("256M", "256 MiB"), ("64K", "64 KiB")):
        ours, nccl = reduction("all_reduce", size)
        told.append(f"all-reduce, {named} bf16 | {ours} | NCCL {nccl}")
    return told


def steps() -> list[str]:
    """Of FSDP2 and DDP, ours and NCCL's."""
    words = (RESULTS / "train-h200-2.txt").read_text("utf-8")

    def ms(kind: str, arm: str) -> float:
        found = re.search(rf"^ +{kind} +{arm} +([\d.]+)", words, re.M)
        assert found is not None
        return float(found[1])

    ratios = [float(one) for one in re.findall(r"^ +\d+ +offcore .* ([\d.]+)$", words, re.M)[:2]]
    longer = [f"{100 / ratio - 100:.0f}" for ratio in sorted(ratios, reverse=True)]
    return [
        f"takes {longer[0]} to {longer[1]} % longer than with NCCL",
        f"4,096 tokens | {ms('4096', 'offcore'):.0f} ms | NCCL {ms('4096', 'own'):.0f} ms",
        f"1,024 tokens | {ms('ddp', 'offcore'):.0f} ms | NCCL {ms('ddp', 'own'):.0f} ms",
    ]


def kv() -> list[str]:
    return [*kv_of_one_tensor(), *kv_of_a_tensor_a_layer()]


def kv_of_one_tensor() -> list[str]:
    of = {
        row["impl"]: row
        for row in rows("cuda-kv.jsonl")
        if (row["step"], row["page_bytes"], row["direction"], row["blocks"])
        == ("pages", 32 << 10, "load", 256)
    }
    ours = of["offcore"]
    share = f"{100 * ours['gbps'] / ours['ceiling_gbps']:.0f} % of the link"
    slower = of["batch"]["time_us"] / ours["time_us"]
    return [
        f"32 KiB pages | {ours['gbps']:.1f} GB/s, {share} | one batch call of the driver: "
        f"{slower:.2f} times as long"
    ]


def kv_of_a_tensor_a_layer() -> list[str]:
    """A block's K and V, of 16 KiB each, are two pages here and one `page_bytes`."""
    of = {
        row["impl"]: row
        for row in rows("cuda-kv-layouts-h100.jsonl")
        if (row.get("step"), row.get("layout"), row.get("page_bytes"), row.get("direction"))
        == ("alone", "kv-apart", 32 << 10, "load")
        and row["blocks"] == 256
    }
    ours = of["offcore"]
    batch = max(row["gbps"] for name, row in of.items() if name.startswith("batch"))
    return [
        f"a tensor a layer: {ours['gbps']:.1f} GB/s, by {ours['sms']} SMs | the driver's batch "
        f"calls: {batch:.1f} GB/s at best; a kernel on 16 SMs: {of['kernel']['gbps']:.1f}"
    ]


def overlap() -> list[str]:
    told = []
    for op, form in (("all_gather", "all-gathers"), ("all_to_all", "all-to-alls")):
        of = summary.by_combination(rows("overlap-h200-2.jsonl"))
        cases = [one for case, one in of.items() if case[0] == op]
        names = ("sp", "rp", "sp_rp", "base", "ConCCL")
        cases = [one for one in cases if set(names) <= one.keys()]
        shares = {name: summary.share_of_means([one[name] for one in cases]) for name in names}
        engines = f"{100 * shares.pop('ConCCL'):.0f} %"
        cores = f"{100 * max(shares.values()):.0f} % at best"
        if op == "all_gather":
            told.append(
                f"{form} beside GEMMs: {engines} of the ideal speed-up | NCCL's kernels: {cores} | "
                f"2 x H200, {len(cases)} combinations"
            )
            told.append(
                f"{form} beside GEMMs | {engines} of the ideal speed-up | NCCL's kernels {cores}"
            )
        else:
            told.append(f"{form} beside GEMMs | {engines} of it | NCCL's kernels {cores}")
    return told


def multicast() -> list[str]:
    of = {row["impl"]: row for row in rows("mcast-testbed-188.jsonl")}
    ours, ring = (f"{of[name]['switch_bytes'] / 1e9:.1f} GB" for name in ("offcore", "ring"))
    size = format_bytes(of["offcore"]["bytes"] // of["offcore"]["hosts"]).replace("K", " KiB")
    return [
        f"{size} from each of 188 hosts: {ours} through switch ports | a ring: {ring}",
        f"{size} from each of 188 hosts | {ours} through switches | a ring {ring}",
    ]


def serving() -> list[str]:
    of = {(r["arm"], r["hit"]): r for r in rows("serving-h100.jsonl") if r["model"] == "7b"}
    keys = (("ours", 100), ("engine", 100), ("recompute", 0))
    ours, engine, again = (f"{of[key]['ttft_ms']:,.0f} ms" for key in keys)
    slow, slower = (
        f"{100 * (of[arm, 'beside']['slowdown'] - 1):.0f} %" for arm in ("ours", "engine")
    )
    return [
        f"after {ours}; the serving engine's own copies need {engine}, recomputing {again}",
        f"7B | {ours} | the engine's own copies {engine}, recomputing {again}",
        f"endless loads | {slow} slower | {slower} slower",
    ]


def collectives() -> list[str]:
    times = compare.times_of(rows("cuda-h200-4.jsonl"), "all_gather", 4, True)
    size = 64 << 20
    engines = min(times[name][size] for name in ("nccl-ce", "nccl-ce,eager"))
    large = f"{times['nccl'][size]:.0f} us, its copy engines {engines:.0f} us"
    small = min(times[name][4096] for name in ("promised", "promised,co"))
    return [
        f"64 MiB | {times['promised'][size]:.0f} us, no SM | NCCL's kernels {large}",
        f"4 KiB | {small:.0f} us, no SM | NCCL's kernels {times['nccl'][4096]:.0f} us",
    ]


@pytest.mark.parametrize("made", [reductions, steps, kv, overlap, multicast, serving, collectives])
def test_what_is_told_was_recorded(made: Any) -> None:
    told = {name: text(name) for name in PAGES}
    lines = made()
    assert [line for line in lines if not any(line in of for of in told.values())] == []


def test_every_number_of_the_first_screen_is_held() -> None:
    """A cell of the table has no number that no test above makes."""
    page = (ROOT / "README.md").read_text("utf-8")
    lines = [line for made in (reductions, kv, overlap, multicast) for line in made()]
    table = page.split("## Measured")[1].split("Not everything")[0]
    rows = re.findall(r"^\| ([a-z]+) \| (.*?) \| (.*?) \| .* \|$", table, re.M)
    assert [row[0] for row in rows] == ["training", "serving", "overlap", "multicast"]
    for _, ours, beside in rows:
        found = f"{ours} | {beside}"
        assert any(line.split(" | 2 x")[0] in found for line in lines), found


def test_the_plot_names_what_it_was_measured_on() -> None:
    row = json.loads((RESULTS / "cuda-h200-4.jsonl").read_text("utf-8").splitlines()[0])
    versions = row["versions"]
    page = text("README.md")
    assert versions["gpus"].startswith("4 x NVIDIA H200")
    assert f"NCCL {versions['nccl']} without NVLink multicast, {row['date'][:10]}" in page
