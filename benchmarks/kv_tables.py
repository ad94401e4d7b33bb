"""The tables of KV transfers, for tables.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from markdown_cells import RESULTS, Record, kib, table

from offcore.tools.records import read_records

PEERS = ("batch", "loop", "kernel")
# Layouts of gpu_kv_layouts.py, and how a row's bytes of a layer's page are told: of K and V apart.
LAYOUTS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "kv-apart": ("K and V apart", lambda page, layers: page // 2),
    "kv-tensors": ("K and V in tensors", lambda page, layers: page // 2),
    "tensors": ("a tensor per layer", lambda page, layers: page),
    "layers": ("layers outermost", lambda page, layers: page),
    "contiguous": ("contiguous over layers", lambda page, layers: page * layers),
    "page-first": ("page-first", lambda page, layers: page // 2),
    "chunks": ("chunks", lambda page, layers: page // 2),
}
MEMORIES = {
    "segments": ", expandable",
    "pool": ", pool",
    "adopted": ", adopted",
}
# Runs of gpu_kv_layouts.py, each on a host of its own, the oldest of each GPU first.
RUNS = {
    "H100 a": "cuda-kv-layouts-h100.jsonl",
    "H100 b": "cuda-kv-layouts-h100-quick.jsonl",
    "H100 c": "cuda-kv-layouts-h100-third.jsonl",
    "H200 a": "cuda-kv-layouts-h200-quick.jsonl",
    "H200 b": "cuda-kv-layouts-h200.jsonl",
    "H200 c": "cuda-kv-layouts-h200-third.jsonl",
}
Case = tuple[str, str, int, int]  # memory, layout, bytes of a page, blocks
CALLS = ("batch", "batch32", "batch64", "batch256", "loop")


def _kv(step: str) -> dict[tuple[int, str], dict[str, Record]]:
    """Rows by page and direction, then by who copied: of the most blocks that were measured."""
    found: dict[tuple[int, str], dict[str, Record]] = {}
    for row in read_records(RESULTS / "cuda-kv.jsonl"):
        most = 64 if row["page_bytes"] > 64 << 10 else 256
        if row["step"] == step and row["blocks"] == most:
            found.setdefault((row["page_bytes"], row["direction"]), {})[row["impl"]] = row
    return found


def _times(of: dict[str, Record], peer: str) -> str:
    return f"{of[peer]['time_us'] / of['offcore']['time_us']:.2f}x"


def _rate(of: dict[str, Record]) -> str:
    own = of["offcore"]
    return f"{own['gbps']:.1f} GB/s, {100 * own['gbps'] / own['ceiling_gbps']:.0f} %"


def pages(step: str, directions: Sequence[str]) -> list[str]:
    found = _kv(step)

    def cell(of: dict[str, Record]) -> str:
        return f"{_rate(of)}; " + ", ".join(_times(of, peer) for peer in PEERS)

    of_all = sorted({page for page, _ in found})
    body = ((kib(page), *(cell(found[page, one]) for one in directions)) for page in of_all)
    return table(("page of a layer", *directions), body)


def short() -> list[str]:
    """Loads, and both directions where a kernel is the peer."""
    found = _kv("pages")
    head = ("page", "load, % of the link", "one batch call", "a copy a page", "a kernel on 16 SMs",
            "both directions, a kernel")  # fmt: skip
    body = (
        (
            kib(page),
            _rate(found[page, "load"]),
            *(_times(found[page, "load"], peer) for peer in PEERS),
            _times(found[page, "both"], "kernel"),
        )
        for page in (8 << 10, 32 << 10, 64 << 10)
    )
    return table(head, body)


def _cases(name: str) -> dict[Case, dict[str, dict[str, Record]]]:
    """Rows by how the cache was allocated, layout, bytes of a page and blocks; then by direction,
    load or store, and by who copied."""
    found: dict[Case, dict[str, dict[str, Record]]] = {}
    for row in read_records(RESULTS / name):
        if row.get("step") in ("alone", *MEMORIES) and row.get("direction") in ("load", "store"):
            page = LAYOUTS[row["layout"]][1](row["page_bytes"], row["layers"])
            case = found.setdefault((row["step"], row["layout"], page, row["blocks"]), {})
            case.setdefault(row["direction"], {})[row["impl"]] = row
    return found


def _place(case: Case) -> tuple[int, ...]:
    step, layout, page, blocks = case
    return list(LAYOUTS).index(layout), ("alone", *MEMORIES).index(step), page, blocks


def _both(of: dict[str, dict[str, Record]], cell: Callable[[dict[str, Record]], str]) -> str:
    return " / ".join(cell(of[to]) for to in ("store", "load"))


def _rates(of: dict[str, dict[str, Record]], way: str) -> str:
    return _both(of, lambda one: f"{one[way]['gbps']:.1f}")


def _fastest(of: dict[str, Record]) -> float:
    """GB/s of the best way to copy pages by the driver's calls."""
    return max((of[peer]["gbps"] for peer in CALLS if peer in of), default=0.0)


def _name(case: Case) -> tuple[str, str, str]:
    step, layout, page, blocks = case
    return LAYOUTS[layout][0] + MEMORIES.get(step, ""), kib(page), str(blocks)


def _path(of: dict[str, dict[str, Record]]) -> str:
    """What `auto` chose for both directions."""
    [path] = {one["offcore"]["path"] for one in of.values()}
    return str(path)


def layouts(run: str) -> list[str]:
    """Each way to copy blocks of caches as engines allocate them, where all peers were measured."""

    def body() -> Iterator[Sequence[str]]:
        for case, of in sorted(_cases(RUNS[run]).items(), key=lambda one: _place(one[0])):
            if "torch" in of.get("load", {}):
                yield (
                    *_name(case), f"{_rates(of, 'offcore')} ({_path(of)})", _rates(of, "zero-sm"),
                    _both(of, lambda one: f"{_fastest(one):.1f}"),
                    _rates(of, "kernel"), _rates(of, "torch"),
                    _both(of, lambda one: f"{one['offcore']['submit_us']:.0f}"),
                )  # fmt: skip

    head = ("cache", "page", "blocks", "`auto` (path)", "`zero_sm`", "driver's calls",
            "kernel, 16 SMs", "torch", "call, us")  # fmt: skip
    return table(head, body())


def gemms() -> list[str]:
    """How much products of matrices were slowed during transfers, %."""

    def body() -> Iterator[Sequence[str]]:
        for run, name in RUNS.items():
            found: dict[tuple[str, str], str] = {}
            for row in read_records(RESULTS / name):
                slower = {row["impl"]: row.get("gemm_slowdown")}
                slower["one copy"] = row.get("ceiling_gemm_slowdown")
                for way, times in slower.items():
                    if times is not None:
                        found[row["direction"], way] = f"{100 * (times - 1):.1f}"
            if found:
                ways = ("offcore", "packed", "zero-sm", "kernel", "one copy")
                yield (
                    run,
                    *(" / ".join(found.get((to, way), "-") for to in ("store", "load"))
                      for way in ways),
                )  # fmt: skip

    head = ("run", "`auto`", "`pack`", "`zero_sm`", "kernel, 16 SMs", "one contiguous copy")
    return table(head, body())


def zero_sm() -> list[str]:
    """Transfers without SMs beside the best way to copy the same pages by the driver's calls."""
    cases: dict[Case, dict[str, str]] = {}
    for run, name in RUNS.items():
        for case, of in _cases(name).items():
            if {"zero-sm", "batch32"} <= of.get("load", {}).keys():
                cases.setdefault(case, {})[run] = _both(
                    of, lambda one: f"{one['zero-sm']['gbps'] / _fastest(one):.2f}"
                )

    body = (
        (*_name(case), *(cases[case].get(run, "-") for run in RUNS))
        for case in sorted(cases, key=_place)
    )
    return table(("cache", "page", "blocks", *RUNS), body)


def calls() -> list[str]:
    """The driver's calls and a kernel alone, GB/s: what a transfer could also be made of."""
    text = (RESULTS / "cuda-kv-calls-h100.txt").read_text("utf-8")
    body = []
    for name, lines in re.findall(r"^strided, (\w+ of \d+)K pages\n((?:  .*\n)+)", text, re.M):
        of = {
            line[:18].strip(): {
                cell.split()[0]: float(cell.split()[-1]) for cell in line[18:].split("|")[1:]
            }
            for line in lines.splitlines()
            if line.startswith(("  rows", "  pages", "  kernel"))
        }
        batches, kernels = of["pages apart"], of.get("kernel of", {})
        best = max(batches, key=lambda count: batches[count])
        direction, page = name.split(" of ")
        cells = [f"{of['rows of a copy']['28']:.1f}", f"{batches.get('32', '-')}"]
        cells += [f"{batches[best]:.1f} ({best})"]
        cells += [f"{kernels[count]:.1f}" if kernels else "-" for count in ("16", "64", "132")]
        body.append((f"{direction}, {page} KiB", *cells))
    head = ("64 blocks", "strided copies, one engine", "batches of 32", "best batches",
            "kernel of 16", "a workgroup a block (64)", "132")  # fmt: skip
    return table(head, iter(body))


def served() -> list[str]:
    """TTFT in ms and tokens a second of transformers, by who copies."""
    arms = ("gpu", "engine", "loop", "batch", "kernel", "ours")
    of: dict[tuple[str, int, int], dict[int, dict[str, Record]]] = {}
    computed: dict[tuple[str, int, int], Record] = {}
    for row in read_records(RESULTS / "serving-h200-models.jsonl"):
        case = (row["model"], row["prompt"], row["batch"])
        if row["arm"] == "recompute":
            computed[case] = row
        elif row["hit"] != "beside":
            of.setdefault(case, {}).setdefault(row["hit"], {})[row["arm"]] = row

    def body() -> Iterator[Sequence[str]]:
        for case, hits in of.items():
            model, prompt, batch = case
            name = {"llama8b": "Llama 8B"}.get(model, f"{model[:-1]}B")
            for hit, found in sorted(hits.items(), reverse=True):
                yield (
                    f"{name}, {batch} x {prompt:,}, {hit} %",
                    _cell(computed[case]),  # whatever the hits
                    *(_cell(found.get(arm)) for arm in arms),
                    _sooner(found["engine"], found["ours"]),
                )

    head = ("prompts, hits", "recompute", "GPU's cache", "engine's copies", "a copy per page",
            "one batch call", "kernel", "default", "speed-up")  # fmt: skip
    return table(head, body())


def _cell(row: Record | None) -> str:
    return f"{row['ttft_ms']:.0f}, {row['tokens_s']:.0f}" if row else "-"


def _sooner(own: Record, ours: Record) -> str:
    """How many times as fast: to the first token, tokens a second."""
    return f"{own['ttft_ms'] / ours['ttft_ms']:.2f}, {ours['tokens_s'] / own['tokens_s']:.2f}"


def vllm() -> list[str]:
    """TTFT in ms and tokens a second of an engine's copies and ours, each line of one run."""
    of: dict[tuple[Any, ...], dict[str, Record]] = {}
    computed: dict[tuple[Any, ...], Record] = {}
    for row in read_records(RESULTS / "serving-vllm-h200.jsonl"):
        case = (row["model"], row["prompt"], row["batch"], row["commit"])
        if row["arm"] == "recompute":
            computed[case] = row
        else:
            of.setdefault((*case[:3], row["hit"], case[3]), {})[row["arm"]] = row
    runs = list(dict.fromkeys(case[4] for case in of))

    def place(case: tuple[Any, ...]) -> tuple[Any, ...]:
        model, prompt, batch, hit, run = case
        return model != "7b", -batch, -prompt, -hit, runs.index(run)

    def body() -> Iterator[Sequence[str]]:
        for case in sorted(of, key=place):
            arms, (model, prompt, batch, hit, run) = of[case], case
            ours = arms["ours"]
            yield (
                f"{model[:-1]}B, {batch} x {prompt:,}, {hit} %", str(runs.index(run) + 1),
                _cell(computed.get((model, prompt, batch, run))),
                *(_cell(arms.get(arm)) for arm in ("gpu", "own", "ours", "zero_sm")),
                _sooner(arms["own"], ours),
                f"{100 * ours['same_tokens']:.0f} %",
            )  # fmt: skip

    head = ("prompts, hits", "run", "recompute", "GPU's cache", "vLLM's own copies", "ours",
            "ours, `zero_sm`", "speed-up", "same tokens")  # fmt: skip
    return table(head, body())
