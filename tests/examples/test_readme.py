"""The numbers of the README's first screen, each made of the rows that it stands for."""

import json
import re
from operator import itemgetter
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


def numbers(name: str, line: str) -> list[float]:
    """Of the first such line of a file."""
    found = re.search(line, (RESULTS / name).read_text("utf-8"), re.M)
    assert found is not None
    return [float(one) for one in found.groups()]


def reduction(op: str, size: str) -> tuple[str, str]:
    """Ours and NCCL's time, 12 SMs and NCCL as it chooses: the first of the file's tables."""
    line = rf"^ +{op} +{size} +([\d.]+) +[\d.]+ +[\d.]+ +([\d.]+)"
    ours, nccl = numbers("reduce-h100-2.txt", line)
    return f"{ours:.0f} us", f"{nccl:.0f} us"


def reductions() -> list[str]:
    ours, nccl = reduction("reduce_scatter", "256M")
    of, theirs = reduction("all_reduce", "256M")
    told = [
        f"256 MiB in bf16: reduce-scatter {ours}, all-reduce {of} | NCCL: {nccl}, {theirs}",
        f"256 MiB bf16 | {ours} | NCCL {nccl}",
    ]
    for size, named in (("256M", "256 MiB"), ("64K", "64 KiB")):
        ours, nccl = reduction("all_reduce", size)
        told.append(f"all-reduce, {named} bf16 | {ours} | NCCL {nccl}")
    return told


def small_reductions() -> list[str]:
    """NCCL is faster in both up to 1 MiB."""
    slower = {}
    for op in ("reduce_scatter", "all_reduce"):
        for size in ("4K", "64K", "256K", "1M"):
            line = rf"^ +{op} +{size} +([\d.]+) +[\d.]+ +[\d.]+ +([\d.]+)"
            ours, nccl = numbers("reduce-h100-2.txt", line)
            slower[op, size] = ours / nccl
    assert min(slower.values()) > 1
    return [f"reductions on 2 GPUs: up to 1 MiB, at most {max(slower.values()):.1f} times"]


def trained() -> dict[tuple[str, str, str], tuple[str, str]]:
    """ms and speed of FSDP2's and DDP's steps, by model, tokens and arm: what later sections of
    the file have goes for older."""
    words = (RESULTS / "train-h200-2.txt").read_text("utf-8").split("\n4. At ")[1]
    found = re.findall(
        r"^ +(wide|1b) +(\d+) +(ddp )?(own|gather|offcore) +([\d.]+) +[\d.]+ +([\d.]+)", words, re.M
    )
    return {(model + ddp, tokens, arm): (ms, of) for model, tokens, ddp, arm, ms, of in found}


def steps() -> list[str]:
    """Of FSDP2 and DDP, ours and NCCL's."""
    found = trained()
    ms = {case: time for case, (time, _) in found.items()}
    speed = {(model, tokens): of for (model, tokens, arm), (_, of) in found.items()
             if arm == "offcore"}  # fmt: skip

    def row(model: str, tokens: str) -> str:
        ours, nccl = (f"{float(ms[model, tokens, arm]):.0f}" for arm in ("offcore", "own"))
        return f"{int(tokens):,} tokens | {ours} ms | NCCL {nccl} ms"

    def with_speed(model: str, tokens: str) -> str:
        on = "2 x H200, slow host" if (model, tokens) == ("wide", "4096") else "the same"
        return f"{row(model, tokens)} | {on}; speed {speed[model, tokens]}"

    first_screen = row("wide", "4096").replace("tokens |", "tokens:").replace("NCCL", "NCCL:")
    upto = sorted(of for (model, _), of in speed.items() if model == "1b")
    ddp = sorted(of for (model, _), of in speed.items() if model == "1bddp ")
    return [
        f"FSDP2 steps of a 1.2 B Llama run at {upto[0]} to {upto[-1]} times NCCL's speed, DDP "
        f"steps at {ddp[0]} to {ddp[-1]}.",
        f"FSDP2 step of a 2.9 B Llama, {first_screen}",
        f"FSDP2 step, 2.9 B parameters, {with_speed('wide', '4096')}",
        f"FSDP2 step, 2.9 B parameters, {with_speed('wide', '1024')}",
        f"FSDP2 step, 1.2 B parameters, {with_speed('1b', '1024')}",
        f"FSDP2 step, 1.2 B parameters, {with_speed('1b', '4096')}",
        f"FSDP2 step, 1.2 B parameters, {with_speed('1b', '8192')}",
        f"FSDP2 step, 1.2 B parameters, {with_speed('1b', '16384')}",
        f"DDP step, 1.2 B parameters, {with_speed('1bddp ', '1024')}",
        f"DDP step, 1.2 B parameters, {with_speed('1bddp ', '8192')}",
    ]


def bert() -> list[str]:
    """Of the file's last run: a DDP step, and all-reduces alone and beside layers."""
    name = "train-h200-2.txt"
    line = r"^11\. .*alone ([\d.]+) ms, with NCCL ([\d.]+), offcore \(\S+\) ([\d.]+)"
    alone, nccl, ours = numbers(name, line)
    line = r"^ +32 MiB in pieces of 4 MiB: NCCL (\d+) GB/s alone, (\d+) .*; offcore (\d+), (\d+)"
    rates = [f"{rate:.0f} GB/s" for rate in numbers(name, line)]
    page = text("docs/performance.md")
    pieces = r"4 MiB, alone \| (\d+ GB/s) .* \| NCCL (\d+ GB/s) .* of BERT-Large \| (\d+ GB/s) "
    found = re.search(pieces + r".*? \| NCCL (\d+ GB/s) ", page)
    assert found is not None
    assert found.groups() == (rates[2], rates[0], rates[3], rates[1])
    return [f"384 tokens | {ours} ms | NCCL {nccl} ms; {alone} ms without communication"]


def between_four() -> list[str]:
    """Reductions and plain tensors of 4 GPUs; the slowest of the sizes up to 256 MiB."""
    words = (RESULTS / "reduce-h200-4.txt").read_text("utf-8")
    found = re.findall(
        r"^ +(\w+) +(\d+[MG]) +[-\d.]+ +[-\d.]+ +([\d.]+) +([\d.]+) +([\d.]+)$", words, re.M
    )
    speed = {(op, size): float(of) for op, size, _, _, of in found}
    assert {size for (_, size), of in speed.items() if of < 1} >= {"16M", "64M", "256M"}
    upto = [of for (_, size), of in speed.items() if size != "1G"]
    told = [f"run at {min(upto)} to {max(upto)} from 16 to 256 MiB"]
    for op, size, ours, nccl, _ in found:
        if size == "256M":
            name = op.replace("_", "-")
            told.append(
                f"{name}, 256 MiB bf16, 4 GPUs | {float(ours):,.0f} us | NCCL {float(nccl):,.0f} us"
            )
    line = r"^ +all_gather +256M +\d+ +\d+ +(\d+) +(\d+)$"
    plain, nccl = numbers("tensors-h200-4.txt", line)
    name = "plain tensors, all-gather of 256 MiB, 4 GPUs"
    return [*told, f"{name} | {plain:,.0f} us | NCCL {nccl:,.0f} us"]


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
    kernel = of["kernel"]["gbps"]
    return [
        f"one tensor per layer: {ours['gbps']:.1f} GB/s, with {ours['sms']} SMs | the driver's "
        f"batch calls: {batch:.1f} GB/s at best; a kernel on 16 SMs: {kernel:.1f}"
    ]


def overlap() -> list[str]:
    """NCCL's: the best of its kernels' strategies in each combination."""
    told = []
    for op, form in (("all_gather", "all-gathers"), ("all_to_all", "all-to-alls")):
        of = summary.by_combination(rows("overlap-h200-2.jsonl"))
        cases = [one for case, one in of.items() if case[0] == op]
        names = ("sp", "rp", "sp_rp", "base")
        cases = [one for one in cases if {*names, "ConCCL"} <= one.keys()]
        best = [min((one[name] for name in names), key=itemgetter("time_us")) for one in cases]
        engines = f"{100 * summary.share_of_means([one['ConCCL'] for one in cases]):.0f} %"
        cores = f"{100 * summary.share_of_means(best):.0f} % at best"
        if op == "all_gather":
            told.append(
                f"{form} concurrent with GEMMs: {engines} of the ideal by NCCL's isolated times | "
                f"NCCL's kernels: {cores} | 2 x H200, {len(cases)} combinations"
            )
            told.append(
                f"{form} concurrent with GEMMs | {engines} of the ideal by NCCL's isolated times | "
                f"NCCL's kernels {cores}"
            )
        else:
            told.append(f"{form} concurrent with GEMMs | {engines} of it | NCCL's kernels {cores}")
    return told


def spare() -> list[str]:
    """Out of place, with engines for host copies among those that copy within a GPU."""

    def of(op: str, size: str) -> list[float]:
        """In a window, plain, and NCCL's: the table of the file's section 6."""
        line = rf"^6[.](?:.*\n)+? +{op} +{size} +([\d.]+) +[\d.]+ +([\d.]+) +([\d.]+)$"
        return numbers("cuda-h200-2-spare-engines.txt", line)

    into, plain, nccl = of("all_gather", "256M")
    told = [f"256 MiB: {plain:.0f} us; into a window {into:.0f} us | NCCL: {nccl:.0f} us"]
    for op in ("all_gather", "all_to_all"):
        into, _, nccl = of(op, "256M")
        name = op.replace("_", "-")
        told.append(f"{name} out of place, 256 MiB | {into:.0f} us, no SM | NCCL {nccl:.0f} us")
    speeds = []
    for size in ("64M", "256M", "1G"):
        into, _, nccl = of("all_to_all", size)
        speeds.append(nccl / into)
    least, most = min(speeds), max(speeds)
    return [*told, f"all-to-alls there run at {least:.2f} to {most:.2f} from 64 MiB to 1 GiB"]


def dispatch() -> list[str]:
    told = []
    for tokens in (64, 8192):
        ours, nccl = (
            numbers("gpu-driven-h200-2.txt", rf"^mended +{arm} +{tokens} tokens +([\d.]+)")[0]
            for arm in ("offcore", "nccl")
        )
        head = f"dispatch of {tokens} tokens a rank"
        rest = (", counts on the GPU", ", the host reads the counts,") if tokens == 64 else ("", "")
        told.append(f"{head}{rest[0]} | {ours:.0f} us | NCCL{rest[1]} {nccl:.0f} us")
    return told


def multicast() -> list[str]:
    of = {row["impl"]: row for row in rows("mcast-testbed-188.jsonl")}
    ours, ring = (f"{of[name]['switch_bytes'] / 1e9:.1f} GB" for name in ("offcore", "ring"))
    size = format_bytes(of["offcore"]["bytes"] // of["offcore"]["hosts"]).replace("K", " KiB")
    return [
        f"{size} from each of 188 hosts: {ours} through switch ports | a ring: {ring}",
        f"{size} from each of 188 hosts | {ours} through switches | a ring {ring}",
    ]


def vllm_first_tokens(commit: str, prompt: int = 8192) -> list[str]:
    """Of 8 prompts, by offcore's copies, by vLLM's, both from host memory, and recomputed, ms."""
    of = {
        (r["arm"], r["hit"]): f"{r['ttft_ms']:,.0f}"
        for r in rows("serving-vllm-h200.jsonl")
        if (r["commit"], r["model"], r["prompt"], r["batch"]) == (commit, "7b", prompt, 8)
    }
    return [of["ours", 100], of["own", 100], of["recompute", 0]]


def vllm_half() -> tuple[float, float]:
    """How many times as fast as by vLLM's copies, at least and at most, with half of the blocks."""
    ttft = {
        (r["commit"], r["prompt"], r["arm"]): r["ttft_ms"]
        for r in rows("serving-vllm-h200.jsonl")
        if (r["model"], r["batch"], r["hit"]) == ("7b", 8, 50)
    }
    runs = {(commit, prompt) for commit, prompt, _ in ttft}
    times = [ttft[(*run, "own")] / ttft[(*run, "ours")] for run in runs]
    return min(times), max(times)


def transformers_half_billion() -> tuple[float, float]:
    """How many times as soon the first token comes as with the engine's copies: least, most."""
    of: dict[tuple[str, int], dict[str, float]] = {}
    for name in ("serving-h200.jsonl", "serving-h200-models.jsonl", "serving-h200-breakdown.jsonl"):
        for row in rows(name):
            if (row["model"], row["hit"]) == ("0.5b", 100):
                of.setdefault((name, row["prompt"]), {})[row["arm"]] = row["ttft_ms"]
    assert len(of) == 5
    found = [arms["engine"] / arms["ours"] for arms in of.values()]
    return min(found), max(found)


def serving() -> list[str]:
    """Of all prompts' blocks in host memory: as enabled, with the pages packed, without SMs."""
    first = {r["arm"]: r for r in rows("serving-h200.jsonl") if r["model"] == "7b"}
    second = {
        (r["arm"], r["hit"]): r
        for r in rows("serving-h200-models.jsonl")
        if (r["model"], r["prompt"]) == ("7b", 8192) or r["hit"] == "beside"
    }
    of = {arm: f"{row['ttft_ms']:.0f} ms" for arm, row in first.items()}
    again = f"{second['recompute', 50]['ttft_ms']:,.0f} ms"
    rates = [
        ours["tokens_s"] / own["tokens_s"]
        for ours, own in (
            (first["ours"], first["engine"]),
            (second["ours", 100], second["engine", 100]),
        )
    ]
    slow, slower, least = (
        f"{100 * (second[arm, 'beside']['slowdown'] - 1):.0f} %"
        for arm in ("ours", "engine", "one copy")
    )
    (ours, own, computed), (ours_2, own_2, _) = map(vllm_first_tokens, ("f292fa4d", "488a1cdd"))
    short, short_own, short_again = vllm_first_tokens("f292fa4d", 4096)
    return [
        f"takes {ours} and {ours_2} ms in two runs, compared with {own} and {own_2} ms for its own",
        f"vLLM 0.26 | {ours} ms; in another run {ours_2} ms | vLLM's own copies {own} ms; "
        f"{own_2} ms; recomputing {computed} ms",
        f"4,096 tokens | {short} ms | vLLM's own copies {short_own} ms; "
        f"recomputing {short_again} ms",
        f"7B | {of['ours']}; pages packed by SMs {of['packed']} | copies as in "
        f"`OffloadingManager` {of['engine']}; recomputing {again}",
        "tokens a second {:.2f} and, in a second run, {:.2f} times as many".format(*rates),
        f"continuous loads, transformers | without SMs {slow} slower | {slower} slower",
        f"`OffloadingManager`; {least} during back-to-back contiguous copies",
        "come {:.2f} to {:.2f} times as fast in vLLM (7B, half the KV in host memory), "
        "{:.2f} to {:.2f} in transformers (0.5B, all of it)".format(
            *vllm_half(), *transformers_half_billion()
        ),
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


@pytest.mark.parametrize(
    "made",
    [
        reductions,
        small_reductions,
        steps,
        bert,
        between_four,
        kv,
        overlap,
        spare,
        dispatch,
        multicast,
        serving,
        collectives,
    ],
)
def test_what_is_told_was_recorded(made: Any) -> None:
    told = {name: text(name) for name in PAGES}
    lines = made()
    assert [line for line in lines if not any(line in of for of in told.values())] == []


def test_the_page_of_serving_has_the_recorded_first_tokens() -> None:
    of = {(r["model"], r["arm"]): f"{r['ttft_ms']:.0f} ms" for r in rows("serving-h200.jsonl")}
    table = (ROOT / "docs/serving.md").read_text("utf-8").split("| | 7B | 0.5B |")[1]
    found = re.findall(r"^\| .+ \| (\d+ ms) \| (\d+ ms) \|$", table.split("\n\n")[0], re.M)
    arms = ("engine", "ours", "separate", "packed", "gpu")
    assert found == [(of["7b", arm], of["0.5b", arm]) for arm in arms]
    (ours, own, _), (ours_2, own_2, _) = map(vllm_first_tokens, ("f292fa4d", "488a1cdd"))
    told = f"{ours} ms, with vLLM's copies {own} ms; in another run {ours_2} and {own_2} ms"
    assert f"takes {told}" in text("docs/serving.md")
    half = "{:.2f} to {:.2f} times as fast".format(*vllm_half())
    assert f"With half of the blocks there, it comes {half}" in text("docs/serving.md")


def test_the_page_of_training_has_the_recorded_steps() -> None:
    page = text("docs/training.md")
    for line in steps()[2:]:
        cells = line.replace(" step, ", ", ").replace(" parameters", "").split(" | ")
        name, ours, nccl, speed = (*cells[:3], cells[3].split("speed ")[1])
        start = re.escape(f"| {name.removesuffix(' tokens')} tokens")
        model = "wide" if "2.9 B" in name else "1b"
        tokens = re.sub(r"\D", "", name.rsplit(", ", 1)[1])
        alone = trained()[model, tokens, "gather"][1] + " " if name.startswith("FSDP2") else ""
        told = rf"{start}[a-z ]* \| {speed} \| {alone}\| {ours} \| {nccl[5:]} \|"
        assert re.search(told, page), line


def test_every_number_of_the_first_screen_is_held() -> None:
    """A cell of the table has no number that no test above makes."""
    page = (ROOT / "README.md").read_text("utf-8")
    made_here = (steps, reductions, spare, kv, overlap, multicast)
    lines = [line for made in made_here for line in made()]
    table, below = page.split("## Performance")[1].split("Not everything")
    rows = re.findall(r"^\| ([a-z ]+) \| (.*?) \| (.*?) \| .* \|$", table, re.M)
    assert [row[0] for row in rows] == [
        *("training", "reductions", "plain tensors", "serving", "overlap", "multicast")
    ]
    for _, ours, beside in rows:
        found = f"{ours} | {beside}"
        assert any(line.split(" | 2 x")[0] in found for line in lines), found
    assert sum(line in " ".join(table.split()) for line in serving()) == 1
    lines = [line for made in (steps, between_four, spare, serving) for line in made()]
    assert sum(line in " ".join(below.split()) for line in lines) == 4


def test_the_plot_names_what_it_was_measured_on() -> None:
    row = json.loads((RESULTS / "cuda-h200-4.jsonl").read_text("utf-8").splitlines()[0])
    versions = row["versions"]
    page = text("README.md")
    assert versions["gpus"].startswith("4 x NVIDIA H200")
    assert f"NCCL {versions['nccl']} without NVLink multicast, {row['date'][:10]}" in page
