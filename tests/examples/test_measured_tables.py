"""Tables that are written by hand, cell by cell, from the rows that their pages name."""

import re
from pathlib import Path
from typing import Any

import pytest

from offcore.tools.overlap import summary
from offcore.tools.records import read_records

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]
# Of KV transfers: the driver's calls, and all that `auto` is compared with.
CALLS = ("batch", "batch32", "batch64", "batch256", "loop")
PEERS = (*CALLS, "kernel", "torch", "batch-copy")


def table(page: str, head: str) -> list[list[str]]:
    """The cells of the table whose head begins so."""
    lines = (ROOT / "docs" / page).read_text("utf-8").splitlines()
    [start] = [number for number, line in enumerate(lines) if line.startswith(head)]
    body = lines[start + 2 :]
    end = next(number for number, line in enumerate([*body, ""]) if not line.startswith("|"))
    assert end > 1
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body[:end]]


def page_of(name: str) -> str:
    """A page's text without its line breaks."""
    return " ".join((ROOT / "docs" / name).read_text("utf-8").split())


def rows(name: str, **wanted: Any) -> list[Row]:
    found = read_records(RESULTS / name)
    return [row for row in found if all(row.get(key) == one for key, one in wanted.items())]


def whole(value: float) -> str:
    return f"{round(value):,d}"


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"


def test_scaling_has_the_recorded_plans() -> None:
    made = [
        [whole(row["ranks"]), f"`{row['variant']}`",
         *(whole(row[name]) for name in ("commands", "copies", "signals", "engines")),
         seconds(row["plan_cpu_s"]), f"{whole(row['simulated_us'])} us",
         seconds(row["simulation_cpu_s"])]
        for row in rows("scale.jsonl", measure="plan", op="all_gather", machine="nvidia-8")
        if row["variant"] != "b2b"  # as many commands as pcpy's copies, and as long
    ]  # fmt: skip
    assert table("scaling.md", "| ranks | variant | commands") == made


def test_scaling_has_the_recorded_parts_and_choices() -> None:
    text = page_of("scaling.md")
    took = {
        row["ranks"]: 1e6 * row["part_cpu_s"]
        for row in rows("scale.jsonl", measure="part", variant="pcpy")
    }
    assert (
        f"`pcpy` takes {took[72]:.1f} us at 72 ranks, {took[256]:.1f} at 256 and "
        f"{took[1024]:.0f} at 1,024"
    ) in text
    [choice] = rows("scale.jsonl", measure="choice", ranks=1024)
    assert f"no tuned table ({choice['choice_cpu_s']:.1f} s at 1,024 ranks" in text


def test_scaling_has_the_recorded_meetings_and_broadcasts() -> None:
    made = [
        [str(row["ranks"]), *(f"{1e3 * row[name]:.0f} ms" for name in ("time_s", "cpu_s"))]
        for row in rows("scale.jsonl", measure="meet")
    ]
    assert table("scaling.md", "| processes |") == made
    made = [
        [whole(row["hosts"]), f"{row['simulated_us'] / 1e3:.2f} ms",
         f"{row['switch_bytes'] / 1e9:,.1f} GB"]
        for row in rows("scale.jsonl", measure="broadcast")
    ]  # fmt: skip
    assert table("scaling.md", "| hosts | time |") == made


def test_kv_has_the_decodes_beside_loads() -> None:
    text = page_of("measurements/kv.md")
    of = {row["arm"]: row for row in rows("serving-h200-models.jsonl", hit="beside")}
    slower = {arm: f"{row['slowdown']:.3f}" for arm, row in of.items()}
    rate = {arm: f"{row['loads_gb_s']:.1f}" for arm, row in of.items()}
    assert (
        f"took {slower['one copy']} times as long during contiguous copies to the GPU at "
        f"{rate['one copy']} GB/s"
    ) in text
    assert (
        f"During loads without SMs it took {slower['ours']} ({rate['ours']} GB/s, the cache in one "
        f"allocation) and {slower['separate']} ({rate['separate']}, a tensor per layer), during "
        f"batch calls {slower['batch']} ({rate['batch']}), packed loads {slower['packed']} "
        f"({rate['packed']}), the engine's copies {slower['engine']} ({rate['engine']}) and the "
        f"kernel {slower['kernel']} ({rate['kernel']})"
    ) in text


def test_kv_has_the_times_of_other_models() -> None:
    text = page_of("measurements/kv.md")
    found = rows("serving-h200-breakdown.jsonl")
    of = {(r["prompt"], r["arm"]): f"{r['ttft_ms']:.0f}" for r in found}
    told = {
        prompt: [of[prompt, arm] for arm in ("ours", "engine", "packed", "gpu")]
        for prompt in (8192, 4096)
    }
    least, most = (
        [f"{end(r['ttft_ms'] for r in found if r['prompt'] == prompt):.0f}" for prompt in told]
        for end in (min, max)
    )
    assert (
        f"all arms took {least[0]} to {most[0]} ms with 8,192 tokens (default {told[8192][0]}, "
        f"engine's copies {told[8192][1]}, packed {told[8192][2]}, GPU's cache {told[8192][3]}) "
        f"and {least[1]} to {most[1]} with 4,096 ({', '.join(told[4096])};"
    ) in text
    first, last = (f"{end(r['forward_ms'] for r in found):.0f}" for end in (min, max))
    assert f"the launches of the first forward pass take {first} to {last} ms" in text
    many = {
        (r["arm"], r["commit"]): (whole(r["ttft_ms"]), whole(r["tokens_s"]))
        for r in rows("serving-h200-batch32.jsonl")
    }
    own, ours = (many[arm, "77b23ee0"] for arm in ("engine", "ours"))
    assert f"copies {own[0]} ms and {own[1]} tokens a second, the default {ours[0]} ms" in text
    assert f"the default {ours[0]} ms and {ours[1]} (77b23ee0)" in text
    own, call, cache, anew = (
        many[arm, "5ec9ad0a"] for arm in ("engine", "batch", "gpu", "recompute")
    )
    assert (
        f"the engine's copies {own[0]} ms and {own[1]}, one batch call {call[0]} and {call[1]}, "
        f"the GPU's cache {cache[0]} and {cache[1]}, recomputing {anew[0]} and {anew[1]}"
    ) in text


def test_kv_has_the_launches_beside_transfers() -> None:
    of = {
        (r["page_bytes"] >> 11, r["direction"], r["impl"]): r
        for r in rows("cuda-kv-launches.jsonl", other="launch")
    }
    for what, *cells in table("measurements/kv.md", "| page of K or V | alone"):
        [(kib, direction)] = re.findall(r"(\d+) KiB, (\w+)", what)
        made = [
            f"{one['median_us']:.1f} us, {one['most_us'] / 1e3:.2f} ms"
            for way in ("nothing", "offcore", "zero-sm", "batch", "batch64")
            for one in [of[int(kib), direction, way]]
        ]
        assert cells == made, what


def test_what_is_said_of_layouts_was_recorded() -> None:
    found = rows("cuda-kv-layouts-h200-third.jsonl")
    of: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in found:
        names = ("step", "layout", "page_bytes", "blocks", "direction")
        of.setdefault(tuple(row[name] for name in names), {})[row["impl"]] = row
    shown = {case: ways for case, ways in of.items() if "torch" in ways and case[4] != "both"}
    best = [
        min(ways[way]["time_us"] for way in PEERS if way in ways) / ways["offcore"]["time_us"]
        for ways in shown.values()
    ]
    text = page_of("measurements/kv.md")
    near = sum(one >= 0.98 for one in best)
    assert f"0.98 or more of the fastest peer in {near} of these {len(best)} cases" in text
    assert f"{near} of {len(best)}, layers outermost" in page_of("papers.md")
    spent = [
        [1e9 * (row["sm_ms"] or 16 * row["time_us"] / 1e3) / row["bytes"] for row in these]
        for these in (
            [w["offcore"] for w in shown.values() if w["offcore"]["path"] == "packed"],
            [ways["kernel"] for ways in shown.values()],
        )
    ]
    packed, kernel = (f"{min(one):.0f} to {max(one):.0f}" for one in spent)
    assert f"took {packed} SM-milliseconds a GB; the kernel took {kernel}" in text
    apart = {
        case: ways
        for case, ways in shown.items()
        if case[0] == "alone" and case[1] in ("kv-apart", "kv-tensors", "tensors")
    }
    told = {}
    for blocks in (64, 256):
        ratios = [
            ways["zero-sm"]["gbps"] / max(ways[way]["gbps"] for way in CALLS if way in ways)
            for case, ways in apart.items()
            if case[3] == blocks
        ]
        told[blocks] = f"{blocks} blocks {min(ratios):.2f} to {max(ratios):.2f} times"
    assert f"jobs of {told[256]}, of {told[64]}" in page_of("roadmap.md")
    link = {
        (ways["offcore"]["page_bytes"] >> 11, case[3], case[4]): ways["offcore"]
        for case, ways in shown.items()
        if case[:2] == ("alone", "kv-apart")
    }
    shares = {
        place: f"{100 * row['gbps'] / row['ceiling_gbps']:.0f}" for place, row in link.items()
    }
    loads, stores = ([shares[kib, 64, to] for kib in (8, 16, 32)] for to in ("load", "store"))
    assert f"load at {loads[0]}, {loads[1]} and {loads[2]} % of one contiguous copy" in text
    assert f"are stored at {stores[0]}, {stores[1]} and {stores[2]} %" in text


def test_kv_has_the_rates_of_engines_rows() -> None:
    name = "cuda-kv-rows-h200.jsonl"
    commits = {"page-first": "c361e9b6", "chunks": "ad302a0b"}
    for layout, blocks, _, ours, submit, *others in table("measurements/kv.md", "| host's rows |"):
        found = rows(name, layout=layout, blocks=int(blocks))
        # batch_copy's rows of chunks are of the first run, as the page says.
        by = {"batch-copy": "c361e9b6"}
        now = [r for r in found if r["commit"] == by.get(r["impl"], commits[layout])]
        of = {(r["impl"], r["direction"]): r for r in now}
        told = (f"{of['offcore', to]['submit_us']:.0f}" for to in ("store", "load"))
        assert submit == ", ".join(told) + " us"
        assert [ours, *others] == [
            ", ".join(f"{of[way, to]['gbps']:.0f}" for to in ("store", "load"))
            for way in ("offcore", "zero-sm", "batch32", "batch-copy", "torch")
        ]


def test_kv_has_the_rates_of_lmcaches_objects() -> None:
    found = rows("cuda-kv-rows-h200.jsonl", layout="chunks", commit="488a1cdd")
    [run] = {row["run"] for row in found if row["impl"] == "lmcache"}
    ways = ("offcore", "lmcache", "batch32", "batch-copy", "torch")
    for blocks, _, *cells in table("measurements/kv.md", "| blocks | | `auto`, the bench's"):
        of = {
            (r["impl"], r["direction"]): f"{r['gbps']:.0f}"
            for r in found
            if (r["run"], r["blocks"]) == (run, int(blocks))
        }
        assert cells == [f"{of[way, 'store']}, {of[way, 'load']}" for way in ways], blocks


def test_kv_has_the_times_of_callers() -> None:
    shown = table("measurements/kv.md", "| layout | 64 blocks: store, load |")
    found = rows("cuda-kv-rows-h200.jsonl", commit="0fa1d628", impl="offcore")
    of = {(r["layout"], r["blocks"], r["direction"]): f"{r['submit_us']:.0f}" for r in found}
    assert shown == [
        [layout, *(", ".join(of[layout, n, to] for to in ("store", "load")) for n in (64, 256))]
        for layout in ("layers", "kv-apart", "chunks", "page-first")
    ]


def test_kv_has_the_times_of_transformers() -> None:
    arms = ("recompute", "gpu", "loop", "batch", "kernel", "separate", "packed", "ours")
    found = rows("serving-h200-peers.jsonl", prompt=4096, batch=8)
    of = {(r["arm"], r["hit"]): f"{r['ttft_ms']:.0f}, {r['tokens_s']:.0f}" for r in found}
    shown = table("measurements/kv.md", "| from the host | recompute | GPU's")
    assert [cells[0] for cells in shown] == ["100 %", "70 %", "50 %", "0 %"]
    for hit, *cells in shown:
        part = int(hit.removesuffix(" %"))
        made = [of.get((arm, part), "") for arm in arms]
        made[0] = of["recompute", 0] if part == 100 else ""  # it has no part in the host's memory
        assert cells == made, hit


def test_overlap_has_the_recorded_reductions() -> None:
    name = "overlap-h200-2-reductions.jsonl"
    names = ("base", "sp", "rp", "sp_rp", "ConCCL", "ConCCL_rp")
    of = summary.by_combination(rows(name))
    sizes = {"896M": 896 << 20, "256M": 256 << 20, "1G": 1 << 30}
    met: list[dict[str, Any]] = []  # of one operation, whose means come behind them
    for what, *cells in table("measurements/overlap.md", "| | NCCL | Offcore | ideal |"):
        if what == "means":
            made = [whole(100 * summary.share_of_means([one[x] for one in met])) for x in names]
            assert cells == ["", "", "", *made]
            assert len(met) == 4
            met = []
            continue
        kind, gemm, size = what.split()
        one = of[kind.replace("-", "_"), gemm, sizes[size]]
        first = one["base"]
        assert cells == [
            *(whole(first[f"{way}_us"]) for way in ("kernel", "engines")),
            f"{first['ideal_published']:.2f}",
            *(whole(100 * one[x]["share"]) for x in names),
        ], what
        met.append(one)


@pytest.mark.parametrize(
    ("head", "name", "names"),
    [
        ("| | sp | rp | sp_rp | NCCL's", "overlap-h100-2-quick.jsonl",
         ("sp", "rp", "sp_rp", "nccl-ce", "ConCCL", "ConCCL_rp")),
        ("| | serial | base |", "overlap-h200-2-matched.jsonl",
         ("serial", "base", "sp", "rp", "sp_rp", "nccl-ce", "ConCCL", "ConCCL_rp")),
    ],
)  # fmt: skip
def test_overlap_has_the_recorded_means(head: str, name: str, names: tuple[str, ...]) -> None:
    of = summary.by_combination(rows(name))
    for what, *cells in table("measurements/overlap.md", head):
        op = what.split(" (")[0].replace("-", "_")
        for way, cell in zip(names, cells, strict=True):
            found = [one[way] for case, one in of.items() if case[0] == op and way in one]
            least = summary.share_of_means(found, "ideal_least") if found else 0
            made = whole(100 * summary.share_of_means(found)) if found else "-"
            made += f" ({whole(100 * least)})" if "matched" in name else ""
            made += f", of {len(found)}" if "matched" in name and way == "nccl-ce" else ""
            assert cell == made, (what, way)


def test_overlap_has_the_recorded_dependent_gemms() -> None:
    shown = table("measurements/overlap.md", "| m x n x k |")
    found = rows("overlap-h200-2-dependent.jsonl", measure="matmul")
    of = {(r["gemm"], r["op"], r["form"]): r for r in found}
    assert {(gemm, op) for gemm, op, _ in of} == {
        (cells[0].split(":")[0], cells[1].replace("-", "_")) for cells in shown
    }
    for what, kind, alone, serial, chunks, placed, fused in shown:
        of_this = {form: r for (gemm, op, form), r in of.items()
                   if (gemm, op) == (what.split(":")[0], kind.replace("-", "_"))}  # fmt: skip
        row = of_this["gemm alone"]
        assert what.endswith(f": {row['m']} x {row['n']} x {row['k']}")
        times = (of_this[form]["time_us"] for form in ("gemm alone", "one after the other"))
        assert [alone, serial] == [whole(time) for time in times]
        speeds = {form: f"{r['speedup']:.2f}" for form, r in of_this.items() if r["speedup"]}
        cut = ("offcore, 1 chunk", "offcore, 2 chunks", "offcore, 4 chunks")
        assert chunks == ", ".join(speeds[form] for form in cut), what
        assert [placed, fused] == [speeds.get("offcore, placed", ""), speeds["fused by torch"]]


# Of arithmetic, which a page does beside what was recorded. Of torch's suites: sums of two runs.
DERIVED = {
    ("measurements/cuda.md", "Plain outputs"): {"356", "868", "192", "390", "1,906"},
    ("measurements/cuda.md", "Reductions"): {"688"},
    ("training.md", "Examples"): {"225", "229"},
}
TEXTS = ("measurements/cuda.md", "measurements/kv.md", "measurements/mcast.md", "training.md",
         "gpu-driven.md", "loop.md", "nccl-shim.md", "nixl.md")  # fmt: skip


def numbers(text: str) -> set[str]:
    """Of three digits or more: smaller ones are found in every file."""
    text = re.sub(
        r"^    (?:offcore|python) .*|`[^`]*`|\]\([^)]*\)|\b[\da-f]{7,8}\b|\d{4}-\d\d-\d\d",
        " ",
        text,
        flags=re.M,
    )
    found = re.findall(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?![\w.]*\w)", text)
    return {one.rstrip(",") for one in found if len(re.sub(r"\D", "", one)) >= 3}


def unrecorded(section: str, recorded: str) -> set[str]:
    """Numbers of a section that no number of the records rounds to, K and M aside."""
    values = {float(one.replace(",", "")) for one in re.findall(r"\d[\d,]*(?:\.\d+)?", recorded)}
    lacking = set()
    for one in numbers(section):
        digits = len(one.partition(".")[2])
        value, near = float(one.replace(",", "")), 0.5000001 / 10**digits
        if not any(abs(value - k * of) <= near for of in values for k in (1, 1e3, 1e-3)):
            lacking.add(one)
    return lacking


def test_numbers_are_those_of_the_texts_that_sections_name() -> None:
    held = 0
    for page in TEXTS:
        text = (ROOT / "docs" / page).read_text("utf-8")
        for section in re.split(r"^##+ ", text, flags=re.M)[1:]:
            named = set(re.findall(r"results/([\w.-]+\.(?:txt|jsonl))\)", section))
            if named and all(name.endswith(".txt") for name in named):
                recorded = "".join((RESULTS / name).read_text("utf-8") for name in named)
                heading = section.splitlines()[0]
                lacking = unrecorded(section, recorded)
                assert lacking == DERIVED.get((page, heading), set()), (page, heading)
                held += len(numbers(section))
    assert held > 100


def test_a_number_that_was_not_recorded_is_found() -> None:
    assert unrecorded("a load takes 1,234 us, 5.678 before (`x 999`)", "1234.4 and 5.679") == {
        "5.678"
    }
